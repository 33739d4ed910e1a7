"""The quantising kernels against the NumPy oracle, bit by bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.quantize import primitive
from tests.support import fp8_oracle
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import E4M3, E5M2

FORMATS = pytest.mark.parametrize(
    "dtype, source, power_of_two",
    [
        (E4M3, jnp.bfloat16, False),
        (E5M2, jnp.bfloat16, True),
        (E4M3, jnp.float16, True),
        (E5M2, jnp.float16, False),
        (E4M3, jnp.float32, False),
        (E5M2, jnp.float32, True),
    ],
)
SHAPES = [(1, 128), (300, 256), (129, 1000), (64, 13), (257, 1), (640, 2056)]


def random(rng, shape, source):
    """Returns numbers of very different magnitudes, with zeros, denormals, infinities and NaN."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-14, 8, shape))
    for value in (0, 0, 0, 1e-40, np.inf, -np.inf, np.nan):
        x = np.where(rng.random(shape) < 0.003, value, x)
    x[: shape[0] // 3] = np.where(rng.random(x[: shape[0] // 3].shape) < 0.9, 0, 1e-4)
    return x.astype(source)


def assert_same_bits(got, want):
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype and one.shape == other.shape
        nan = np.isnan(other.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(one.astype(np.float32)), nan)
        bits = f"u{one.dtype.itemsize}"
        np.testing.assert_array_equal(one.view(bits)[~nan], other.view(bits)[~nan])


@FORMATS
@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128)])
def test_blockwise(block_shape, dtype, source, power_of_two, rng):
    options = dict(power_of_two_scales=power_of_two, implementation="cuda")
    run = jax.jit(partial(jgg.quantize_blockwise, block_shape=block_shape, dtype=dtype, **options))
    for shape in SHAPES:
        x = random(rng, shape, source)
        assert_same_bits(run(x), fp8_oracle.quantize(x, block_shape, dtype, power_of_two))


@FORMATS
def test_rows_of_tokens(dtype, source, power_of_two, rng):
    """Rows get the bits of copied tokens. Rows without a token are zeros with scales of one."""
    params = dict(dtype=dtype, power_of_two=power_of_two, implementation="cuda")
    run = jax.jit(partial(primitive.quantize_tokens, **params))
    for shape in SHAPES:
        x, tokens = random(rng, shape, source), shape[0]
        for m in (1, 77, 3 * tokens):
            rows = rng.integers(-2, tokens + 2, m).astype(np.int32)
            exists = (rows >= 0) & (rows < tokens)
            copies = np.where(exists[:, None], x[rows % tokens], np.zeros((), source))
            assert_same_bits(
                run(x, rows), fp8_oracle.quantize(copies, (1, 128), dtype, power_of_two)
            )


@FORMATS
def test_weights(dtype, source, power_of_two, rng):
    options = dict(power_of_two_scales=power_of_two, implementation="cuda")
    run = jax.jit(partial(jgg.quantize_weights, dtype=dtype, **options))
    for shape in SHAPES:
        x = np.stack([random(rng, shape, source) for _ in range(3)])
        got = run(x)
        for g in range(3):
            values, scales = fp8_oracle.quantize(x[g], (128, 128), dtype, power_of_two)
            assert_same_bits([y[g] for y in got], [values, scales, values.T, scales.T])


def wide_weights(rng, source):
    """Returns matrices of more than two tiles of 256 x 256 for each processor."""
    x = np.stack([random(rng, (1024, 512), source) for _ in range(4)])
    return np.concatenate([np.roll(x, i, (1, 2)) for i in range(9)])


@FORMATS
def test_weights_in_wide_tiles(dtype, source, power_of_two, rng):
    options = dict(power_of_two_scales=power_of_two, implementation="cuda")
    x = wide_weights(rng, source)
    got = jgg.quantize_weights(x, dtype=dtype, **options)
    for g, matrix in enumerate(x):
        values, scales = fp8_oracle.quantize(matrix, (128, 128), dtype, power_of_two)
        assert_same_bits([y[g] for y in got], [values, scales, values.T, scales.T])


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_one_way_round(transposed, rng):
    options = dict(dtype=E4M3, power_of_two=False, implementation="cuda")
    for x in wide_weights(rng, jnp.bfloat16), random(rng, (300, 264), jnp.bfloat16)[None]:
        got = primitive.quantize_blocks(x, plain=not transposed, transposed=transposed, **options)
        for g, matrix in enumerate(x):
            want = fp8_oracle.quantize(matrix, (128, 128), E4M3)
            assert_same_bits([y[g] for y in got], [y.T if transposed else y for y in want])


@FORMATS
@pytest.mark.parametrize("groups", [1, 7, 32, 33, 200])
def test_ragged(groups, dtype, source, power_of_two, rng):
    options = dict(power_of_two_scales=power_of_two, implementation="cuda")
    run = jax.jit(partial(jgg.quantize_ragged, dtype=dtype, **options))
    for shape in SHAPES:
        x = random(rng, shape, source)
        for _ in range(3):
            sizes = sizes_of.any_kind(rng, shape[0], groups)
            rows = fp8_oracle.quantize(x, (1, 128), dtype, power_of_two)
            columns = fp8_oracle.quantize_groups(x, sizes, dtype, power_of_two)
            assert_same_bits(run(x, sizes), (*rows, *columns))


@pytest.mark.parametrize("source", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("groups", [5, 300])
def test_ragged_with_many_tiles_for_each_processor(groups, source, rng):
    x = random(rng, (20000, 2056), source)
    sizes = sizes_of.multinomial(rng, 20000 - 77, groups)
    got = jgg.quantize_ragged(x, sizes, implementation="cuda")
    assert_same_bits(got[:2], fp8_oracle.quantize(x, (1, 128), E4M3))
    assert_same_bits(got[2:], fp8_oracle.quantize_groups(x, sizes, E4M3))


def test_no_groups(rng):
    x = random(rng, (300, 200), jnp.bfloat16)
    got = jgg.quantize_ragged(x, np.zeros(0, np.int32), implementation="cuda")
    assert_same_bits(got[:2], fp8_oracle.quantize(x, (1, 128), E4M3))
    assert_same_bits(got[2:], fp8_oracle.quantize_groups(x, [], E4M3))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0)])
def test_nothing(shape):
    x = jnp.zeros(shape, jnp.bfloat16)
    got = jgg.quantize_ragged(x, np.array([3, 4]), implementation="cuda")
    want = jgg.quantize_ragged(x, np.array([3, 4]), implementation="xla")
    assert_same_bits(got, want)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_batches(axes, rng):
    x = np.stack([random(rng, (300, 264), jnp.bfloat16) for _ in range(3)])
    sizes = rng.integers(-5, 120, (3, 5), dtype=np.int32)
    operands = [y if axis == 0 else y[0] for y, axis in zip((x, sizes), axes, strict=True)]
    got = jax.jit(jax.vmap(partial(jgg.quantize_ragged, implementation="cuda"), axes))(*operands)
    for b in range(3):
        x_b, sizes_b = (y[b] if axis == 0 else y for y, axis in zip(operands, axes, strict=True))
        want = fp8_oracle.quantize(x_b, (1, 128), E4M3)
        want += fp8_oracle.quantize_groups(x_b, sizes_b, E4M3)
        assert_same_bits([y[b] for y in got], want)


def test_past_two_to_the_31_elements(rng):
    """Addresses need more than 32 bits, which the last rows show."""
    m, cols = 2**18 + 70, 2**13
    x = jax.random.normal(jax.random.key(int(rng.integers(2**31))), (m, cols), jnp.bfloat16)
    sizes = np.array([m - 60, 60])
    values, scales, values_t, scales_t = jgg.quantize_ragged(x, sizes, implementation="cuda")
    end = np.asarray(x[-60:])
    rows = fp8_oracle.quantize(end, (1, 128), E4M3)
    assert_same_bits([values[-60:], scales[-60:]], rows)
    at = -(-(m - 60) // 128)
    columns = fp8_oracle.quantize(end, (128, 1), E4M3)
    got = [values_t[at, :, :60].T, scales_t[at : at + 1]]
    assert_same_bits(got, columns)
