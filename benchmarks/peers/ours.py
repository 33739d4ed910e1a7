"""This project's kernels through its public functions; its reference implementation on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from benchmarks.cases import Problem
from benchmarks.peers import variants
from benchmarks.peers.base import Call, Role, dimension_numbers, jax_call, missing_module, on_gpu

if TYPE_CHECKING:
    from jax_grouped_gemm._src.tile_config import TileConfig


@functools.cache
def ragged_product(
    problem: Problem, implementation: str, config: TileConfig | None = None
) -> Callable[..., jax.Array]:
    """The jitted function of (lhs, rhs, group_sizes) that is measured."""
    import jax_grouped_gemm as jgg

    if problem.contracting:
        function = jgg.ragged_dot_general
        options = {"ragged_dot_dimension_numbers": dimension_numbers(problem)}
    else:
        function = jgg.ragged_dot
        options = {"transpose_rhs": problem.transpose_rhs}
    product = functools.partial(
        function,
        precision=problem.precision,
        preferred_element_type=problem.out_dtype,
        implementation=implementation,
        **options,
    )
    return jax.jit(variants.with_config(product, config) if config else product)


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
        implementation = "cuda" if on_gpu() else "reference"
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
        op = "ragged_contracting" if problem.contracting else "ragged_noncontracting"
        config = variants.config(op, self._index)
        implementation = "cuda" if on_gpu() else "reference"
        call = jax_call(ragged_product(problem, implementation, config), lhs, rhs, group_sizes)
        call.detail = str(config)
        return call
