"""Lists of products on the GPU: what the tests of all their kernels have in common."""

from __future__ import annotations

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.lists.grouped_gemm import plan as grouped_gemm_plan
from tests.support.ops import swap
from tests.support.products import LAYOUTS, List, cutlass_like, random_list

FORMS = pytest.mark.parametrize("transpose_lhs, transpose_rhs", LAYOUTS)
SCHEDULERS = pytest.mark.parametrize("scheduler", grouped_gemm_plan.SCHEDULERS)
TILES = pytest.mark.parametrize("tile", grouped_gemm_plan.TILES, ids=lambda t: str(t.tile_n))
on_gpu = dict(implementation="cuda")


def poison_memory(problems: List, itemsize: int = 4) -> None:
    """Fills memory that results may be given with NaN, so that nothing unwritten looks right.

    Args:
      problems: the call that comes next.
      itemsize: of the elements of its results, in bytes.
    """
    # All bits set are a NaN in every dtype.
    jax.block_until_ready(jnp.full(itemsize * problems.num_results(), 0xFF, jnp.uint8))


def any_list(rng: np.random.Generator, count: int, multiple: int, dtype, **scales) -> List:
    """As in CUTLASS's tests, every layout, with stacks and empty problems among them, and with c.

    Args:
      rng: where the operands come from.
      count: of problems.
      multiple: of which the sides are, see `cutlass_like`.
      dtype: of all operands.
      **scales: alpha and beta.
    """
    shapes = cutlass_like(rng, count, multiple)
    if count > 20:
        shapes[2], shapes[5], shapes[7] = (0, 8, 16), (40, 0, 24), (16, 8, 0)
        shapes[11] = (3, *shapes[11])
    layouts = rng.integers(0, 2, (2, count)).astype(bool)
    return random_list(
        rng,
        shapes,
        dtype,
        c_dtype=dtype,
        transpose_lhs=layouts[0].tolist(),
        transpose_rhs=layouts[1].tolist(),
        **scales,
    )


def update_in_place(problem: List, **options) -> list[jax.Array]:
    """The result of one problem whose c is donated; asserts that it is where c was."""
    call = jax.jit(
        lambda c, lhs, rhs: jgg.grouped_gemm(lhs, rhs, c, beta=problem.beta, **options, **on_gpu),
        donate_argnums=0,
    )
    donated = [jnp.asarray(problem.c[0])]
    pointer = donated[0].unsafe_buffer_pointer()
    outs = call(donated, problem.lhs, problem.rhs)
    assert outs[0].unsafe_buffer_pointer() == pointer
    return outs


def map_over_stacks(problems: List, **options) -> tuple[list[jax.Array], List]:
    """The results of two stacks under `vmap`, a matrix of each a call, and what they are of.

    The second stack's matrices are all multiplied with its first rhs.
    """
    shared = problems.rhs[1][0]

    @jax.jit
    def mapped(a, b, x):
        call = partial(jgg.grouped_gemm, **options, **on_gpu)
        return jax.vmap(lambda a, b, x: call([a, x], [b, shared]))(a, b, x)

    outs = mapped(problems.lhs[0], problems.rhs[0], problems.lhs[1])
    copies = np.stack([shared] * len(problems.rhs[1]))
    return outs, List(problems.lhs, [problems.rhs[0], copies], None)


def check_transposed(lhs: np.ndarray, rhs: np.ndarray, **options) -> None:
    """Asserts that one product has the same bits however its operands are stored."""
    (plain,) = jgg.grouped_gemm([lhs], [rhs], **options, **on_gpu)
    for a, b in product((False, True), repeat=2):
        transposes = dict(transpose_lhs=a, transpose_rhs=b)
        (out,) = jgg.grouped_gemm([swap(lhs, a)], [swap(rhs, b)], **transposes, **options, **on_gpu)
        np.testing.assert_array_equal(out, plain)


def check_in_a_scan(problems: List, **options) -> None:
    """Asserts that a loop, which XLA may capture in a CUDA graph, does what calls do."""
    call = partial(jgg.grouped_gemm, alpha=0.1, **options, **on_gpu)

    @jax.jit
    def powers(lhs, rhs):
        return jax.lax.scan(lambda x, _: (call(x, rhs), None), lhs, length=5)[0]

    x = problems.lhs
    for _ in range(5):
        x = [np.asarray(y) for y in call(x, problems.rhs)]
    for out, want in zip(powers(problems.lhs, problems.rhs), x, strict=True):
        np.testing.assert_array_equal(out, want)


def check_repeats(problems: List, times: int, **options) -> None:
    """Asserts that every call gives the same bits."""
    first = [np.asarray(out) for out in problems(**options, **on_gpu)]
    for _ in range(times):
        for out, want in zip(problems(**options, **on_gpu), first, strict=True):
            np.testing.assert_array_equal(out, want)
