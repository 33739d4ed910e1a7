"""This package's public functions, which run its kernels on a GPU and its reference on a CPU."""

import functools
from collections.abc import Callable

import jax

import jax_grouped_gemm as jgg
from benchmarks.harness.cases import Problem
from benchmarks.harness.peer import Peer, Role, dimension_numbers, jax_call, pinned_implementation


def product(problem: Problem, implementation: str | None) -> Callable[..., jax.Array]:
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
    return jax.jit(product(problem, implementation))


class Ours(Peer):
    """`jax_grouped_gemm` with a fixed implementation, so that nothing falls back unnoticed."""

    name = "ours"
    role = Role.OURS

    def prepare(self, problem, *operands):
        return jax_call(ragged_product(problem, pinned_implementation()), *operands)
