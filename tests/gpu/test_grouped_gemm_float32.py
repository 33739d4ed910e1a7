"""Lists of products of float32 operands on the tensor cores, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.float32_errors import PRECISIONS, PRODUCT_ERROR
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


def check(problems: List, precision="highest", **options):
    """Runs the kernel on memory that holds NaN, and asserts that its results are right."""
    poison_memory(problems)
    outs = problems(precision=precision, **options, **on_gpu)
    problems.check(outs, product_error=PRODUCT_ERROR[precision])
    return outs


@TILES
@FORMS
@PRECISIONS
class TestEveryKernel:
    @pytest.mark.parametrize("result", [None, BF16, F16])
    @pytest.mark.parametrize("with_c", [False, True])
    def test_lists(
        self, tile, transpose_lhs, transpose_rhs, precision, result, with_c, only_tile, rng
    ):
        only_tile(tile)
        problems = random_list(
            rng,
            [*cutlass_like(rng, 10), (16, 8, 16), (2, 264, 200, 136), (520, 72, 1032)],
            F32,
            c_dtype=(result or F32) if with_c else None,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            alpha=0.5,
            beta=-2.0,
        )
        outs = check(problems, precision, preferred_element_type=result)
        assert all(out.dtype == (result or F32) for out in outs)

    @SCHEDULERS
    def test_edges(self, tile, transpose_lhs, transpose_rhs, precision, scheduler, only_tile, rng):
        """Sizes around those of tiles, boxes and consumers."""
        only_tile(tile)
        sides = [8, 56, 64, 72, 120, 128, 136, 248, 256, 264, 384, 392, 520]
        problems = random_list(
            rng,
            [tuple(rng.choice(sides, 3)) for _ in range(40)],
            F32,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
        )
        check(problems, precision, scheduler=scheduler)

    def test_rows_off_16_bytes(self, tile, transpose_lhs, transpose_rhs, precision, only_tile, rng):
        """Of the parts, whose rows TMA has to address: they are padded."""
        only_tile(tile)
        problems = random_list(
            rng,
            [(1, 1, 1), (37, 51, 129), (129, 7, 37), (255, 333, 257), (3, 36, 68, 132)],
            F32,
            c_dtype=F32,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            beta=0.5,
        )
        check(problems, precision)

    @pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
    def test_nothing_leaks_between_neighbours(
        self, tile, transpose_lhs, transpose_rhs, precision, value, only_tile, rng
    ):
        """What fills one matrix of a stack, or one problem of a list, stays there."""
        only_tile(tile)
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        shapes = [(3, 72, 40, 72), (72, 40, 72), (200, 104, 136)]
        problems = random_list(rng, shapes, F32, **options)
        clean = [np.asarray(out) for out in problems(precision=precision, **on_gpu)]
        problems.lhs[0][1], problems.rhs[1][:] = value, value
        outs = [np.asarray(out) for out in problems(precision=precision, **on_gpu)]
        np.testing.assert_array_equal(outs[0][::2], clean[0][::2])
        np.testing.assert_array_equal(outs[2], clean[2])
        if not np.isfinite(value):
            assert not np.isfinite(outs[0][1]).any() and not np.isfinite(outs[1]).any()


@PRECISIONS
@SCHEDULERS
@pytest.mark.parametrize("sort_problems", [False, True])
class TestLists:
    @pytest.mark.parametrize("multiple", [8, 1])
    @pytest.mark.parametrize("count", [1, 24, 79, 200])
    def test_random(self, precision, scheduler, sort_problems, count, multiple, rng):
        """As in CUTLASS's tests, every layout, with stacks and empty problems among them."""
        problems = any_list(
            rng,
            count,
            multiple,
            F32,
            alpha=[float(x) for x in rng.standard_normal(count)],
            beta=[float(x) for x in rng.choice([0.0, 1.0, -0.5], count)],
        )
        check(problems, precision, scheduler=scheduler, sort_problems=sort_problems)

    def test_the_example_of_cutlass(self, precision, scheduler, sort_problems, rng):
        problems = random_list(rng, FOUR_PROBLEMS, F32)
        check(problems, precision, scheduler=scheduler, sort_problems=sort_problems)

    def test_repeats_bitwise(self, precision, scheduler, sort_problems, rng):
        problems = random_list(rng, cutlass_like(rng, 60), F32)
        options = dict(scheduler=scheduler, sort_problems=sort_problems, precision=precision)
        check_repeats(problems, 5, **options)


@PRECISIONS
class TestRange:
    def test_each_matrix_has_its_own_scale(self, precision, rng):
        problems = random_list(rng, [(9, 136, 72, 200), (64, 64, 64), (64, 64, 64)], F32)
        for x in (*problems.lhs, *problems.rhs):
            exponents = rng.integers(-50, 50, (len(x), 1, 1) if x.ndim == 3 else ())
            x[...] = np.ldexp(np.clip(x, -3, 3), exponents)
        for i, out in enumerate(problems(precision=precision, **on_gpu)):
            out, exact = np.asarray(out), problems.exact(i)
            error = np.abs(out - exact.value)
            allowed = PRODUCT_ERROR[precision] + 2.0**-23 * exact.depth
            assert (error <= allowed * exact.magnitude).all()

    @pytest.mark.parametrize("exponents", [(-140, 125), (125, -140), (60, 60), (0, -144)])
    def test_extreme_scales(self, precision, exponents, rng):
        problems = random_list(rng, [(2, 136, 72, 200)], F32)
        for x, exponent in zip((problems.lhs[0], problems.rhs[0]), exponents, strict=True):
            x[...] = np.ldexp(np.clip(x, -3, 3), exponent)
        check(problems, precision)

    def test_magnitudes_within_a_matrix(self, precision, rng):
        problems = random_list(rng, [(136, 200, 200)], F32)
        for x in (problems.lhs[0], problems.rhs[0]):
            x[...] = np.copysign(2.0 ** rng.uniform(-13, 13, x.shape), x)
        check(problems, precision)

    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_non_finite_is_what_the_sum_of_products_is(self, precision, value, rng):
        problems = random_list(rng, [(264, 136, 200)], F32)
        for x in (problems.lhs[0], problems.rhs[0]):
            x.flat[rng.integers(0, x.size, 3)] = value
        (out,) = problems(precision=precision, **on_gpu)
        with np.errstate(invalid="ignore"):
            want = problems.exact(0).value
        out = np.asarray(out)
        np.testing.assert_array_equal(out[~np.isfinite(want)], want[~np.isfinite(want)])
        assert np.isfinite(out[np.isfinite(want)]).all()


@pytest.mark.parametrize("depth", [64, 1024, 4096])
def test_no_worse_than_a_float32_dot(depth, rng):
    """The mean square of the error relative to |lhs| |rhs|, and but for chance its maximum."""
    problems = random_list(rng, [(1024, depth, 1024)], F32)
    exact = problems.exact(0)
    (ours,) = problems(precision="highest", **on_gpu)
    dot = jnp.matmul(problems.lhs[0], problems.rhs[0], precision="highest")

    def errors(out):
        relative = np.abs(np.asarray(out).astype(np.float64) - exact.value) / exact.magnitude
        return np.array([relative.max(), np.sqrt(np.mean(relative**2))])

    assert (errors(ours) <= [1.2, 1] * errors(dot)).all(), (errors(ours), errors(dot))


@PRECISIONS
def test_who_computes_a_tile_has_no_say_in_its_sums(precision, rng):
    problems = random_list(rng, cutlass_like(rng, 50), F32)
    for out, other in zip(
        problems(scheduler="device", precision=precision, **on_gpu),
        problems(sort_problems=False, precision=precision, **on_gpu),
        strict=True,
    ):
        np.testing.assert_array_equal(out, other)


def test_beta_zero_never_reads_c(rng):
    problems = random_list(rng, [(136, 72, 200), (2, 24, 8, 16)], F32)
    poison = [np.full((136, 200), np.nan, F32), np.full((2, 24, 16), np.nan, F32)]
    call = jax.jit(partial(jgg.grouped_gemm, precision="highest", **on_gpu))
    outs = call(problems.lhs, problems.rhs, poison, beta=jnp.zeros(()))
    problems.check(outs, product_error=PRODUCT_ERROR["highest"])


@PRECISIONS
def test_traced_scales_of_each_matrix(precision, rng):
    problems = random_list(
        rng,
        [(4, 136, 72, 200), (64, 64, 64)],
        F32,
        c_dtype=F32,
        alpha=[rng.standard_normal(4, np.float32), np.float32(3.0)],
        beta=[rng.standard_normal(4, np.float32), np.float32(-1.0)],
    )
    call = jax.jit(
        lambda lhs, rhs, c, alpha, beta: jgg.grouped_gemm(
            lhs, rhs, c, alpha=alpha, beta=beta, precision=precision, **on_gpu
        )
    )
    outs = call(problems.lhs, problems.rhs, problems.c, problems.alpha, problems.beta)
    problems.check(outs, product_error=PRODUCT_ERROR[precision])


def test_donated_c_is_updated_in_place(rng):
    problems = random_list(rng, [(136, 72, 200)], F32, c_dtype=F32, beta=0.5)
    outs = update_in_place(problems, precision="highest")
    problems.check(outs, product_error=PRODUCT_ERROR["highest"])


@PRECISIONS
def test_stored_transposed_gives_the_same_bits(precision, rng):
    lhs, rhs = random(rng, (136, 72), F32), random(rng, (72, 200), F32)
    check_transposed(lhs, rhs, precision=precision)


@FORMS
def test_gradients(transpose_lhs, transpose_rhs, rng):
    """Those of the kernels against those of the reference."""
    shapes = [(136, 72, 200), (2, 64, 40, 264), (24, 0, 16)]
    transposes = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    problems = random_list(rng, shapes, F32, c_dtype=F32, **transposes)
    weights = [random(rng, x.shape, F32) for x in problems.c]

    def loss(implementation, operands, alpha, beta):
        outs = jgg.grouped_gemm(
            *operands, alpha=alpha, beta=beta, precision="highest",
            implementation=implementation, **transposes,
        )  # fmt: skip
        return sum(
            jnp.vdot(out, w, precision="highest") for out, w in zip(outs, weights, strict=True)
        )

    gradient = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    operands = (problems.lhs, problems.rhs, problems.c)
    got = jax.tree.leaves(gradient("cuda", operands, 0.5, -2.0))
    want = jax.tree.leaves(gradient("reference", operands, 0.5, -2.0))
    for x, y in zip(got, want, strict=True):
        norm = np.linalg.norm(np.float64(y))
        assert np.linalg.norm(np.float64(x) - np.float64(y)) <= 1e-4 * norm


@PRECISIONS
def test_vmap(precision, rng):
    problems = random_list(rng, [(5, 136, 72, 200), (5, 64, 40, 72)], F32)
    outs, every = map_over_stacks(problems, precision=precision)
    every.check(outs, product_error=PRODUCT_ERROR[precision])


def test_exported(rng):
    problems = random_list(rng, [(136, 72, 200), (64, 64, 64)], F32)

    @jax.jit
    def function(lhs, rhs):
        return jgg.grouped_gemm(lhs, rhs, precision="highest", **on_gpu)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (problems.lhs, problems.rhs)
    )
    exported = jax.export.export(
        function, platforms=["cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*shapes)
    outs = jax.export.deserialize(exported.serialize()).call(problems.lhs, problems.rhs)
    for out, want in zip(outs, function(problems.lhs, problems.rhs), strict=True):
        np.testing.assert_array_equal(out, want)


def test_in_a_scan(rng):
    problems = random_list(rng, [(64, 64, 64), (136, 136, 136)], F32)
    check_in_a_scan(problems, precision="highest")
