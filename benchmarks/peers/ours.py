"""This package's public functions, which run its kernels on a GPU and its reference on a CPU."""

import functools
from collections.abc import Callable

import jax

import jax_grouped_gemm as jgg
from benchmarks.harness.cases import Problem
from benchmarks.harness.peer import Peer, Role, dimension_numbers, jax_call, pinned_implementation


def product(problem: Problem, implementation: str | None) -> Callable[..., jax.Array]:
    options = dict(precision=problem.precision, preferred_element_type=problem.out_dtype)
    options |= dict(implementation=implementation)
    if problem.contracting:
        numbers = dimension_numbers(problem)
        of = functools.partial(jgg.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    else:
        of = functools.partial(jgg.ragged_dot, transpose_rhs=problem.transpose_rhs)
    return functools.partial(of, **options)


@functools.cache
def ragged_product(problem: Problem, implementation: str | None) -> Callable[..., jax.Array]:
    return jax.jit(product(problem, implementation))


class Ours(Peer):
    """`jax_grouped_gemm` with a fixed implementation, so that nothing falls back unnoticed."""

    name = "ours"
    role = Role.OURS

    def prepare(self, problem, *operands):
        return jax_call(ragged_product(problem, pinned_implementation()), *operands)
