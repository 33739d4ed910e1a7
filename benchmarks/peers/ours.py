"""This project's kernels through its public functions; its reference implementation on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from benchmarks.harness.cases import Problem
from benchmarks.harness.peer import (
    Call,
    Role,
    dimension_numbers,
    jax_call,
    missing_module,
    on_gpu,
    pinned_implementation,
)
from benchmarks.peers import variants


def product(problem: Problem, implementation: str | None) -> Callable[..., jax.Array]:
    """The function of (lhs, rhs, group_sizes)."""
    import jax_grouped_gemm as jgg

    if problem.contracting:
        function = jgg.ragged_dot_general
        options = {"ragged_dot_dimension_numbers": dimension_numbers(problem)}
    else:
        function = jgg.ragged_dot
        options = {"transpose_rhs": problem.transpose_rhs}
    return functools.partial(
        function,
        precision=problem.precision,
        preferred_element_type=problem.out_dtype,
        implementation=implementation,
        **options,
    )


@functools.cache
def ragged_product(problem: Problem, implementation: str | None) -> Callable[..., jax.Array]:
    """The same, jitted: what is measured."""
    return jax.jit(product(problem, implementation))


def kernels_unavailable_reason() -> str | None:
    """Why our kernels cannot run here, or None; without a GPU the reference is measured."""
    if reason := missing_module("jax_grouped_gemm"):
        return reason
    import jax_grouped_gemm as jgg

    if on_gpu() and (reason := jgg.unavailable_reason()):
        return f"{reason} (imported from {jgg.__file__})"
    return None


class Ours:
    """`jax_grouped_gemm` with the implementation pinned, so that nothing falls back unnoticed."""

    name = "ours"
    role = Role.OURS
    slow = False

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return kernels_unavailable_reason()

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Compiles the call."""
        implementation = pinned_implementation()
        return jax_call(ragged_product(problem, implementation), lhs, rhs, group_sizes)


class Variant(Ours):
    """The same in one of the compiled configurations, whichever the plan would choose."""

    role = Role.VARIANT

    def __init__(self, index: int):
        self.name = f"config{index}"
        self._index = index

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Compiles the call."""
        implementation = pinned_implementation()
        operands = lhs, rhs, group_sizes
        function, config = variants.configured(
            product(problem, implementation), self._index, *operands
        )
        call = jax_call(jax.jit(function), *operands)
        call.detail = str(config)
        return call
