"""This project's kernels through its public functions; its reference implementation on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from benchmarks.cases import Problem
from benchmarks.peers.base import Call, Role, dimension_numbers, jax_call, missing_module, on_gpu


@functools.cache
def ragged_product(problem: Problem, implementation: str) -> Callable[..., jax.Array]:
    """The jitted function of (lhs, rhs, group_sizes) that is measured."""
    import jax_grouped_gemm as jgg

    if problem.contracting:
        function = jgg.ragged_dot_general
        options = {"ragged_dot_dimension_numbers": dimension_numbers(problem)}
    else:
        function = jgg.ragged_dot
        options = {"transpose_rhs": problem.transpose_rhs}
    return jax.jit(
        functools.partial(
            function,
            precision=problem.precision,
            preferred_element_type=problem.out_dtype,
            implementation=implementation,
            **options,
        )
    )


class Ours:
    """`jax_grouped_gemm` with the implementation pinned, so that nothing falls back unnoticed."""

    name = "ours"
    role = Role.OURS
    slow = False

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        if reason := missing_module("jax_grouped_gemm"):
            return reason
        import jax_grouped_gemm as jgg

        if on_gpu() and (reason := jgg.unavailable_reason()):
            return f"{reason} (imported from {jgg.__file__})"
        return None

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Compiles the call."""
        implementation = "cuda" if on_gpu() else "reference"
        return jax_call(ragged_product(problem, implementation), lhs, rhs, group_sizes)
