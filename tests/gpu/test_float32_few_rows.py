"""Float32 products of groups of few rows. The kernel itself splits the operands."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.ragged.tiles import SWAPPED_FLOAT32_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import F32
from tests.support.float32_errors import PRECISIONS, PRODUCT_ERROR
from tests.support.ops import NONCONTRACTING, random, swap

M, K, N, G = 232, 264, 392, 8
# An empty group, groups shorter and longer than a tile, and a tail.
SIZES = np.array([40, 0, 1, 64, 17, 16, 81, 7], np.int32)
TAIL = slice(int(SIZES.sum()), M)

MAJORS = pytest.mark.parametrize("transpose_rhs", [False, True])


@pytest.fixture(autouse=True)
def few_rows_tile():
    """Uses the kernel for few rows for products of any number of rows."""
    with jgg.use_tiles(forward=SWAPPED_FLOAT32_TILE, dgrad=SWAPPED_FLOAT32_TILE):
        yield


def operands(rng, m=M, k=K, n=N, g=G):
    return [random(rng, shape, F32) for shape in NONCONTRACTING.shapes(m, k, n, g)]


def run(lhs, rhs, sizes, offset=None, *, transpose_rhs=False, **options):
    """Returns the kernel's result for an rhs stored in the given major."""
    return NONCONTRACTING.call(
        lhs,
        swap(rhs, transpose_rhs),
        sizes,
        offset,
        transpose_lhs=False,
        transpose_rhs=transpose_rhs,
        implementation="cuda",
        **options,
    )


def check(lhs, rhs, sizes, offset=None, *, precision="highest", **options):
    out = run(lhs, rhs, sizes, offset, precision=precision, **options)
    exact = NONCONTRACTING.exact(lhs, rhs, sizes, 0 if offset is None else offset)
    oracle.check(out, exact, product_error=PRODUCT_ERROR[precision])
    return out


def cotangents(lhs, rhs, sizes, cotangent, *, transpose_rhs, precision):
    """Returns the cotangents of both operands, in the majors that are not transposed."""
    got = NONCONTRACTING.cotangents(
        lhs,
        swap(rhs, transpose_rhs),
        sizes,
        cotangent,
        implementation="cuda",
        precision=precision,
        transpose_lhs=False,
        transpose_rhs=transpose_rhs,
    )
    return got[0], swap(got[1], transpose_rhs)


@MAJORS
@PRECISIONS
class TestMajors:
    def test_results(self, transpose_rhs, precision, rng):
        lhs, rhs, _ = operands(rng)
        options = dict(transpose_rhs=transpose_rhs, precision=precision)
        for sizes in (SIZES, sizes_of.multinomial(rng, M, G), sizes_of.zipf(rng, M - 50, G)):
            assert check(lhs, rhs, sizes, **options).dtype == F32
            out = check(lhs, rhs, sizes, preferred_element_type=jnp.bfloat16, **options)
            assert out.dtype == jnp.bfloat16

    def test_any_group_sizes(self, transpose_rhs, precision, rng):
        lhs, rhs, _ = operands(rng, k=72, n=136)
        for _ in range(30):
            sizes = sizes_of.any_kind(rng, M, G)
            check(lhs, rhs, sizes, transpose_rhs=transpose_rhs, precision=precision)

    def test_gradients(self, transpose_rhs, precision, rng):
        lhs, rhs, cotangent = operands(rng)
        options = dict(transpose_rhs=transpose_rhs, precision=precision)
        for sizes in (SIZES, sizes_of.multinomial(rng, M, G)):
            got = cotangents(lhs, rhs, sizes, cotangent, **options)
            exact = NONCONTRACTING.exact_cotangents(lhs, rhs, sizes, cotangent)
            oracle.check_all(got, exact, product_error=PRODUCT_ERROR[precision])

    @pytest.mark.parametrize(
        "m, k, n", [(183, 37, 51), (183, 1, 64), (183, 64, 1), (182, 36, 52), (183, 130, 250)]
    )
    def test_rows_off_16_bytes(self, transpose_rhs, precision, m, k, n, rng):
        lhs, rhs, _ = operands(rng, m=m, k=k, n=n)
        for _ in range(3):
            sizes = sizes_of.any_kind(rng, m, G)
            check(lhs, rhs, sizes, transpose_rhs=transpose_rhs, precision=precision)

    def test_every_element_is_written(self, transpose_rhs, precision, rng):
        """The result takes over memory full of NaN, so an unwritten element would be NaN."""

        @partial(jax.jit, donate_argnums=3, keep_unused=True)
        def into(lhs, rhs, sizes, memory):
            options = dict(transpose_rhs=transpose_rhs, precision=precision)
            return NONCONTRACTING.call(lhs, rhs, sizes, implementation="cuda", **options)

        lhs, rhs, out = operands(rng)
        stored = swap(rhs, transpose_rhs)
        for _ in range(6):
            sizes = sizes_of.any_kind(rng, M, G)
            got = into(lhs, stored, sizes, jnp.full(out.shape, jnp.nan, F32))
            exact = NONCONTRACTING.exact(lhs, rhs, sizes, 0)
            oracle.check(got, exact, product_error=PRODUCT_ERROR[precision])

    def test_same_bits_every_time(self, transpose_rhs, precision, rng):
        lhs, rhs, _ = operands(rng)
        options = dict(transpose_rhs=transpose_rhs, precision=precision)
        first, second = (np.asarray(run(lhs, rhs, SIZES, **options)) for _ in range(2))
        assert first.tobytes() == second.tobytes()

    @pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
    def test_nothing_reaches_another_group(self, transpose_rhs, precision, poison, rng):
        """Values of one group, or of the tail, change no bit of other results."""
        options = dict(transpose_rhs=transpose_rhs, precision=precision)
        lhs, rhs, _ = operands(rng)
        clean = np.asarray(run(lhs, rhs, SIZES, **options))
        ends = np.cumsum(SIZES)
        for group in (*range(G), None):
            rows = TAIL if group is None else slice(ends[group] - SIZES[group], ends[group])
            poisoned = lhs.copy(), rhs.copy()
            poisoned[0][rows] = poison
            if group is not None:
                poisoned[1][group] = poison
            got = np.array(run(*poisoned, SIZES, **options))
            want = clean.copy()
            if group is not None:
                got[rows] = want[rows] = 0
            assert got.tobytes() == want.tobytes()


class TestAccuracy:
    @pytest.mark.parametrize("depth", [128, 1024, 8192])
    def test_no_worse_than_a_float32_dot(self, depth, rng):
        """Compares the mean square and the maximum of the error relative to |lhs| |rhs|.

        The bound of the maximum leaves room for chance.
        """
        lhs, rhs, _ = operands(rng, m=1024, k=depth, n=1024, g=1)
        exact = NONCONTRACTING.exact(lhs, rhs, [1024])
        ours = run(lhs, rhs, np.array([1024], np.int32), precision="highest")
        dot = jnp.matmul(lhs, rhs[0], precision="highest")

        def errors(out):
            relative = np.abs(np.asarray(out).astype(np.float64) - exact.value) / exact.magnitude
            return np.array([relative.max(), np.sqrt(np.mean(relative**2))])

        assert (errors(ours) <= [1.2, 1] * errors(dot)).all()

    @PRECISIONS
    @pytest.mark.parametrize("exponents", [(-50, 125), (125, -50), (60, 60), (-20, -20)])
    def test_magnitudes_within_a_group(self, exponents, precision, rng):
        """The magnitude of an element does not affect the accuracy of other elements' products."""
        lhs, rhs, _ = operands(rng)
        for x, exponent in zip((lhs, rhs), exponents, strict=True):
            x[...] = np.copysign(2.0 ** (exponent + rng.uniform(-40, 0, x.shape)), x)
        check(lhs, rhs, SIZES, precision=precision)

    @PRECISIONS
    def test_bits_below_those_of_bfloat16_fade(self, precision, rng):
        """As documented, the parts of an element may leave out up to 2^-133 in absolute terms."""
        lhs, rhs, _ = operands(rng)
        lhs[...] = np.copysign(2.0 ** rng.uniform(-140, -100, lhs.shape), lhs)
        rhs[...] = np.copysign(2.0 ** rng.uniform(60, 100, rhs.shape), rhs)
        exact = NONCONTRACTING.exact(lhs, rhs, SIZES, 0)
        out = np.asarray(run(lhs, rhs, SIZES, precision=precision)).astype(np.float64)
        left_out = 2.0**-133 * NONCONTRACTING.exact(np.ones_like(lhs), rhs, SIZES, 0).magnitude
        error = (PRODUCT_ERROR[precision] + 2.0**-23 * exact.depth) * exact.magnitude
        assert (np.abs(out - exact.value) <= error + left_out).all()


class TestNonFinite:
    @PRECISIONS
    @MAJORS
    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_is_what_the_sum_of_products_is(self, transpose_rhs, precision, value, rng):
        """Non-finite elements make exactly those results non-finite that they contribute to."""
        lhs, rhs, _ = operands(rng)
        for x in (lhs, rhs):
            x.flat[rng.integers(0, x.size, 5)] = value
        check(lhs, rhs, SIZES, precision=precision, transpose_rhs=transpose_rhs)


class TestWindowsAndBatches:
    @PRECISIONS
    def test_group_offset(self, precision, rng):
        local, groups = 3, 8
        lhs, rhs, _ = operands(rng, k=64, n=72, g=local)
        for offset in (-(2**31), -local, -2, 0, 1, groups - 1, groups, 2**31 - 1):
            for sizes in (sizes_of.multinomial(rng, M, groups), sizes_of.any_kind(rng, M, groups)):
                check(lhs, rhs, sizes, np.int32(offset), precision=precision)

    # Every way in which lhs, rhs, group_sizes and group_offset can be batched.
    @pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2) if any(b)])
    def test_batches(self, batched, rng):
        batch, groups = 3, 6
        lhs_shape, rhs_shape, _ = NONCONTRACTING.shapes(M, 72, 136, groups)
        shapes = lhs_shape, rhs_shape, (groups,), ()
        shapes = [(batch, *s) if b else s for b, s in zip(batched, shapes, strict=True)]
        lhs, rhs = (random(rng, shape, F32) for shape in shapes[:2])
        sizes = rng.integers(-20, 2 * M // groups, shapes[2], dtype=np.int32)
        offset = rng.integers(-2, groups + 1, shapes[3], dtype=np.int32)

        @jax.jit
        def mapped(*operands):
            call = partial(NONCONTRACTING.call, implementation="cuda", precision="highest")
            return jax.vmap(call, in_axes=[0 if b else None for b in batched])(*operands)

        out = mapped(lhs, rhs, sizes, offset)
        exact = NONCONTRACTING.exact(lhs, rhs, sizes, offset)
        oracle.check(out, exact, product_error=PRODUCT_ERROR["highest"])

    @pytest.mark.parametrize("groups", [1, 32, 33, 129, 512])
    def test_number_of_groups(self, groups, rng):
        lhs, rhs, _ = operands(rng, k=64, n=72, g=groups)
        for _ in range(4):
            check(lhs, rhs, sizes_of.any_kind(rng, M, groups))
