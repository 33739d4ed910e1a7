"""The kernels for lists of products, of every dtype of operands, against float64 and complex128."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import BF16, F16, F32
from tests.support.families import (
    DOUBLE,
    FAMILIES,
    FLOAT32,
    SIXTEEN_BITS,
    TENSOR_FLOAT,
    check_list,
    each,
    each_kernel,
    label,
    run_list,
)
from tests.support.ops import swap
from tests.support.products import (
    FORMS,
    FOUR_PROBLEMS,
    LAYOUTS,
    List,
    any_list,
    cutlass_like,
    draw,
    random_list,
)

TYPES = [
    (kernel, result)
    for family in (*SIXTEEN_BITS, *FLOAT32)
    for kernel in family.kernels
    for result in ((None, BF16, F16) if family in FLOAT32 else (None, F32))
]
# The FP64 kernels have only one scheduler.
SCHEDULED = [
    (family, scheduler)
    for family in (*SIXTEEN_BITS, *FLOAT32, *DOUBLE)
    for scheduler in family.schedulers
]
# Some sizes are multiples of 16 bytes in every dtype, and others are not.
SHAPES = [(136, 72, 200), (2, 24, 8, 16), (137, 71, 201)]


@FORMS
class TestEveryTile:
    @pytest.mark.parametrize("with_c", [False, True])
    @pytest.mark.parametrize("family, result", TYPES, ids=label, indirect=["family"])
    def test_dtypes(self, family, result, with_c, transpose_lhs, transpose_rhs, rng):
        dtype = result or family.dtype
        problems = random_list(
            rng,
            [*cutlass_like(rng, 10), (16, 8, 16), (2, 264, 200, 136), (520, 72, 1032)],
            family.dtype,
            c_dtype=dtype if with_c else None,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            alpha=0.5,
            beta=-2.0,
        )
        outs = check_list(family, problems, preferred_element_type=result)
        assert all(out.dtype == dtype for out in outs)

    @pytest.mark.parametrize("scheduler", FLOAT32[0].schedulers)
    @each_kernel(*TENSOR_FLOAT)
    def test_edges(self, family, scheduler, transpose_lhs, transpose_rhs, rng):
        """Sizes are around the sizes of tiles, boxes and halves of tiles."""
        sides = [8, 56, 64, 72, 120, 128, 136, 248, 256, 264, 384, 392, 520]
        shapes = [tuple(rng.choice(sides, 3)) for _ in range(60)]
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        check_list(family, random_list(rng, shapes, family.dtype, **options), scheduler=scheduler)

    @each_kernel(*TENSOR_FLOAT)
    def test_off_16_bytes(self, family, transpose_lhs, transpose_rhs, rng):
        """Rows that TMA cannot address, of operands or of their parts, are padded."""
        shapes = [(1, 1, 1), (37, 51, 129), (129, 7, 37), (255, 333, 257), (64, 64, 64)]
        problems = random_list(
            rng,
            [*shapes, (3, 36, 68, 132)],
            family.dtype,
            c_dtype=family.dtype,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            beta=0.5,
        )
        check_list(family, problems)

    @each_kernel(*FAMILIES)
    def test_nothing_leaks_between_neighbours(self, family, transpose_lhs, transpose_rhs, rng):
        """Values of one matrix of a stack, or of one problem of a list, affect no other result."""
        options = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        shapes = [(3, 72, 40, 72), (3, 77, 21, 71), (72, 40, 72), (199, 101, 137)]
        problems = random_list(rng, shapes, family.dtype, **options)
        clean = [np.asarray(out) for out in check_list(family, problems)]
        for value in (np.nan, np.inf, 3e38):
            problems.lhs[0][1], problems.lhs[1][1], problems.rhs[2][:] = value, value, value
            outs = [np.asarray(out) for out in run_list(family, problems)]
            for i in (0, 1):
                np.testing.assert_array_equal(outs[i][::2], clean[i][::2])
            np.testing.assert_array_equal(outs[3], clean[3])
            if not np.isfinite(value):
                for out in (outs[0][1], outs[1][1], outs[2]):
                    assert not np.isfinite(out).any()


@pytest.mark.parametrize("sort_problems", [False, True])
@pytest.mark.parametrize("family, scheduler", SCHEDULED, ids=label, indirect=["family"])
class TestLists:
    # The longest lists need more than one launch, which takes 79 problems, or 128 matrices of FP64.
    @pytest.mark.parametrize("multiple", [8, 1])
    @pytest.mark.parametrize("count", [1, 24, 79, 128, 300])
    def test_random(self, family, scheduler, sort_problems, count, multiple, rng):
        """Lists have every layout, stacks and empty problems, as in CUTLASS's tests."""
        problems = any_list(
            rng,
            count,
            multiple,
            family.dtype,
            alpha=[family.number(rng) for _ in range(count)],
            beta=[float(x) for x in rng.choice([0.0, 1.0, -0.5], count)],
        )
        check_list(family, problems, scheduler=scheduler, sort_problems=sort_problems)

    def test_the_example_of_cutlass(self, family, scheduler, sort_problems, rng):
        problems = random_list(rng, FOUR_PROBLEMS, family.dtype)
        check_list(family, problems, scheduler=scheduler, sort_problems=sort_problems)

    def test_repeats_bitwise(self, family, scheduler, sort_problems, rng):
        problems = random_list(
            rng, cutlass_like(rng, 60, 5 if family.is_double else 8), family.dtype
        )
        options = dict(scheduler=scheduler, sort_problems=sort_problems)
        first = [np.asarray(out) for out in run_list(family, problems, **options)]
        for _ in range(10):
            for out, want in zip(run_list(family, problems, **options), first, strict=True):
                np.testing.assert_array_equal(out, want)


@each(*TENSOR_FLOAT)
class TestSchedulers:
    @pytest.mark.parametrize("scheduler", FLOAT32[0].schedulers)
    @pytest.mark.parametrize("sort_problems", [False, True])
    def test_many_tiles_for_each_processor(self, family, scheduler, sort_problems, rng):
        problems = random_list(rng, [(2600, 200, 5000), (3, 1032, 136, 2600)], family.dtype)
        check_list(family, problems, scheduler=scheduler, sort_problems=sort_problems)

    def test_who_computes_a_tile_has_no_say_in_its_sums(self, family, rng):
        problems = random_list(rng, cutlass_like(rng, 50), family.dtype)
        for out, other in zip(
            run_list(family, problems, scheduler="device"),
            run_list(family, problems, scheduler="host_precomputed", sort_problems=False),
            strict=True,
        ):
            np.testing.assert_array_equal(out, other)


def test_other_result_dtype(rng):
    problems = random_list(rng, [(136, 72, 200)], BF16, c_dtype=F16, beta=0.5)
    (out,) = check_list(SIXTEEN_BITS[0], problems, preferred_element_type=F16)
    assert out.dtype == F16


@each(*FAMILIES)
class TestScales:
    def test_beta_zero_never_reads_c(self, family, rng):
        problems = random_list(rng, SHAPES, family.dtype)
        poison = [np.full((*g, m, n), np.nan, family.dtype) for *g, m, _, n in SHAPES]
        call = jax.jit(partial(jgg.grouped_gemm, **family.options))
        family.check_list(problems, call(problems.lhs, problems.rhs, poison, beta=jnp.zeros(())))

    def test_traced_ones_of_each_matrix(self, family, rng):
        problems = random_list(
            rng,
            [(4, 136, 72, 200), (64, 64, 64)],
            family.dtype,
            c_dtype=family.scale_dtype,
            alpha=[family.scales(rng, 4), family.scales(rng)],
            beta=[family.scales(rng, 4), family.scales(rng)],
        )
        call = jax.jit(
            lambda lhs, rhs, c, alpha, beta: jgg.grouped_gemm(
                lhs, rhs, c, alpha=alpha, beta=beta, **family.options
            )
        )
        operands = problems.lhs, problems.rhs, problems.c, problems.alpha, problems.beta
        family.check_list(problems, call(*operands))


@each(*FAMILIES)
class TestMemory:
    def test_donated_c_is_updated_in_place(self, family, rng):
        shapes = [family.unpadded(137, 71, 201)]
        problems = random_list(rng, shapes, family.dtype, c_dtype=family.dtype, beta=0.5)
        call = jax.jit(
            lambda c, lhs, rhs: jgg.grouped_gemm(lhs, rhs, c, beta=0.5, **family.options),
            donate_argnums=0,
        )
        donated = [jnp.asarray(problems.c[0])]
        pointer = donated[0].unsafe_buffer_pointer()
        outs = call(donated, problems.lhs, problems.rhs)
        assert outs[0].unsafe_buffer_pointer() == pointer
        family.check_list(problems, outs)

    def test_stored_transposed_gives_the_same_bits(self, family, rng):
        m, k, n = family.unpadded(137, 71, 201)
        lhs, rhs = family.draw(rng, (m, k)), family.draw(rng, (k, n))
        (plain,) = jgg.grouped_gemm([lhs], [rhs], **family.options)
        for a, b in LAYOUTS:
            transposes = dict(transpose_lhs=a, transpose_rhs=b, **family.options)
            (out,) = jgg.grouped_gemm([swap(lhs, a)], [swap(rhs, b)], **transposes)
            np.testing.assert_array_equal(out, plain)


class TestTransformations:
    @FORMS
    @each(SIXTEEN_BITS[0], FLOAT32[-1], DOUBLE[0], DOUBLE[-1])
    def test_gradients(self, family, transpose_lhs, transpose_rhs, rng):
        """Compares the kernels' gradients with the reference's in float32 or wider."""
        dtype, wide = family.dtype, F32 if family.dtype == BF16 else family.dtype
        transposes = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        shapes = [(136, 72, 200), (2, 64, 41, 263), (24, 0, 16)]
        problems = random_list(rng, shapes, dtype, c_dtype=dtype, **transposes)
        weights = [draw(rng, x.shape, wide) for x in problems.c]

        def loss(options, dtype, operands, alpha, beta):
            lhs, rhs, c = jax.tree.map(lambda x: x.astype(dtype), operands)
            outs = jgg.grouped_gemm(
                lhs, rhs, c, alpha=alpha, beta=beta, preferred_element_type=wide,
                **dict(options), **transposes,
            )  # fmt: skip
            return sum(jnp.vdot(w, out).real for out, w in zip(outs, weights, strict=True))

        gradient = jax.jit(jax.grad(loss, (2, 3, 4)), static_argnums=(0, 1))
        operands = jax.tree.map(lambda x: x.astype(wide), (problems.lhs, problems.rhs, problems.c))
        reference = family.options | dict(implementation="xla")
        with jax.default_matmul_precision("highest"):
            got = gradient(tuple(family.options.items()), dtype, operands, 0.5, -2.0)
            want = gradient(tuple(reference.items()), wide, operands, 0.5, -2.0)
        allowed = {BF16: 1e-2, F32: 1e-4}.get(dtype, 1e-11)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            x, y = (np.asarray(z, np.complex128) for z in (x, y))
            assert np.linalg.norm(x - y) <= allowed * np.linalg.norm(y)

    @each(*FAMILIES)
    def test_vmap(self, family, rng):
        """Each call multiplies a matrix of two stacks; the second stack shares one rhs."""
        problems = random_list(rng, [(5, 137, 72, 200), (5, 64, 40, 73)], family.dtype)
        shared = problems.rhs[1][0]

        @jax.jit
        def mapped(a, b, x):
            call = partial(jgg.grouped_gemm, **family.options)
            return jax.vmap(lambda a, b, x: call([a, x], [b, shared]))(a, b, x)

        outs = mapped(problems.lhs[0], problems.rhs[0], problems.lhs[1])
        copies = np.stack([shared] * len(problems.rhs[1]))
        family.check_list(List(problems.lhs, [problems.rhs[0], copies], None), outs)

    @each(*FAMILIES)
    def test_in_a_scan(self, family, rng):
        """A loop, which XLA may capture in a CUDA graph, gives the results of separate calls."""
        problems = random_list(rng, [(64, 64, 64), (136, 136, 136), (63, 63, 63)], family.dtype)
        call = partial(jgg.grouped_gemm, alpha=0.1, **family.options)

        @jax.jit
        def powers(lhs, rhs):
            return jax.lax.scan(lambda x, _: (call(x, rhs), None), lhs, length=5)[0]

        x = problems.lhs
        for _ in range(5):
            x = [np.asarray(y) for y in call(x, problems.rhs)]
        for out, want in zip(powers(problems.lhs, problems.rhs), x, strict=True):
            np.testing.assert_array_equal(out, want)
