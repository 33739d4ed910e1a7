"""Quantisers give the bits of a NumPy oracle; error bounds, corner cases, transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.quantize import primitive
from tests.support import fp8_oracle
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import E4M3, E5M2

FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2])
SOURCES = pytest.mark.parametrize("source", [jnp.bfloat16, jnp.float16, jnp.float32])
SCALES = pytest.mark.parametrize("power_of_two", [False, True])
BLOCKS = pytest.mark.parametrize("block_shape", [(1, 128), (128, 128)])


def random(rng, shape, dtype=np.float32):
    """Returns numbers of very different magnitudes, some of them zero."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-14, 8, shape))
    return np.where(rng.random(shape) < 0.05, 0, x).astype(dtype)


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


def assert_all_same_bits(got, want):
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


@BLOCKS
@FP8
@SOURCES
@SCALES
def test_bits(block_shape, dtype, source, power_of_two, rng):
    for shape in ((5, 128), (130, 300), (256, 7)):
        x = random(rng, shape, source)
        quantize = partial(jgg.quantize_blockwise, power_of_two_scales=power_of_two)
        got = jax.jit(lambda x: quantize(x, block_shape, dtype))(x)  # noqa: B023
        assert_all_same_bits(got, fp8_oracle.quantize(x, block_shape, dtype, power_of_two))


@FP8
def test_rounding_of_every_bfloat16(dtype):
    """Quantises every bfloat16 in the format's range. Each row has the limit, so scales are 1."""
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
    x = x[np.abs(x.astype(np.float32)) <= limit]
    x = np.pad(x, (0, -len(x) % 127)).reshape(-1, 127)
    x = np.concatenate([x, np.full((len(x), 1), limit, x.dtype)], axis=1)
    values, scales = jgg.quantize_blockwise(x, dtype=dtype)
    np.testing.assert_allclose(scales, 1, rtol=1e-6)
    values, scales = jgg.quantize_blockwise(x, dtype=dtype, power_of_two_scales=True)
    assert_same_bits(values, (x.astype(np.float32) / np.asarray(scales)).astype(dtype))


@BLOCKS
@FP8
@SCALES
def test_error_of_each_element(block_shape, dtype, power_of_two, rng):
    x = random(rng, (256, 384))
    values, scales = jgg.quantize_blockwise(x, block_shape, dtype, power_of_two_scales=power_of_two)
    error = np.abs(fp8_oracle.dequantize(values, scales) - x)
    info = ml_dtypes.finfo(dtype)
    scale_of_each = fp8_oracle.dequantize(np.ones_like(x), scales)
    step = float(info.smallest_subnormal) * scale_of_each
    assert np.all(error <= float(info.eps) / 2 * np.abs(x) * (1 + 1e-5) + step / 2 * (1 + 1e-5))


@BLOCKS
@FP8
def test_corner_cases(block_shape, dtype):
    limit = float(ml_dtypes.finfo(dtype).max)
    x = np.zeros((block_shape[0], 128 * 8), np.float32)
    x[0, 0:3] = [3, -7, 1e-6]  # -7 becomes minus the FP8 limit, and 1e-6 stays tiny
    x[0, 256:259] = [np.inf, -2, np.nan]  # inf and NaN do not count for the scale
    x[0, 384:386] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    x[0, 512] = 1e-40  # a denormal block is a block of zeros
    x[0, 640] = 2.0**-120
    x[0, 768:770] = -np.inf, np.nan
    values, scales = jax.jit(partial(jgg.quantize_blockwise, block_shape=block_shape, dtype=dtype))(
        x
    )
    values, scales = np.asarray(values)[0].astype(np.float32), np.asarray(scales)[0]
    np.testing.assert_allclose(scales[[0, 2, 3]] * limit, [7, 2, np.finfo(np.float32).max], 1e-6)
    np.testing.assert_array_equal(scales[[1, 4, 6, 7]], 1)
    assert scales[5] == 2.0**-100
    assert values[1] == -limit and abs(values[2]) <= 1e-6 * limit
    assert values[257] == -limit and np.isnan(values[[256, 258]]).all()
    np.testing.assert_array_equal(values[384:386], [limit, -limit])
    assert np.isnan(values[768:770]).all()
    assert np.isfinite(np.delete(values, [256, 258, 768, 769])).all()


def test_power_of_two_scales_are_the_next_powers(rng):
    x = random(rng, (64, 512))
    _, exact = jgg.quantize_blockwise(x)
    _, scales = jgg.quantize_blockwise(x, power_of_two_scales=True)
    mantissa, _ = np.frexp(np.asarray(scales))
    np.testing.assert_array_equal(mantissa, 0.5)
    assert np.all((scales >= exact) & (scales < 2 * exact))


@BLOCKS
def test_leading_dimensions(block_shape, rng):
    x = random(rng, (2, 3, 130, 200))
    values, scales = jgg.quantize_blockwise(x, block_shape)
    for index in np.ndindex(2, 3):
        want = fp8_oracle.quantize(x[index], block_shape, E4M3)
        assert_all_same_bits((values[index], scales[index]), want)


def test_weights_and_their_transpose(rng):
    x = random(rng, (3, 200, 260), jnp.bfloat16)
    got = jgg.quantize_weights(x, E5M2)
    for g in range(3):
        want, scales = fp8_oracle.quantize(x[g], (128, 128), E5M2)
        assert_all_same_bits([y[g] for y in got], [want, scales, want.T, scales.T])


class TestRagged:
    @FP8
    @SCALES
    def test_bits(self, dtype, power_of_two, rng):
        m, groups = 400, 5
        x = random(rng, (m, 200), jnp.bfloat16)
        run = jax.jit(partial(jgg.quantize_ragged, dtype=dtype, power_of_two_scales=power_of_two))
        for _ in range(4):
            sizes = sizes_of.any_kind(rng, m, groups)
            rows = fp8_oracle.quantize(x, (1, 128), dtype, power_of_two)
            columns = fp8_oracle.quantize_groups(x, sizes, dtype, power_of_two)
            assert_all_same_bits(run(x, sizes), (*rows, *columns))

    @pytest.mark.parametrize("m, groups", [(1, 3), (128, 1), (129, 200), (300, 0)])
    def test_number_of_groups(self, m, groups, rng):
        x = random(rng, (m, 130))
        sizes = rng.integers(0, 3, groups, dtype=np.int32)
        got = jgg.quantize_ragged(x, sizes)
        assert_all_same_bits(got[2:], fp8_oracle.quantize_groups(x, sizes, E4M3))

    @pytest.mark.parametrize("shape", [(0, 128), (130, 0), (0, 0)])
    def test_nothing(self, shape):
        got = jgg.quantize_ragged(np.zeros(shape, np.float32), np.array([3, 4]))
        rows, cols = shape
        blocks = -(-rows // 128) + min(2, rows)
        shapes = [shape, (rows, -(-cols // 128)), (blocks, cols, 128), (blocks, cols)]
        assert [x.shape for x in got] == shapes

    def test_nan_in_one_group_or_the_tail_stays_there(self, rng):
        x = random(rng, (300, 128))
        x[:100] = np.nan
        x[250:] = np.inf
        *_, values, scales = jgg.quantize_ragged(x, np.array([100, 0, 150]))
        want, want_scales = fp8_oracle.quantize_groups(x, [100, 0, 150], E4M3)
        assert_all_same_bits((values, scales), (want, want_scales))
        assert np.isfinite(np.asarray(values)[1:].astype(np.float32)).all()


class TestTransforms:
    @BLOCKS
    @pytest.mark.parametrize("axis", [0, 1, 2])
    def test_vmap(self, block_shape, axis, rng):
        x = random(rng, (3, 130, 140))
        got = jax.vmap(partial(jgg.quantize_blockwise, block_shape=block_shape), axis)(
            np.moveaxis(x, 0, axis)
        )
        want = [fp8_oracle.quantize(one, block_shape, E4M3) for one in x]
        assert_all_same_bits(got, [np.stack(y) for y in zip(*want, strict=True)])

    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
    def test_vmap_of_ragged(self, axes, rng):
        x = random(rng, (3, 140, 130))
        sizes = rng.integers(0, 80, (3, 4), dtype=np.int32)
        operands = [y if axis == 0 else y[0] for y, axis in zip((x, sizes), axes, strict=True)]
        got = jax.vmap(jgg.quantize_ragged, axes)(*operands)
        for b in range(3):
            one = [y[b] if axis == 0 else y for y, axis in zip(operands, axes, strict=True)]
            assert_all_same_bits([y[b] for y in got], jgg.quantize_ragged(*one))

    def test_nested_vmap_of_ragged(self, rng):
        x = random(rng, (2, 3, 140, 130))
        sizes = rng.integers(0, 80, (3, 4), dtype=np.int32)
        got = jax.vmap(jax.vmap(jgg.quantize_ragged), (0, None))(x, sizes)
        for a, b in np.ndindex(2, 3):
            assert_all_same_bits([y[a, b] for y in got], jgg.quantize_ragged(x[a, b], sizes[b]))

    def test_vmap_of_tokens(self, rng):
        params = dict(dtype=np.dtype(E4M3), power_of_two=False, implementation=None)
        quantize = partial(primitive.quantize_tokens, **params)
        x, rows = random(rng, (3, 7, 200)), rng.integers(-2, 9, (3, 12)).astype(np.int32)
        for axes in ((0, 0), (0, None), (None, 0)):
            operands = [y if axis == 0 else y[0] for y, axis in zip((x, rows), axes, strict=True)]
            got = jax.vmap(quantize, axes)(*operands)
            for i in range(3):
                one, of = x[i if axes[0] == 0 else 0], rows[i if axes[1] == 0 else 0]
                exists = (of >= 0) & (of < 7)
                copies = np.where(exists[:, None], one[of % 7], 0)
                assert_all_same_bits(
                    [y[i] for y in got], fp8_oracle.quantize(copies, (1, 128), E4M3)
                )

    def test_shard_map(self, rng):
        x = random(rng, (8, 256))
        mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("x",))
        run = jax.shard_map(jgg.quantize_blockwise, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        assert_all_same_bits(jax.jit(run)(x), fp8_oracle.quantize(x, (1, 128), E4M3))

    def test_no_derivative(self, rng):
        def loss(x):
            return jgg.quantize_blockwise(x)[1].sum()

        with pytest.raises(NotImplementedError, match="quantize_rows has no derivative"):
            jax.grad(loss)(random(rng, (2, 128)))


class TestErrors:
    X = jax.ShapeDtypeStruct((4, 256), jnp.float32)

    def raises(self, error, match, function, *arguments):
        with pytest.raises(error, match=match):
            jax.eval_shape(function, *arguments)

    def test_dtypes(self):
        ints = jax.ShapeDtypeStruct((4, 4), jnp.int32)
        self.raises(TypeError, "x must be bfloat16.*int32", jgg.quantize_blockwise, ints)
        for dtype in (jnp.bfloat16, jnp.float8_e4m3b11fnuz):
            wrong = partial(jgg.quantize_blockwise, dtype=dtype)
            self.raises(TypeError, "float8_e4m3fn or float8_e5m2, got", wrong, self.X)

    def test_values(self):
        wrong = partial(jgg.quantize_blockwise, block_shape=(1, 64))
        self.raises(ValueError, r"block_shape.*\(1, 64\)", wrong, self.X)
        wrong = partial(jgg.quantize_blockwise, implementation="fast")
        self.raises(ValueError, "implementation.*fast", wrong, self.X)
        vector = jax.ShapeDtypeStruct((4,), jnp.float32)
        self.raises(TypeError, r"x.*two dimensions.*\(4,\)", jgg.quantize_blockwise, vector)

    def test_ragged(self):
        sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
        cube = jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)
        self.raises(TypeError, r"x must.*\[m, k\]", jgg.quantize_ragged, cube, sizes)
        self.raises(TypeError, "group_sizes.*float32", jgg.quantize_ragged, self.X, self.X)

    def test_cuda_on_the_cpu(self):
        cuda = partial(jgg.quantize_blockwise, implementation="cuda")
        with pytest.raises(NotImplementedError, match="(?i)cpu"):
            jax.jit(cuda).lower(self.X)
