"""The kernels for lists of products against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.ops import random
from tests.support.products import FOUR_PROBLEMS, List, cutlass_like, random_list
from tests.support.products_on_gpu import (
    FORMS,
    SCHEDULERS,
    TILES,
    any_list,
    check_in_a_scan,
    check_repeats,
    check_transposed,
    map_over_stacks,
    on_gpu,
    poison_memory,
    update_in_place,
)

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@TILES
@FORMS
class TestEveryKernel:
    @pytest.mark.parametrize("dtype, result", [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)])
    @pytest.mark.parametrize("with_c", [False, True])
    def test_dtypes(
        self, tile, transpose_lhs, transpose_rhs, dtype, result, with_c, only_tile, rng
    ):
        only_tile(tile)
        problems = random_list(
            rng,
            [*cutlass_like(rng, 10), (16, 8, 16), (2, 264, 200, 136), (520, 72, 1032)],
            dtype,
            c_dtype=result if with_c else None,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            alpha=0.5,
            beta=-2.0,
        )
        poison_memory(problems)
        outs = problems(preferred_element_type=result, **on_gpu)
        assert all(out.dtype == result for out in outs)
        problems.check(outs)

    @SCHEDULERS
    def test_edges(self, tile, transpose_lhs, transpose_rhs, scheduler, only_tile, rng):
        """Sizes around those of tiles, boxes and consumers."""
        only_tile(tile)
        sides = [8, 56, 64, 72, 120, 128, 136, 248, 256, 264, 384, 392, 520]
        shapes = [tuple(rng.choice(sides, 3)) for _ in range(60)]
        problems = random_list(
            rng, shapes, BF16, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs
        )
        poison_memory(problems)
        problems.check(problems(scheduler=scheduler, **on_gpu))

    def test_off_16_bytes(self, tile, transpose_lhs, transpose_rhs, only_tile, rng):
        """Sizes that TMA cannot address are padded."""
        only_tile(tile)
        shapes = [(1, 1, 1), (37, 51, 129), (129, 7, 37), (255, 333, 257), (64, 64, 64)]
        problems = random_list(
            rng,
            shapes,
            BF16,
            c_dtype=BF16,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            beta=0.5,
        )
        poison_memory(problems)
        problems.check(problems(**on_gpu))

    def test_nothing_leaks_between_neighbours(
        self, tile, transpose_lhs, transpose_rhs, only_tile, rng
    ):
        """NaN in one matrix of a stack, or one problem of a list, stays there."""
        only_tile(tile)
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        shapes = [(3, 72, 40, 72), (72, 40, 72), (200, 104, 136)]
        problems = random_list(rng, shapes, BF16, **options)
        problems.lhs[0][1], problems.rhs[1][:] = np.nan, np.nan
        outs = [np.asarray(out) for out in problems(**on_gpu)]
        assert np.isnan(outs[0][1]).all() and np.isnan(outs[1]).all()
        rest = List(
            [problems.lhs[0][::2], problems.lhs[2]],
            [problems.rhs[0][::2], problems.rhs[2]],
            None,
            transposes={name: [x] * 2 for name, x in options.items()},
        )
        rest.check([outs[0][::2], outs[2]])


@SCHEDULERS
@pytest.mark.parametrize("sort_problems", [False, True])
class TestLists:
    @pytest.mark.parametrize("multiple", [8, 1])
    @pytest.mark.parametrize("count", [1, 24, 79, 300])
    def test_random(self, scheduler, sort_problems, count, multiple, rng):
        """As in CUTLASS's tests, every layout, with stacks and empty problems among them."""
        problems = any_list(
            rng,
            count,
            multiple,
            BF16,
            alpha=[float(x) for x in rng.standard_normal(count)],
            beta=[float(x) for x in rng.choice([0.0, 1.0, -0.5], count)],
        )
        poison_memory(problems)
        problems.check(problems(scheduler=scheduler, sort_problems=sort_problems, **on_gpu))

    def test_the_example_of_cutlass(self, scheduler, sort_problems, rng):
        problems = random_list(rng, FOUR_PROBLEMS, F16)
        problems.check(problems(scheduler=scheduler, sort_problems=sort_problems, **on_gpu))

    def test_many_tiles_for_each_processor(self, scheduler, sort_problems, rng):
        problems = random_list(rng, [(2600, 200, 5000), (3, 1032, 136, 2600)], BF16)
        problems.check(problems(scheduler=scheduler, sort_problems=sort_problems, **on_gpu))

    def test_repeats_bitwise(self, scheduler, sort_problems, rng):
        problems = random_list(rng, cutlass_like(rng, 60), BF16)
        check_repeats(problems, 10, scheduler=scheduler, sort_problems=sort_problems)


def test_both_schedulers_give_the_same_bits(rng):
    """Who computes a tile has no say in its sums."""
    problems = random_list(rng, cutlass_like(rng, 50), BF16)
    for out, other in zip(
        problems(scheduler="device", **on_gpu),
        problems(scheduler="host_precomputed", sort_problems=False, **on_gpu),
        strict=True,
    ):
        np.testing.assert_array_equal(out, other)


def test_other_result_dtype(rng):
    problems = random_list(rng, [(136, 72, 200)], BF16, c_dtype=F16, beta=0.5)
    (out,) = problems(preferred_element_type=F16, **on_gpu)
    assert out.dtype == F16
    problems.check([out])


def test_beta_zero_never_reads_c(rng):
    problems = random_list(rng, [(136, 72, 200), (2, 24, 8, 16)], BF16)
    poison = [np.full((136, 200), np.nan, BF16), np.full((2, 24, 16), np.nan, BF16)]
    call = jax.jit(partial(jgg.grouped_gemm, **on_gpu))
    problems.check(call(problems.lhs, problems.rhs, poison, beta=jnp.zeros(())))


def test_traced_scales_of_each_matrix(rng):
    problems = random_list(
        rng,
        [(4, 136, 72, 200), (64, 64, 64)],
        BF16,
        c_dtype=F32,
        alpha=[rng.standard_normal(4, np.float32), np.float32(3.0)],
        beta=[rng.standard_normal(4, np.float32), np.float32(-1.0)],
    )
    call = jax.jit(
        lambda lhs, rhs, c, alpha, beta: jgg.grouped_gemm(
            lhs, rhs, c, alpha=alpha, beta=beta, **on_gpu
        )
    )
    problems.check(call(problems.lhs, problems.rhs, problems.c, problems.alpha, problems.beta))


def test_donated_c_is_updated_in_place(rng):
    problems = random_list(rng, [(136, 72, 200)], BF16, c_dtype=BF16, beta=0.5)
    problems.check(update_in_place(problems))


def test_stored_transposed_gives_the_same_bits(rng):
    check_transposed(random(rng, (136, 72), BF16), random(rng, (72, 200), BF16))


@FORMS
def test_gradients(transpose_lhs, transpose_rhs, rng):
    """Those of the kernels against those of the reference."""
    shapes = [(136, 72, 200), (2, 64, 40, 264), (24, 0, 16)]
    transposes = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    problems = random_list(rng, shapes, BF16, c_dtype=BF16, **transposes)
    weights = [random(rng, x.shape, F32) for x in problems.c]

    def loss(implementation, dtype, operands, alpha, beta):
        lhs, rhs, c = jax.tree.map(lambda x: x.astype(dtype), operands)
        outs = jgg.grouped_gemm(
            lhs, rhs, c, alpha=alpha, beta=beta, preferred_element_type=F32,
            implementation=implementation, **transposes,
        )  # fmt: skip
        return sum(jnp.vdot(out, w) for out, w in zip(outs, weights, strict=True))

    gradient = jax.jit(jax.grad(loss, (2, 3, 4)), static_argnums=(0, 1))
    operands = jax.tree.map(lambda x: x.astype(F32), (problems.lhs, problems.rhs, problems.c))
    with jax.default_matmul_precision("highest"):
        got = jax.tree.leaves(gradient("cuda", BF16, operands, 0.5, -2.0))
        want = jax.tree.leaves(gradient("reference", F32, operands, 0.5, -2.0))
    for x, y in zip(got, want, strict=True):
        norm = np.linalg.norm(np.float64(y))
        assert np.linalg.norm(np.float64(x) - np.float64(y)) <= 1e-2 * norm


def test_vmap(rng):
    outs, every = map_over_stacks(random_list(rng, [(5, 136, 72, 200), (5, 64, 40, 72)], BF16))
    every.check(outs)


def test_in_a_scan(rng):
    check_in_a_scan(random_list(rng, [(64, 64, 64), (136, 136, 136)], BF16))
