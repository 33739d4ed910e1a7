"""`jax.lax.ragged_dot`, which XLA expands to a dense product over masked copies of the operand."""

import functools
from collections.abc import Callable

import jax

from benchmarks.harness.cases import Problem, itemsize
from benchmarks.harness.peer import NotOffered, Peer, Role, dimension_numbers, jax_call, on_gpu


@functools.cache
def ragged_product(problem: Problem) -> Callable[..., jax.Array]:
    """Returns the jitted function of (lhs, rhs, group_sizes) to measure."""
    options = dict(precision=problem.precision, preferred_element_type=problem.out_dtype)
    options |= dict(ragged_dot_dimension_numbers=dimension_numbers(problem))
    return jax.jit(functools.partial(jax.lax.ragged_dot_general, **options))


class Stock(Peer):
    """JAX's own ragged dot with default flags."""

    name = "stock"
    role = Role.GROUPED
    slow = True

    def prepare(self, problem, *operands):
        """Compiles the call, unless its copies of operands for each group cannot fit."""
        if on_gpu():
            stats = jax.local_devices()[0].memory_stats()
            free = stats["bytes_limit"] - stats["bytes_in_use"]
            columns = problem.k + problem.n if problem.contracting else problem.k
            needed = problem.groups * problem.m * columns * itemsize(problem.dtype)
            if needed > 0.9 * free:
                raise NotOffered(
                    f"its masked copies need {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"
                )
        return jax_call(ragged_product(problem), *operands)
