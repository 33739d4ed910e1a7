"""tokamax's Mosaic-GPU ragged dot, where it is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from benchmarks.cases import Problem
from benchmarks.peers.base import (
    Call,
    Role,
    dimension_numbers,
    jax_call,
    missing_module,
    without_gpu,
)


@functools.cache
def ragged_product(problem: Problem) -> Callable[..., jax.Array]:
    """The jitted function of (lhs, rhs, group_sizes) that is measured."""
    import tokamax

    return jax.jit(
        functools.partial(
            tokamax.ragged_dot_general,
            ragged_dot_dimension_numbers=dimension_numbers(problem),
            preferred_element_type=problem.out_dtype,
            implementation="mosaic",
        )
    )


class Tokamax:
    """With the configuration that tokamax's own tables or heuristics give, not autotuned here."""

    name = "tokamax"
    role = Role.GROUPED
    slow = False

    def unavailable_reason(self) -> str | None:
        """Whether tokamax or a GPU is missing."""
        return missing_module("tokamax") or without_gpu()

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Compiles the call."""
        return jax_call(ragged_product(problem), lhs, rhs, group_sizes)
