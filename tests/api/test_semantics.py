"""The documented rules of the ops, one by one, for any group sizes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.ops import BOTH_OPS, CONTRACTING, NONCONTRACTING, random, swap

pytestmark = pytest.mark.usefixtures("either_form")

M, K, N, G = 37, 12, 20, 5
# These sizes show every rule: an empty group, boundaries inside tiles, and a tail of 5 rows.
SIZES = np.array([9, 0, 1, 15, 7], np.int32)
TAIL = slice(int(SIZES.sum()), M)

POISON = pytest.mark.parametrize("poison", [np.nan, np.inf])


def operands(op, rng, dtype=np.float32, *, m=M, k=K, n=N, g=G):
    """Returns random lhs, rhs and cotangent of `op`."""
    return [random(rng, shape, dtype) for shape in op.shapes(m, k, n, g)]


class TestResults:
    @BOTH_OPS
    @pytest.mark.parametrize("transpose_rhs", [False, True])
    @pytest.mark.parametrize("transpose_lhs", [False, True])
    def test_any_major(self, op, transpose_lhs, transpose_rhs, rng):
        lhs, rhs, cotangent = operands(op, rng)
        majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
        inputs = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs), SIZES
        oracle.check(op.call(*inputs, **majors), op.exact(lhs, rhs, SIZES))
        d_lhs, d_rhs = op.cotangents(*inputs, cotangent, **majors)
        exact_lhs, exact_rhs = op.exact_cotangents(lhs, rhs, SIZES, cotangent)
        oracle.check(swap(d_lhs, transpose_lhs), exact_lhs)
        oracle.check(swap(d_rhs, transpose_rhs), exact_rhs)

    @BOTH_OPS
    def test_any_group_sizes(self, op, rng):
        lhs, rhs, cotangent = operands(op, rng)
        for _ in range(100):
            sizes = sizes_of.any_kind(rng, M, G)
            oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))
            got = op.cotangents(lhs, rhs, sizes, cotangent)
            oracle.check_all(got, op.exact_cotangents(lhs, rhs, sizes, cotangent))

    @BOTH_OPS
    def test_all_patterns_of_empty_groups(self, op, rng):
        lhs, rhs, _ = operands(op, rng, g=8)
        for sizes in sizes_of.zero_patterns(rng, M, 8):
            oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    @pytest.mark.parametrize("g", [1, 300])
    def test_one_group_and_more_groups_than_rows(self, op, g, rng):
        lhs, rhs, _ = operands(op, rng, g=g)
        sizes = sizes_of.zipf(rng, M, g)
        oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    @pytest.mark.parametrize("m, k, n", [(1, 1, 1), (M, 1, 3), (130, 259, 1), (200, 8, 133)])
    def test_odd_shapes(self, op, m, k, n, rng):
        lhs, rhs, _ = operands(op, rng, m=m, k=k, n=n)
        sizes = sizes_of.multinomial(rng, m, G)
        oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    @pytest.mark.parametrize("m, k, n, g", [(0, K, N, G), (M, 0, N, G), (M, K, 0, G), (M, K, N, 0)])
    def test_empty_dimensions(self, op, m, k, n, g, rng):
        lhs, rhs, cotangent = operands(op, rng, m=m, k=k, n=n, g=g)
        sizes = np.full(g, 3, np.int32)
        out = op.call(lhs, rhs, sizes)
        np.testing.assert_array_equal(out, np.zeros(op.shapes(m, k, n, g)[2]), strict=False)
        for actual, primal in zip(
            op.cotangents(lhs, rhs, sizes, cotangent), (lhs, rhs), strict=True
        ):
            np.testing.assert_array_equal(actual, np.zeros_like(primal))

    def test_agrees_with_jax(self, rng):
        """`jgg.ragged_dot` takes the arguments of `jax.lax.ragged_dot`, with equal results."""
        lhs, rhs, cotangent = operands(NONCONTRACTING, rng)

        def results(ragged_dot):
            out, vjp = jax.vjp(
                lambda lhs, rhs: ragged_dot(lhs, rhs, jnp.array(SIZES), "highest", np.float32),
                lhs,
                rhs,
            )
            return out, *vjp(cotangent)

        for ours, jaxs in zip(results(jgg.ragged_dot), results(jax.lax.ragged_dot), strict=True):
            assert ours.dtype == jaxs.dtype
            np.testing.assert_allclose(ours, jaxs, rtol=1e-5, atol=1e-5)

    def test_transpose_rhs_of_ragged_dot(self, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        out = jgg.ragged_dot(lhs, swap(rhs, True), SIZES, transpose_rhs=True)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, SIZES))

    @BOTH_OPS
    def test_same_inputs_give_the_same_bits(self, op, rng):
        lhs, rhs, cotangent = operands(op, rng)
        first = [op.call(lhs, rhs, SIZES), *op.cotangents(lhs, rhs, SIZES, cotangent)]
        again = [op.call(lhs, rhs, SIZES), *op.cotangents(lhs, rhs, SIZES, cotangent)]
        for a, b in zip(first, again, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    @BOTH_OPS
    def test_default_implementation_off_the_gpu_is_the_reference(self, op, rng):
        lhs, rhs, _ = operands(op, rng, ml_dtypes.bfloat16)
        default, reference = (
            np.asarray(op.call(lhs, rhs, SIZES, implementation=i)) for i in (None, "xla")
        )
        assert default.tobytes() == reference.tobytes()


class TestTailAndEmptyGroups:
    def test_tail_rows_are_zero_in_output_and_gradient(self, rng):
        lhs, rhs, cotangent = operands(NONCONTRACTING, rng)
        assert np.all(np.asarray(NONCONTRACTING.call(lhs, rhs, SIZES))[TAIL] == 0)
        d_lhs, _ = NONCONTRACTING.cotangents(lhs, rhs, SIZES, cotangent)
        assert np.all(np.asarray(d_lhs)[TAIL] == 0)
        assert np.all(np.any(np.asarray(d_lhs)[: TAIL.start] != 0, axis=1))
        lhs, rhs, cotangent = operands(CONTRACTING, rng)
        for gradient in CONTRACTING.cotangents(lhs, rhs, SIZES, cotangent):
            assert np.all(np.asarray(gradient)[TAIL] == 0)

    def test_empty_group_gives_a_zero_slice(self, rng):
        lhs, rhs, _ = operands(CONTRACTING, rng)
        out = np.asarray(CONTRACTING.call(lhs, rhs, SIZES))
        np.testing.assert_array_equal(np.any(out != 0, axis=(1, 2)), SIZES > 0)
        lhs, rhs, cotangent = operands(NONCONTRACTING, rng)
        _, d_rhs = NONCONTRACTING.cotangents(lhs, rhs, SIZES, cotangent)
        np.testing.assert_array_equal(np.any(np.asarray(d_rhs) != 0, axis=(1, 2)), SIZES > 0)


class TestPoison:
    """NaN and Inf stay in their own group: other groups have the same bits as without them."""

    @BOTH_OPS
    @POISON
    def test_in_the_tail_goes_nowhere(self, op, poison, rng):
        lhs, rhs, cotangent = operands(op, rng)
        clean = [op.call(lhs, rhs, SIZES), *op.cotangents(lhs, rhs, SIZES, cotangent)]
        for array in (lhs, rhs, cotangent):
            if len(array) == M:
                array[TAIL] = poison
        poisoned = [op.call(lhs, rhs, SIZES), *op.cotangents(lhs, rhs, SIZES, cotangent)]
        for a, b in zip(poisoned, clean, strict=True):
            np.testing.assert_array_equal(a, b)

    @BOTH_OPS
    @POISON
    @pytest.mark.parametrize("group", [0, 1, 3, 4])
    def test_of_a_group_stays_in_it(self, op, poison, group, rng):
        """NaN and Inf of a group reach only its own results. Group 1 is empty and has none."""
        lhs, rhs, cotangent = operands(op, rng)
        clean = [op.call(lhs, rhs, SIZES), *op.cotangents(lhs, rhs, SIZES, cotangent)]
        end = int(SIZES[: group + 1].sum())
        rows = slice(end - int(SIZES[group]), end)
        for array in (lhs, rhs, cotangent):
            array[rows if len(array) == M else group] = poison
        poisoned = [op.call(lhs, rhs, SIZES), *op.cotangents(lhs, rhs, SIZES, cotangent)]
        for a, b in zip(poisoned, clean, strict=True):
            a, b = np.array(a), np.array(b)
            own = rows if len(a) == M else group
            if SIZES[group]:
                assert not np.isfinite(a[own]).any()
                a[own] = b[own] = 0
            np.testing.assert_array_equal(a, b)

    @BOTH_OPS
    @POISON
    def test_outside_the_window_goes_nowhere(self, op, poison, rng):
        """NaN and Inf in rows outside of the window, which has groups 3 and 4, reach no result."""
        lhs, rhs, cotangent = operands(op, rng, g=2 if op is NONCONTRACTING else G)
        clean = [op.call(lhs, rhs, SIZES, 3), *op.cotangents(lhs, rhs, SIZES, cotangent, 3)]
        for array in (lhs, rhs, cotangent):
            if len(array) == M:
                array[: SIZES[:3].sum()] = array[TAIL] = poison
            else:
                array[2:] = poison
        poisoned = [op.call(lhs, rhs, SIZES, 3), *op.cotangents(lhs, rhs, SIZES, cotangent, 3)]
        for a, b in zip(poisoned, clean, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_non_finite_values_of_a_valid_row_arrive(self, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        lhs[0, 3], lhs[12, 0] = np.nan, np.inf
        oracle.check(
            NONCONTRACTING.call(lhs, rhs, SIZES), oracle.ragged_noncontracting(lhs, rhs, SIZES)
        )


class TestGroupSizes:
    @BOTH_OPS
    @pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
    def test_any_integer_dtype(self, op, dtype, rng):
        # 110 + 110 + 30 overflows int8: the running sum must not be taken in the sizes' dtype.
        lhs, rhs, _ = operands(op, rng, m=260, g=4)
        sizes = np.array([110, 0, 110, 30], dtype)
        oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    @pytest.mark.parametrize(
        "dtype, sizes",
        [
            ("int8", [-128, 20, -1, 10]),
            ("int32", [-(2**31), 30, -5, 4]),
            ("int32", [2**31 - 1, 2**31 - 1, 2**31 - 1, 1]),
            ("int32", [10, 2**31 - 1, 3, 2**31 - 1]),
            ("uint32", [5, 2**32 - 1, 0, 7]),
            ("uint32", [2**31, 2**31, 0, 7]),
            ("int64", [4, 2**32 + 1, 0, 2]),
            ("int64", [4, -(2**40), 30, 2**62]),
            ("uint64", [0, 9, 2**64 - 1, 1]),
        ],
    )
    def test_negative_counts_as_zero_and_the_sum_is_clamped(self, op, dtype, sizes, rng):
        lhs, rhs, _ = operands(op, rng, g=4)
        with jax.enable_x64(dtype.endswith("64")):
            sizes = np.array(sizes, dtype)
            oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))

    @BOTH_OPS
    def test_the_running_sum_does_not_wrap_around(self, op, rng):
        """Every group claims all rows, so sizes sum past 2**32; the first group owns all rows."""
        m, g = 2**20, 2**12 + 4
        lhs, rhs, _ = operands(op, rng, m=m, k=1, n=1, g=g)
        sizes = np.full(g, m, np.int32)
        oracle.check(op.call(lhs, rhs, sizes), op.exact(lhs, rhs, sizes))


class TestGroupOffset:
    """rhs [2, k, n] holds the weights of 2 of the 5 groups that `group_sizes` counts."""

    @pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_every_window(self, dtype, shape, rng):
        lhs, rhs, cotangent = operands(NONCONTRACTING, rng, g=2)
        for offset in range(-3, G + 3):
            if offset < 0 and dtype == "uint8":
                continue
            group_offset = np.full(shape, offset, dtype)
            out = NONCONTRACTING.call(lhs, rhs, SIZES, group_offset)
            oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, SIZES, offset))
            got = NONCONTRACTING.cotangents(lhs, rhs, SIZES, cotangent, group_offset)
            want = oracle.noncontracting_cotangents(lhs, rhs, SIZES, cotangent, offset)
            oracle.check_all(got, want)

    @pytest.mark.parametrize("offset", [-(2**31), 2**31 - 1, 2**31 - 2])
    def test_window_far_out_of_range(self, offset, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng, g=2)
        out = NONCONTRACTING.call(lhs, rhs, SIZES, np.int32(offset))
        np.testing.assert_array_equal(out, np.zeros((M, N)))

    def test_python_integer(self, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng, g=2)
        out = jgg.ragged_dot(lhs, rhs, SIZES, group_offset=2)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, SIZES, 2))

    def test_windows_add_up_to_the_whole(self, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        parts = [
            NONCONTRACTING.call(lhs, rhs[start : start + 2], SIZES, start) for start in (0, 2)
        ] + [NONCONTRACTING.call(lhs, rhs[4:], SIZES, 4)]
        oracle.check(
            sum(np.asarray(p) for p in parts), oracle.ragged_noncontracting(lhs, rhs, SIZES)
        )

    @pytest.mark.parametrize("offset", range(-G - 1, G + 2))
    def test_of_the_contracting_op(self, offset, rng):
        """Slice i of the result belongs to group offset + i, or is zero if no such group exists."""
        lhs, rhs, cotangent = operands(CONTRACTING, rng)
        oracle.check(
            CONTRACTING.call(lhs, rhs, SIZES, offset),
            oracle.ragged_contracting(lhs, rhs, SIZES, offset),
        )
        got = CONTRACTING.cotangents(lhs, rhs, SIZES, cotangent, offset)
        want = oracle.contracting_cotangents(lhs, rhs, SIZES, cotangent, offset)
        oracle.check_all(got, want)


class TestPrecisionAndDtypes:
    @BOTH_OPS
    @pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
    def test_accumulates_in_float32(self, op, dtype):
        """Sums of 4096 ones are exact; they would stop at 256 in bfloat16, at 2048 in float16."""
        lhs, rhs, _ = (np.ones(s, dtype) for s in op.shapes(4096, 4096, 8, 1))
        if op is NONCONTRACTING:
            lhs = lhs[:3]
        else:
            lhs = lhs[:, :3]
        out = op.call(lhs, rhs, np.array([4096], np.int32))
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.full(out.shape, 4096.0))

    @BOTH_OPS
    @pytest.mark.parametrize(
        "in_dtype, preferred",
        [
            (np.float32, ml_dtypes.bfloat16),
            (ml_dtypes.bfloat16, None),
            (ml_dtypes.bfloat16, np.float32),
            (ml_dtypes.bfloat16, np.float16),
            (np.float16, None),
            (np.float16, np.float32),
        ],
    )
    def test_result_and_gradient_dtypes(self, op, in_dtype, preferred, rng):
        lhs, rhs, _ = operands(op, rng, in_dtype)
        out = op.call(lhs, rhs, SIZES, preferred_element_type=preferred)
        assert out.dtype == (preferred or in_dtype)
        oracle.check(out, op.exact(lhs, rhs, SIZES))
        # Cotangents are exact in the operands' dtype, so that rounding cannot change them.
        cotangent = random(rng, out.shape, ml_dtypes.bfloat16).astype(out.dtype)
        got = op.cotangents(lhs, rhs, SIZES, cotangent, preferred_element_type=preferred)
        want = op.exact_cotangents(lhs, rhs, SIZES, cotangent)
        for actual, exact in zip(got, want, strict=True):
            assert actual.dtype == in_dtype
            oracle.check(actual, exact)

    @BOTH_OPS
    @pytest.mark.parametrize("lhs_dtype", [np.float32, ml_dtypes.bfloat16])
    def test_mixed_dtypes_promote(self, op, lhs_dtype, rng):
        rhs_dtype = np.float32 if lhs_dtype != np.float32 else np.float16
        lhs, rhs, cotangent = operands(op, rng)
        lhs, rhs = lhs.astype(lhs_dtype), rhs.astype(rhs_dtype)
        out = op.call(lhs, rhs, SIZES)
        assert out.dtype == np.float32
        oracle.check(out, op.exact(lhs, rhs, SIZES))
        d_lhs, d_rhs = op.cotangents(lhs, rhs, SIZES, cotangent)
        assert (d_lhs.dtype, d_rhs.dtype) == (lhs_dtype, rhs_dtype)
        oracle.check_all((d_lhs, d_rhs), op.exact_cotangents(lhs, rhs, SIZES, cotangent))

    @BOTH_OPS
    def test_float64_accumulates_in_float64(self, op, rng):
        with jax.enable_x64(True):
            lhs, rhs, cotangent = (rng.standard_normal(s) for s in op.shapes(M, K, N, G))
            out = op.call(lhs, rhs, SIZES)
            got = op.cotangents(lhs, rhs, SIZES, cotangent)
        want = [op.exact(lhs, rhs, SIZES), *op.exact_cotangents(lhs, rhs, SIZES, cotangent)]
        for actual, exact in zip((out, *got), want, strict=True):
            assert actual.dtype == np.float64
            oracle.check(actual, exact, accumulator=np.float64)

    @pytest.mark.parametrize(
        "precision", [None, "highest", jax.lax.Precision.HIGH, ("highest", "default")]
    )
    def test_precision_is_accepted_as_jax_does(self, precision, rng):
        lhs, rhs, _ = operands(NONCONTRACTING, rng)
        out = jgg.ragged_dot(lhs, rhs, SIZES, precision=precision)
        oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, SIZES))


class TestReferenceMemory:
    @BOTH_OPS
    def test_temporaries_do_not_grow_with_the_number_of_groups(self, op):
        """A masked copy of lhs for each group would take g * m * k elements."""
        m, k, n, g = 512, 64, 64, 256
        shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in op.shapes(m, k, n, g)]
        sizes = jax.ShapeDtypeStruct((g,), np.int32)
        forward = op.call.lower(*shapes[:2], sizes, implementation="xla").compile()
        operands_and_result = 4 * (m * k + m * n + g * k * n)
        assert forward.memory_analysis().temp_size_in_bytes < operands_and_result < 4 * g * m * k
