"""`jax.lax.ragged_dot`, which XLA expands to a dense product over masked copies of the operand."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from benchmarks.harness.cases import Problem, itemsize
from benchmarks.harness.peer import Call, NotOffered, Role, dimension_numbers, jax_call, on_gpu


def masked_copies_bytes(problem: Problem) -> int:
    """Temporary memory of the expansion: every ragged operand once for each group."""
    columns = problem.k + problem.n if problem.contracting else problem.k
    return problem.groups * problem.m * columns * itemsize(problem.dtype)


@functools.cache
def ragged_product(problem: Problem) -> Callable[..., jax.Array]:
    """The jitted function of (lhs, rhs, group_sizes) that is measured."""
    return jax.jit(
        functools.partial(
            jax.lax.ragged_dot_general,
            ragged_dot_dimension_numbers=dimension_numbers(problem),
            precision=problem.precision,
            preferred_element_type=problem.out_dtype,
        )
    )


class Stock:
    """JAX's own ragged dot with default flags."""

    name = "stock"
    role = Role.GROUPED
    slow = True

    def unavailable_reason(self) -> str | None:
        """Always available."""
        return None

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Compiles the call, unless its masked copies cannot fit."""
        if on_gpu():
            stats = jax.local_devices()[0].memory_stats()
            free = stats["bytes_limit"] - stats["bytes_in_use"]
            if (needed := masked_copies_bytes(problem)) > 0.9 * free:
                raise NotOffered(
                    f"its masked copies need {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
                )
        return jax_call(ragged_product(problem), lhs, rhs, group_sizes)
