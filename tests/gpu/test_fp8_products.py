"""FP8 kernels against float64 products of dequantised operands, and training with FP8."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from tests.support import fp8_oracle, oracle
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import E4M3, E5M2
from tests.support.fp8_products import OUTPUTS, check, contracting, fp8, noncontracting, scales

M, K, N, G = 776, 520, 392, 8
KB, NB = 5, 4  # blocks of 128 in K and N
DTYPES = pytest.mark.parametrize("dtypes", list(product((E4M3, E5M2), repeat=2)))
WHOLE_TILES = pytest.mark.parametrize(
    "tile", [c.tile for c in plan_fp8.NONCONTRACTING_KERNELS if not c.tile.stream_k], ids=str
)
TILES = pytest.mark.parametrize(
    "tile", [choice.tile for choice in plan_fp8.NONCONTRACTING_KERNELS], ids=str
)
CONTRACTING_TILES = pytest.mark.parametrize(
    "tile", [choice.tile for choice in plan_fp8.CONTRACTING_KERNELS], ids=str
)

LHS_SCALES = {
    "1x128": (M, KB),
    "rows": (M, 1),
    "tensor": (),
    "column-major": (KB, M + 4),
}
RHS_SCALES = {"128x128": (G, NB, KB), "channels": (G, N), "groups": (G,)}


@TILES
@pytest.mark.parametrize("lhs_shape", LHS_SCALES.values(), ids=LHS_SCALES)
@pytest.mark.parametrize("rhs_shape", RHS_SCALES.values(), ids=RHS_SCALES)
def test_scale_shapes(lhs_shape, rhs_shape, tile, rng):
    lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, N, K))
    for sizes in (sizes_of.multinomial(rng, M, G), sizes_of.tile_edges(rng, M, G)):
        check(lhs, scales(rng, lhs_shape), rhs, scales(rng, rhs_shape), sizes, tile=tile)


class TestFastAccumulation:
    """The tensor cores add up all products if scales do not change along K."""

    @DTYPES
    @OUTPUTS
    @pytest.mark.parametrize("lhs_shape", [(M, 1), ()], ids=str)
    @pytest.mark.parametrize("rhs_shape", [(G, N), (G,)], ids=str)
    def test_is_as_precise_as_the_tensor_cores(self, lhs_shape, rhs_shape, dtypes, out_dtype, rng):
        lhs, rhs = fp8(rng, (M, K), dtypes[0]), fp8(rng, (G, N, K), dtypes[1])
        lhs_scale, rhs_scale = scales(rng, lhs_shape), scales(rng, rhs_shape)
        for sizes in (sizes_of.multinomial(rng, M, G), sizes_of.any_kind(rng, M, G)):
            operands = lhs, lhs_scale, rhs, rhs_scale, sizes
            options = dict(preferred_element_type=out_dtype)
            fast = np.float64(noncontracting(*operands, fast_accumulation=True, **options))
            exact = np.float64(noncontracting(*operands, **options))
            # The fast sum has fewer bits, which matters where terms cancel, and the result is
            # rounded.
            last_bit = float(jnp.finfo(out_dtype).eps)
            atol = 4e-3 * np.abs(exact).max()
            np.testing.assert_allclose(fast, exact, rtol=last_bit, atol=atol)
            assert not fast[~exact.any(axis=1)].any()

    def test_rows_of_no_group_are_zero_whatever_their_scales(self, rng):
        lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, N, K))
        lhs_scale, rhs_scale = scales(rng, (M, 1)), scales(rng, (G, N))
        sizes = np.full(G, 80, np.int32)
        lhs_scale[sizes.sum() :] = np.nan
        sizes[0], rhs_scale[0] = 0, np.inf
        owned = sizes.sum()
        for fast in (False, True):
            out = np.float64(
                noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes, fast_accumulation=fast)
            )
            assert np.isfinite(out[:owned]).all() and out[:owned].any()
            assert not out[owned:].any()


@TILES
@DTYPES
@OUTPUTS
def test_dtypes(dtypes, out_dtype, tile, rng):
    lhs, rhs = fp8(rng, (M, K), dtypes[0]), fp8(rng, (G, N, K), dtypes[1])
    operands = lhs, scales(rng, (M, KB)), rhs, scales(rng, (G, NB, KB))
    sizes = sizes_of.multinomial(rng, M, G)
    out = check(*operands, sizes, tile=tile, preferred_element_type=out_dtype)
    assert out.dtype == out_dtype


@TILES
def test_any_group_sizes(tile, rng):
    lhs, rhs = fp8(rng, (M, 272)), fp8(rng, (G, 144, 272))
    operands = lhs, scales(rng, (M, 3)), rhs, scales(rng, (G, 2, 3))
    for _ in range(40):
        check(*operands, sizes_of.any_kind(rng, M, G), tile=tile)


@TILES
def test_more_steps_than_stages(tile, rng):
    """Sums have more steps than stages. Groups have rows for one, both or no consumer warpgroup."""
    k, n, groups = 128 * 11 + 48, 520, 200
    sizes = rng.choice([0, 1, 63, 64, 65, 100, 128, 129, 300], groups)
    m = int(sizes.sum())
    lhs, rhs = fp8(rng, (m, k)), fp8(rng, (groups, n, k))
    check(lhs, scales(rng, (m, 12)), rhs, scales(rng, (groups, 5, 12)), sizes, tile=tile)


@pytest.mark.parametrize("k", [128 * 20 + 16, 2048])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
def test_few_rows_a_group(out_dtype, k, rng):
    """Sizes are as in decoding: most groups fit into a tile, some take several, some are empty."""
    n, kb = 264, -(-k // 128)
    some = rng.choice([1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130], 40)
    m = int(some.sum()) + 40
    groups = -(-m // plan_fp8.SWAPPED_MOST_ROWS)
    sizes = rng.permutation(np.pad(some, (0, max(groups - len(some), 9))))
    groups = len(sizes)
    lhs, rhs = fp8(rng, (m, k)), fp8(rng, (groups, n, k))
    operands = lhs, scales(rng, (m, kb)), rhs, scales(rng, (groups, 3, kb))
    out = check(*operands, sizes, tile=None, preferred_element_type=out_dtype)
    for _ in range(3):
        again = noncontracting(*operands, sizes, preferred_element_type=out_dtype)
        np.testing.assert_array_equal(np.float32(again), np.float32(out))


@TILES
@pytest.mark.parametrize("rhs_shape", [(G, NB, 8), (G, N), (G,)], ids=RHS_SCALES)
def test_scales_in_rows_of_sixteen_bytes(rhs_shape, tile, rng):
    """If rows of scales are multiples of 16 bytes, kernels read four steps at a time."""
    lhs, rhs = fp8(rng, (M - 3, 1008)), fp8(rng, (G, N, 1008))
    operands = lhs, scales(rng, (M - 3, 8)), rhs, scales(rng, rhs_shape)
    for sizes in (sizes_of.multinomial(rng, M - 3, G), sizes_of.any_kind(rng, M - 3, G)):
        check(*operands, sizes, tile=tile)


@TILES
@pytest.mark.parametrize("k, n", [(16, 8), (128, 128), (37, 51), (1040, 264), (2064, 40), (7, 1)])
def test_dimensions(k, n, tile, rng):
    kb, nb = -(-k // 128), -(-n // 128)
    lhs, rhs = fp8(rng, (M, k)), fp8(rng, (G, n, k))
    for rhs_shape in ((G, nb, kb), (G, n)):
        sizes = sizes_of.multinomial(rng, M - 100, G)
        check(lhs, scales(rng, (M, kb)), rhs, scales(rng, rhs_shape), sizes, tile=tile)


@TILES
@pytest.mark.parametrize("groups", [1, 31, 33, 129])
def test_group_offset_and_number_of_groups(groups, tile, rng):
    local = min(groups, 9)
    lhs, rhs = fp8(rng, (M, 144)), fp8(rng, (local, 136, 144))
    operands = lhs, scales(rng, (M, 2)), rhs, scales(rng, (local, 2, 2))
    for offset in (-(2**31), -local - 1, -2, 0, 1, groups - local, groups - 1, groups, 2**31 - 1):
        check(*operands, sizes_of.any_kind(rng, M, groups), np.int32(offset), tile=tile)


@TILES
def test_nan_reaches_no_other_row(tile, rng):
    lhs, rhs = fp8(rng, (M, K)), fp8(rng, (G, N, K))
    lhs_scale, rhs_scale = scales(rng, (M, KB)), scales(rng, (G, NB, KB))
    sizes = np.array([100, 0, 33, 200, 1, 129, 64, 100])
    clean = noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes, tile=tile)
    total = sizes.sum()
    lhs[total:], lhs_scale[total:] = np.nan, np.inf
    lhs[150, 3], rhs[5] = np.nan, np.nan
    out = np.float32(noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes, tile=tile))
    poisoned = np.zeros(M, bool)
    poisoned[150], poisoned[334:463] = True, True
    assert np.isnan(out[poisoned]).all()
    np.testing.assert_array_equal(out[~poisoned], np.float32(clean)[~poisoned])
    assert not out[total:].any()


@pytest.mark.parametrize("k", [272, 496])
@pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2, 2) if any(b)])
def test_batches(batched, k, rng):
    m, n, kb = 300, 136, -(-k // 128)
    shapes = (m, k), (m, kb), (G, n, k), (G, 2, kb), (G,)
    makers = fp8, scales, fp8, scales, lambda rng, s: rng.integers(-9, 80, s, dtype=np.int32)
    operands = [
        make(rng, (3, *shape) if b else shape)
        for make, shape, b in zip(makers, shapes, batched, strict=True)
    ]
    in_axes = [0 if b else None for b in batched]
    out = jax.jit(jax.vmap(noncontracting, in_axes))(*operands)
    for i in range(3):
        one = [x[i] if b else x for x, b in zip(operands, batched, strict=True)]
        np.testing.assert_array_equal(np.float32(out[i]), np.float32(noncontracting(*one)))


@WHOLE_TILES
@OUTPUTS
def test_every_configuration_gives_the_same_bits(out_dtype, tile, rng):
    """All kernels add the same products in the same order, also when tiles fill the device."""
    m, k, n, groups = 9000, 1936, 1416, 24
    lhs, rhs = fp8(rng, (m, k)), fp8(rng, (groups, n, k))
    operands = lhs, scales(rng, (m, 16)), rhs, scales(rng, (groups, 12, 16))
    sizes = sizes_of.multinomial(rng, m - 50, groups)
    options = dict(preferred_element_type=out_dtype)
    want = np.float32(noncontracting(*operands, sizes, **options))
    for _ in range(5):
        got = np.float32(noncontracting(*operands, sizes, tile=tile, **options))
        np.testing.assert_array_equal(got, want)


class TestContracting:
    def operands(self, rng, sizes, m=M, k=K, n=N, dtypes=(E4M3, E4M3)):
        rows = [rng.standard_normal((m, width), np.float32) for width in (k, n)]
        lhs, rhs = (
            fp8_oracle.quantize_groups(x, sizes, dtype)
            for x, dtype in zip(rows, dtypes, strict=True)
        )
        return (*lhs, *rhs)

    def check(self, operands, sizes, offset=0, num_groups=None, m=M, **options):
        groups = dict(num_rows=m, num_groups=num_groups)
        out = contracting(*operands, sizes, np.int32(offset), **groups, **options)
        exact = fp8_oracle.contracting(*operands, sizes, m, offset, num_groups)
        fp8_oracle.check(out, exact)

    @CONTRACTING_TILES
    @DTYPES
    @OUTPUTS
    def test_dtypes(self, dtypes, out_dtype, tile, rng):
        sizes = sizes_of.multinomial(rng, M, G)
        operands = self.operands(rng, sizes, dtypes=dtypes)
        self.check(operands, sizes, tile=tile, preferred_element_type=out_dtype)

    @CONTRACTING_TILES
    def test_any_group_sizes(self, tile, rng):
        for _ in range(30):
            sizes = sizes_of.any_kind(rng, M, G)
            self.check(self.operands(rng, sizes, k=72, n=136), sizes, tile=tile)

    @CONTRACTING_TILES
    def test_more_steps_than_stages(self, tile, rng):
        """Groups have more steps than stages. In the last tiles, only one consumer has rows."""
        m, k, n = 4000, 320, 520
        sizes = np.array([1700, 0, 1, 1100, 129, 900, 30])
        self.check(self.operands(rng, sizes, m=m, k=k, n=n), sizes, m=m, tile=tile)

    @CONTRACTING_TILES
    @pytest.mark.parametrize("k, n", [(8, 8), (37, 51), (264, 1040), (1, 5)])
    def test_dimensions(self, k, n, tile, rng):
        sizes = sizes_of.multinomial(rng, M - 60, G)
        self.check(self.operands(rng, sizes, k=k, n=n), sizes, tile=tile)

    @CONTRACTING_TILES
    @OUTPUTS
    def test_every_configuration_gives_the_same_bits(self, out_dtype, tile, rng):
        m, groups = 3000, 12
        sizes = sizes_of.multinomial(rng, m - 50, groups)
        operands = self.operands(rng, sizes, m=m, k=1304, n=1032)
        options = dict(num_rows=m, preferred_element_type=out_dtype)
        want = np.float32(contracting(*operands, sizes, **options))
        for _ in range(5):
            got = np.float32(contracting(*operands, sizes, tile=tile, **options))
            np.testing.assert_array_equal(got, want)

    @CONTRACTING_TILES
    @pytest.mark.parametrize("groups", [1, 33, 129])
    def test_group_offset_and_number_of_groups(self, groups, tile, rng):
        sizes = sizes_of.any_kind(rng, M, groups)
        operands = self.operands(rng, sizes, k=64, n=72)
        local = min(groups, 9)
        for offset in (-(2**31), -local - 1, -2, 0, 1, groups - local, groups - 1, groups):
            self.check(operands, sizes, offset, local, tile=tile)


class TestTraining:
    def products(self, lhs, rhs, sizes, cotangent, **options):
        @jax.jit
        def run(lhs, rhs, sizes, cotangent):
            def call(lhs, rhs):
                return jgg.fp8_ragged_dot(lhs, rhs, sizes, implementation="cuda", **options)

            out, vjp = jax.vjp(call, lhs, rhs)
            return out, *vjp(cotangent.astype(out.dtype))

        return run(lhs, rhs, sizes, cotangent)

    @pytest.mark.parametrize(
        "recipe",
        [
            jgg.Recipe(),
            jgg.Recipe(power_of_two_scales=True),
            jgg.Recipe(gradient_dtype=E5M2),
            jgg.Recipe(forward="bf16"),
            jgg.Recipe(dgrad="bf16"),
            jgg.Recipe(wgrad="bf16"),
        ],
        ids=str,
    )
    def test_products_and_their_gradients(self, recipe, rng):
        m, k, n = 1500, 512, 640
        shapes = (m, k), (G, k, n), (m, n)
        lhs, rhs, ct = (rng.standard_normal(s, np.float32).astype(jnp.bfloat16) for s in shapes)
        sizes = sizes_of.multinomial(rng, m - 100, G)
        lhs[-100:], ct[-100:] = np.nan, np.inf
        got = self.products(lhs, rhs, sizes, ct, recipe=recipe)
        lhs[-100:], ct[-100:] = 0, 0
        exact = (
            oracle.ragged_noncontracting(lhs, rhs, sizes),
            *oracle.noncontracting_cotangents(lhs, rhs, sizes, ct),
        )
        limits = 1e-3, *(2 * [3e-3 if recipe.gradient_dtype == E5M2 else 1e-3])
        for one, want, limit in zip(got, exact, limits, strict=True):
            assert not np.float64(one)[want.depth == 0].any()
            assert fp8_oracle.cosine_distance(one, want.value) < limit

    def test_equals_the_reference(self, rng):
        """Both sides take the same quantised operands, so that only the accumulation differs."""
        shapes = (M, K), (G, K, N), (M, N)
        lhs, rhs, ct = (rng.standard_normal(s, np.float32).astype(jnp.bfloat16) for s in shapes)
        sizes = sizes_of.multinomial(rng, M, G)
        got = self.products(lhs, rhs, sizes, ct, preferred_element_type=jnp.float32)
        with jax.default_device(jax.devices("cpu")[0]):
            out, vjp = jax.vjp(
                lambda lhs, rhs: jgg.fp8_ragged_dot(
                    lhs, rhs, sizes, preferred_element_type=jnp.float32, implementation="xla"
                ),
                lhs,
                rhs,
            )
            want = out, *vjp(jnp.asarray(ct, jnp.float32))
        for one, other, tolerance in zip(got, want, (1e-3, 5e-3, 5e-3), strict=True):
            assert fp8_oracle.relative_error(np.float64(one), np.float64(other)) < tolerance

    def test_same_bits_every_time(self, rng):
        shapes = (M, K), (G, K, N), (M, N)
        args = [rng.standard_normal(s, np.float32).astype(jnp.bfloat16) for s in shapes]
        sizes = sizes_of.multinomial(rng, M, G)
        first = self.products(args[0], args[1], sizes, args[2])
        for _ in range(5):
            again = self.products(args[0], args[1], sizes, args[2])
            for one, other in zip(again, first, strict=True):
                np.testing.assert_array_equal(np.float32(one), np.float32(other))


def test_many_tiles_for_each_processor(rng):
    """Products of the size of a training step agree with float32, and have the same bits twice."""
    m, k, n, groups = 16384, 2048, 1408, 32
    sizes = sizes_of.multinomial(rng, m - 100, groups)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), 3)
    lhs, rhs, ct = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, ((m, k), (groups, k, n), (m, n)), strict=True)
    )
    rows, cotangents = (jgg.quantize_ragged(x, sizes, implementation="cuda") for x in (lhs, ct))
    weights = jgg.quantize_weights(rhs, implementation="cuda")
    options = dict(implementation="cuda", preferred_element_type=jnp.float32)
    forward = partial(jgg.scaled_ragged_dot, transpose_rhs=True, **options)
    calls = [
        partial(forward, *rows[:2], *weights[2:], sizes),
        partial(forward, *cotangents[:2], *weights[:2], sizes),
        partial(
            jgg.scaled_ragged_dot_contracting,
            *rows[2:],
            *cotangents[2:],
            sizes,
            num_rows=m,
            **options,
        ),
    ]
    x, dy = (fp8_oracle.dequantize(*pair[:2]).astype(np.float32) for pair in (rows, cotangents))
    x_t, dy_t = (
        fp8_oracle.dequantize_groups(*pair[2:]).astype(np.float32) for pair in (rows, cotangents)
    )
    w = fp8_oracle.dequantize(*weights[:2]).astype(np.float32)
    ends = np.cumsum(sizes)
    blocks = np.cumsum(-(-sizes // 128)) * 128
    for call, exact in zip(
        calls,
        (
            lambda i, own, _: x[own] @ w[i],
            lambda i, own, _: dy[own] @ w[i].T,
            lambda i, _, own: x_t[own].T @ dy_t[own],
        ),
        strict=True,
    ):
        out = np.asarray(call())
        np.testing.assert_array_equal(call(), out)
        for i in rng.permutation(np.flatnonzero(sizes))[:6]:
            own = slice(ends[i] - sizes[i], ends[i])
            padded = slice(blocks[i] - -(-sizes[i] // 128) * 128, blocks[i])
            got = out[own] if out.ndim == 2 else out[i]
            assert fp8_oracle.relative_error(got, exact(i, own, padded)) < 1e-3
