"""Formats of quantised weights: bits of packed records, and values against float64 definitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from tests.support import weight_formats as oracle
from tests.support.weight_formats import FORMATS, bits

SHAPES = [(2, 64, 64), (2, 33, 5), (1, 257, 130), (0, 64, 64), (2, 2, 40, 8), (1, 40, 0), (1, 0, 8)]
# All pairs of formats and shapes. For int4, a pair of group size and shape either has zero points
# or not. 257 rows in groups of 32 have them, because the rows' padding goes beyond the last group.
PACKED = [
    (name, options, shape)
    for index, shape in enumerate(SHAPES)
    for name, options in FORMATS
    if name != "int4" or options["zero_points"] == ((options["group_size"] // 64 + index) % 2 == 0)
]
BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn


def random_codes(rng, name, shape, options):
    """Returns random codes, scales and zero points, none of which is NaN."""
    *leading, k, n = shape
    if name == "mxfp4":
        exponents = rng.integers(0, 255, (*leading, -(-k // 32), n), dtype=np.uint8)
        return rng.integers(0, 16, shape, dtype=np.uint8), exponents, None
    if name == "int4":
        groups = (*leading, -(-k // options["group_size"]), n)
        zero = rng.integers(0, 16, groups, dtype=np.uint8) if options["zero_points"] else None
        scales = rng.standard_normal(groups).astype(BF16)
        return rng.integers(0, 16, shape, dtype=np.uint8), scales, zero
    if name == "int8":
        scales = rng.standard_normal((*leading, n)).astype(np.float32)
        return rng.integers(-128, 128, shape).astype(np.int8), scales, None
    codes = rng.integers(0, 256, shape, dtype=np.uint8).view(E4M3)
    codes = np.where(np.isnan(codes.astype(np.float32)), E4M3(0), codes)
    scale_shape = (n,) if name == "fp8" else (-(-k // 128), -(-n // 128))
    return codes, rng.standard_normal((*leading, *scale_shape)).astype(np.float32), None


def values_of(name, codes, options, dtype):
    """Returns exact values, rounded from float64 to float32, and then to `dtype`."""
    code, scales, zero = codes
    with np.errstate(over="ignore"):
        if name == "mxfp4":
            return oracle.mxfp4(code, scales).astype(np.float32).astype(dtype)
        if name == "int4":
            exact = oracle.int4(code, scales, options["group_size"], zero)
            return exact.astype(np.float32).astype(dtype)
        if name in ("int8", "fp8"):
            return oracle.channels(code.astype(np.float64), scales).astype(np.float32).astype(dtype)
        k, n = code.shape[-2:]
        blocks = np.repeat(np.repeat(scales, 128, -2)[..., :k, :], 128, -1)[..., :n]
        return (code.astype(np.float64) * blocks).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("name, options, shape", PACKED, ids=str)
def test_pack_and_unpack(rng, name, options, shape):
    codes = random_codes(rng, name, shape, options)

    @jax.jit
    def results(codes, scales, zeros):
        size = options.get("group_size")
        q = jgg.from_codes(codes, scales, name, zero_points=zeros, group_size=size)
        return q, q.unpack(), [jgg.dequantize(q, dtype) for dtype in (BF16, np.float32)]

    q, found, dequantized = results(*codes)
    assert q.shape == shape and q.ndim == len(shape) and q.dtype == jnp.bfloat16
    assert q.nbytes == sum(x.nbytes for x in jax.tree.leaves(q))
    for x, want in zip(found, codes, strict=True):
        assert (x is None) == (want is None)
        if x is not None:
            np.testing.assert_array_equal(bits(x), bits(want))
    for got in map(np.asarray, dequantized):
        want = values_of(name, codes, options, got.dtype)
        tiny = np.finfo(np.float32).tiny
        if name != "mxfp4":  # the CPU flushes subnormals
            got, want = (np.where(np.abs(x.astype(np.float32)) < tiny, 0, x) for x in (got, want))
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_array_equal(bits(got), bits(want))


def test_every_e2m1_code_times_every_exponent():
    codes = np.tile(np.arange(16, dtype=np.uint8), 2)[:, None].repeat(256, 1)
    exponents = np.arange(256, dtype=np.uint8)[None]
    want = oracle.mxfp4(codes, exponents)
    number = ~np.isnan(want)
    assert number[:, :255].all()
    # Each exponent has a column of its own, or a block of 32 rows of the only column.
    apart = jgg.from_codes(codes[None], exponents[None], "mxfp4")
    together = jgg.from_codes(codes.T.reshape(1, -1, 1), exponents.T[None], "mxfp4")
    both = jax.jit(lambda q: [jgg.dequantize(q, dtype)[0] for dtype in (BF16, np.float32)])
    for q in (apart, together):
        for got in map(np.asarray, both(q)):
            with np.errstate(over="ignore"):
                rounded = want.astype(np.float32).astype(got.dtype)
            got = got.reshape(256, 32).T if q is together else got
            np.testing.assert_array_equal(bits(got)[number], bits(rounded)[number])
            assert np.isnan(got.astype(np.float32)[:, 255]).all()


def test_every_8_bit_code():
    both = jax.jit(lambda q: [jgg.dequantize(q, dtype) for dtype in (np.float32, BF16)])
    integers = np.arange(-128, 128).astype(np.int8)[:, None]
    floats = np.arange(256).astype(np.uint8).view(E4M3)[:, None]
    floats = np.where(np.isnan(floats.astype(np.float32)), E4M3(0), floats)
    for name, codes in (("int8", integers), ("fp8", floats)):
        for scale in (1, 3, 0, 2**-60, 1.2345e20):
            scales = np.full((1, 1), scale, np.float32)
            q = jgg.from_codes(codes[None], scales, name)
            want = oracle.channels(codes.astype(np.float64)[None], scales).astype(np.float32)
            for got in map(np.asarray, both(q)):
                np.testing.assert_array_equal(got, want.astype(got.dtype))


def test_where_each_bit_lies(rng):
    matrix = 128, 192
    for name in ("mxfp4", "int4", "int8", "fp8", "fp8_128x128"):
        options = dict(group_size=64, zero_points=False)
        codes, scales, _ = random_codes(rng, name, (1, *matrix), options)
        q = jgg.from_codes(codes, scales, name)
        assert q.values.dtype == jnp.uint8
        values = np.asarray(q.values)
        for row in range(2):
            for column in range(3):
                record = values[0, column, row]
                if name in ("mxfp4", "int4"):
                    found = oracle.record_of_4_bits(record, interleaved=name == "mxfp4")
                else:
                    found = oracle.record_of_8_bits(record, interleaved=name != "int8")
                    if name == "int8":
                        found ^= 128  # records have codes plus 128
                place = slice(64 * row, 64 * row + 64), slice(64 * column, 64 * column + 64)
                np.testing.assert_array_equal(found, bits(codes[0][place]))


@pytest.mark.parametrize("name", ["mxfp4", "int4", "int8", "fp8"])
def test_each_bit_of_a_record_is_used_once(name):
    count = 4 if name in ("mxfp4", "int4") else 8
    scales = {
        "mxfp4": np.full((1, 2, 64), 127, np.uint8),
        "int4": np.ones((1, 1, 64), BF16),
        "int8": np.ones((1, 64), np.float32),
        "fp8": np.ones((1, 64), np.float32),
    }[name]
    dtype = {"int8": np.int8, "fp8": E4M3}.get(name, np.uint8)
    seen = np.zeros((64 * 64 * count // 8,), np.int64)

    def record(code):
        codes = np.full((1, 64, 64), code, np.uint8).view(dtype)
        return np.asarray(jgg.from_codes(codes, scales, name).values).reshape(-1)

    for bit in range(count):
        values = record(1 << bit) ^ record(0)
        assert not (seen & values).any()
        seen |= values
        assert np.bitwise_count(values).sum() == 64 * 64
    assert (seen == 255).all()


def test_where_scales_lie(rng):
    exponents = rng.integers(100, 140, (1, 4, 128), dtype=np.uint8)
    codes = rng.integers(0, 16, (1, 128, 128), dtype=np.uint8)
    q = jax.tree.map(np.asarray, jgg.from_codes(codes, exponents, "mxfp4"))
    for column in range(128):
        moved = 254 - int(exponents[0, :, column].max())
        assert q.channel_scales[0, column] == 2.0 ** (126 - moved)
        for group in range(4):
            w, rest = divmod(column % 64, 16)
            half, r = divmod(rest, 8)
            place = 4 * (8 * w + r) + 2 * (group % 2) + half
            stored = int(q.scales[0, column // 64, group // 2, place])
            assert stored == exponents[0, group, column] + moved
    scales = rng.standard_normal((1, 2, 128)).astype(BF16)
    q = jax.tree.map(np.asarray, jgg.from_codes(codes, scales, "int4"))
    assert q.scales.shape == (1, 2, 2, 64)
    for column in range(128):
        w, rest = divmod(column % 64, 16)
        half, r = divmod(rest, 8)
        for group in range(2):
            stored = q.scales[0, column // 64, group, 2 * (8 * w + r) + half]
            assert stored == scales[0, group, column]


def test_what_a_kernel_makes_of_mxfp4(rng):
    codes = rng.integers(0, 16, (1, 64, 64), dtype=np.uint8)
    exponents = rng.integers(60, 180, (1, 2, 64), dtype=np.uint8)
    q = jgg.from_codes(codes, exponents, "mxfp4")
    words = np.frombuffer(np.asarray(q.values).tobytes(), "<u4").reshape(128, 4)
    pairs = oracle.kernel_pairs(words)
    want = oracle.mxfp4(codes, exponents)[0]
    slots = np.asarray(q.scales)[0, 0, 0].reshape(32, 2, 2).astype(np.float64)
    channel = np.asarray(q.channel_scales, np.float64)[0]
    for thread, step, pair, half, column, row in oracle.threads():
        bf16 = (int(pairs[pair][thread, step]) >> 16 * half & 0xFFFF) << 16
        fragment = np.uint32(bf16).view(np.float32).astype(np.float64)
        w, lane = divmod(thread, 32)
        scale = 2.0 ** (slots[8 * w + lane // 4, step // 2, pair % 2] - 127)
        assert fragment * scale * channel[column] == want[row, column]


def test_what_a_kernel_makes_of_int8():
    codes = (np.arange(512 * 64).reshape(512, 64) * 37 % 256).astype(np.uint8).view(np.int8)
    q = jgg.from_codes(codes[None], np.ones((1, 64), np.float32), "int8")
    np.testing.assert_array_equal(oracle.kernel_int8(q.values[0]), codes * 2.0**-6)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_what_a_kernel_makes_of_int4(has_zeros, rng):
    """Weights are 2^-69 times the rounded products for the scales that decode.h names."""
    codes = rng.integers(0, 16, (1, 64, 256), dtype=np.uint8)
    signs = rng.choice([-1, 0, 1], (1, 2, 256))
    scales = (signs * np.exp2(rng.uniform(-57, 67, signs.shape))).astype(np.float32).astype(BF16)
    scales[0, 0, :2] = 2.0**-57, np.float32(2.0**68 - 2.0**60)
    zeros = rng.integers(0, 16, scales.shape, dtype=np.uint8) if has_zeros else None
    q = jgg.from_codes(codes, scales, "int4", group_size=32, zero_points=zeros)
    wide = scales.astype(np.float64).repeat(32, 1)[0]
    zero = zeros.repeat(32, 1)[0] if has_zeros else None
    got = oracle.kernel_int4(q.values[0], wide, zero)
    want = oracle.in_bfloat16((codes[0] - (8.0 if zero is None else 1.0 * zero)) * wide)
    np.testing.assert_array_equal(got * 2.0**69, want)


@pytest.mark.parametrize("name, scales", [("fp8", (1, 256)), ("fp8_128x128", (1, 4, 2))])
def test_every_two_fp8_codes_that_share_bits_of_a_word(name, scales):
    """Codes of columns c and c + 8 interleave. All codes stay as they are, NaN and -0 included."""
    both = np.arange(1 << 16).reshape(512, 16, 8)
    codes = np.stack([both >> 8, both & 255], axis=2).reshape(512, 256).astype(np.uint8)
    q = jgg.from_codes(codes[None].view(E4M3), np.ones(scales, np.float32), name)
    np.testing.assert_array_equal(bits(q.unpack().codes)[0], codes)
    # A kernel's bfloat16 is 2^-120 times the value of a code.
    moved = (oracle.kernel_e4m3(q.values[0]) << 16).view(np.float32).astype(np.float64) * 2.0**120
    want, is_number = codes.view(E4M3).astype(np.float32), codes % 128 != 127
    got = moved.astype(np.float32)
    np.testing.assert_array_equal(bits(got)[is_number], bits(want)[is_number])


def test_what_a_kernel_makes_of_fp8_in_blocks(rng):
    """Each record has its block's scale, and the sum of two numbers of bfloat16 in its place."""
    codes = np.arange(256, dtype=np.uint8).view(E4M3)[:, None].repeat(700, 1)
    codes = np.where(np.isnan(codes.astype(np.float32)), E4M3(0), codes)
    scales = rng.uniform(1, 2, (2, 6)) * np.exp2(rng.integers(-40, 6, (2, 6)))
    scales[:, 1], scales[1, 2], scales[:, 4] = (1e-30, -7e-33), -3.4e38, (0, 63.9)
    scales = scales.astype(np.float32)
    q = jgg.from_codes(codes[None], scales[None], "fp8_128x128")
    slots, channel = np.asarray(q.scales), np.asarray(q.channel_scales)
    assert slots.shape == (1, 11, 4, 4) and channel.shape == (1, 704)
    np.testing.assert_array_equal(slots[0, ..., 0], scales.T.repeat(2, 0)[:11].repeat(2, 1))
    np.testing.assert_array_equal(channel[0, :256], 1)
    np.testing.assert_array_equal(channel[0, 256:384], 2.0**122)
    np.testing.assert_array_equal(channel[0, 384:], 1)
    want = np.asarray(jgg.dequantize(q)[0], np.float64)
    got, finite = oracle.kernel_blocks(q)[0], np.isfinite(want)
    assert (np.abs(got[~finite]) > np.finfo(np.float32).max * (1 - 2**-8)).all()
    # They differ by one in the last place at most, also if the kernel's number is subnormal.
    bound = np.abs(want) * 2**-7 + 2.0**-133 * channel[0, :700]
    assert (np.abs(got - want)[finite] <= bound[finite]).all()
    assert (got != want)[:, channel[0, :700] == 1].mean() < 2**-6


def test_nan_blocks_and_columns(rng):
    codes = rng.integers(1, 8, (1, 64, 4), dtype=np.uint8)
    exponents = np.full((1, 2, 4), 127, np.uint8)
    exponents[0, 1, 2] = 255
    got = np.asarray(jgg.dequantize(jgg.from_codes(codes, exponents, "mxfp4"), np.float32))[0]
    assert np.isnan(got[32:, 2]).all()
    assert np.isfinite(np.delete(got, 2, 1)).all() and np.isfinite(got[:32]).all()
    fp8 = np.ones((1, 64, 4), E4M3)
    fp8[0, 7, 1] = np.nan
    got = np.asarray(jgg.dequantize(jgg.from_codes(fp8, np.ones((1, 4), np.float32), "fp8")))[0]
    assert np.isnan(got.astype(np.float32)[7, 1])
    assert np.isfinite(np.delete(got.astype(np.float32), 1, 1)).all()
    fp8 = np.ones((1, 200, 300), E4M3)
    fp8[0, 130, 1] = np.nan
    scales = np.ones((1, 2, 3), np.float32)
    scales[0, 0, 2] = np.nan
    q = jgg.from_codes(fp8, scales, "fp8_128x128")
    want = np.zeros((200, 300), bool)
    want[128:, :128] = want[:128, 256:] = True
    for got in (jgg.dequantize(q), oracle.kernel_blocks(q)):
        np.testing.assert_array_equal(np.isnan(np.asarray(got[0], np.float32)), want)


@pytest.mark.parametrize("name, options", FORMATS, ids=str)
def test_quantize(rng, name, options):
    shape = (3, 160, 200)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, (3, 1, 200)))).astype(np.float32)
    x[0, :, 3] = 0
    codes = jax.jit(lambda x: jgg.quantize(x, name, **options).unpack())(x)
    assert (codes.zero_points is not None) == options.get("zero_points", False)
    exact = values_of(name, jax.tree.map(np.asarray, tuple(codes)), options, np.float64)
    size = options.get("group_size", 32 if name == "mxfp4" else 128)
    pad = -(-160 // size) * size - 160
    groups = np.pad(x, ((0, 0), (0, pad), (0, 0))).reshape(3, -1, size, 200)
    error = np.abs(np.pad(exact - x, ((0, 0), (0, pad), (0, 0)))).reshape(groups.shape)
    largest = np.abs(groups).max(2)
    if name == "mxfp4":
        step = 2.0 ** (np.floor(np.log2(np.where(largest, largest, 1))) - 2)
        # An error is at most half of the widest step of 2 scales, or the distance to 6 scales.
        bound = np.maximum(step, largest - 6 * step)
    elif name == "int4":
        span = groups.max(2).clip(0) - groups.min(2).clip(None, 0)
        step = span / 15 if options["zero_points"] else largest / 7
        bound = (1 if options["zero_points"] else 0.5) * step * (1 + 2**-4)
    elif name == "int8":
        bound = np.abs(x).max(1)[:, None] / 127 * 0.5001
    else:
        bound = np.full_like(largest, np.abs(x).max() * 2**-4)
    assert (error <= bound[:, :, None] + 1e-30).all()
    assert (exact[0, :, 3] == 0).all()


def test_quantize_rounds_ties_to_even_and_saturates():
    x = np.zeros((1, 32, 1), np.float32)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, -0.25, -5, 0.26, 5.1, 0.74, 3.4, 6, -0.0]
    x[0, :16, 0] = ties
    got = np.asarray(jgg.dequantize(jgg.quantize(x, "mxfp4"), np.float32))[0, :16, 0]
    want = [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -4, 0.5, 6, 0.5, 3, 6, -0.0]
    np.testing.assert_array_equal(got, np.float32(want))
    assert np.signbit(got[[8, 15]]).all()


def test_bad_numbers_spoil_their_group_alone(rng):
    for bad in (np.nan, np.inf, -np.inf):
        x = rng.standard_normal((1, 128, 3)).astype(np.float32)
        x[0, 40, 1] = bad
        for name, rows in (("mxfp4", slice(32, 64)), ("int8", slice(None))):
            got = np.array(jgg.dequantize(jgg.quantize(x, name), np.float32))[0]
            assert np.isnan(got[rows, 1]).all()
            got[rows, 1] = 0
            assert np.isfinite(got).all()


def test_the_constructor_names_what_is_wrong(rng):
    q = jgg.quantize(rng.standard_normal((2, 64, 96)).astype(np.float32), "int4")
    for matrix in ((64, 96, 1), 64):
        with pytest.raises(TypeError, match=r"matrix must be \(k, n\), got"):
            jgg.QuantizedArray(q.values, q.scales, format="int4", matrix=matrix)
    with pytest.raises(TypeError, match="values must be an array, got NoneType"):
        jgg.QuantizedArray(None, q.scales, format="int4", matrix=(64, 96))
    with pytest.raises(ValueError, match="spec must have at most 3 entries for.*int4.*got"):
        q.specs(P("a", None, None, "b"))
    q = jgg.quantize(np.ones((2, 64, 96), np.float32), "fp8_128x128")
    with pytest.raises(TypeError, match=r"scales must be.*\(2, 2, 1, 4\) for.*got.*\(2, 1, 1\)"):
        jgg.QuantizedArray(q.values, q.scales[:, :1, :, 0], format="fp8_128x128", matrix=(64, 96))
    with pytest.raises(TypeError, match="channel_scales must be an array for the format fp8_128"):
        jgg.QuantizedArray(q.values, q.scales, format="fp8_128x128", matrix=(64, 96))


@pytest.mark.parametrize(
    "name, array, change, message",
    [
        ("int4", 0, lambda x: x.astype(np.int8) - 8, r"codes.*in 0..15, got -8..7; add 8"),
        ("int4", 0, lambda x: jnp.asarray(x.astype(np.int8) - 8, jnp.int4), "got dtype int4; add"),
        ("int4", 2, lambda x: x + np.uint8(1), r"zero_points.*in 0..15, got 1..16"),
        ("mxfp4", 0, lambda x: x.astype(np.int32) + 16, r"codes of mxfp4.*0..15, got 16..31$"),
        ("mxfp4", 1, lambda x: x.astype(np.int32) + 10, r"scales of mxfp4.*0..255, got 10..264"),
    ],
)
def test_codes_outside_of_their_range(rng, name, array, change, message):
    """Codes that do not fit would lose bits in silence."""
    options = dict(group_size=32, zero_points=True)
    given = list(random_codes(rng, name, (2, 64, 96), options))
    for x, most in zip(given, (15, 254, 15), strict=True):
        if x is not None and x.dtype == np.uint8:
            x[0, 0, :2] = 0, most

    def packed(codes, scales, zeros):
        return jgg.from_codes(codes, scales, name, zero_points=zeros)

    got = np.asarray(jgg.dequantize(packed(*given), np.float32))
    want = values_of(name, given, options, np.float32)
    np.testing.assert_array_equal(got, want)
    given[array] = change(given[array])
    with pytest.raises(ValueError, match=message):
        packed(*given)


def test_transformations(rng):
    x = rng.standard_normal((2, 3, 64, 96)).astype(np.float32)
    q = jgg.quantize(x, "mxfp4")
    want = np.asarray(jgg.dequantize(q))
    assert q.shape == x.shape
    np.testing.assert_array_equal(jax.vmap(jgg.dequantize)(q), want)

    @jax.jit
    def transformed(q):
        _, scanned = jax.lax.scan(lambda c, q: (c, jgg.dequantize(q)), None, q)
        return jgg.dequantize(q), scanned

    for got in transformed(q):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(jgg.dequantize(jax.tree.map(lambda x: x[1], q)), want[1])
    assert jax.eval_shape(jgg.dequantize, q).shape == x.shape


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    "name, dtype, shape, power", [("int4", BF16, (1, 96), 68), ("int8", np.float32, (96,), 122)]
)
def test_scales_that_kernels_cannot_take(name, dtype, shape, power):
    codes = np.zeros((64, 96), np.int8 if name == "int8" else np.uint8)
    message = rf"scales of {name}.*less than .*\(2\^{power}\), got one of magnitude"
    for scale in (2.0**power, -(2.0**power), 1e300):
        with pytest.raises(ValueError, match=message):
            jgg.from_codes(codes, np.full(shape, scale), name)
    with pytest.raises(ValueError, match=message):
        jgg.from_codes(codes, jnp.full(shape, 2.0**power, dtype), name)
    for scale in (2.0 ** (power - 1), np.inf, np.nan):
        q = jgg.from_codes(codes, jnp.full(shape, scale, dtype), name)
        np.testing.assert_array_equal(q.unpack().scales.astype(np.float32), np.full(shape, scale))
    traced = jax.jit(lambda scales: jgg.from_codes(codes, scales, name).unpack().scales)
    assert (traced(jnp.full(shape, 2.0**power, dtype)) == 2.0**power).all()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: jgg.quantize(np.zeros((1, 32, 8), np.float32), "mxfp5"),
            ValueError,
            "mxfp5.*mxfp4",
        ),
        (lambda: jgg.quantize(np.zeros((1, 32, 8), np.int32)), TypeError, "x must be floating"),
        (
            lambda: jgg.quantize(np.zeros((32, 8), np.float32), "int4", group_size=48),
            ValueError,
            "group_size.*32, 64, 128.*48",
        ),
        (
            lambda: jgg.quantize(np.zeros((32, 8), np.float32), zero_points=True),
            ValueError,
            "'mxfp4' has no zero points",
        ),
        (
            lambda: jgg.quantize(np.zeros((32, 8), np.float32), layout="rows"),
            ValueError,
            "'mxfp4' of layout 'rows'",
        ),
        (lambda: jgg.dequantize(np.zeros(3)), TypeError, "QuantizedArray, got ndarray"),
        (
            lambda: jgg.from_codes(
                np.zeros((32, 8), np.uint8), np.zeros((2, 8), np.uint8), "mxfp4"
            ),
            TypeError,
            r"scales of mxfp4 must be uint8 of shape \(1, 8\)",
        ),
        (
            lambda: jgg.from_codes(np.zeros((32, 8), np.uint8), np.zeros(8, np.float32), "int8"),
            TypeError,
            r"codes of int8 must be int8 of shape \(32, 8\).*got uint8",
        ),
        (
            lambda: jgg.from_codes(
                np.zeros((2, 32, 8), np.int8), np.zeros((3, 8), np.float32), "int8"
            ),
            TypeError,
            r"must begin with the dimensions \(2,\) of the codes, got float32 of shape \(3, 8\)",
        ),
        (
            lambda: jgg.QuantizedArray(
                np.zeros((1, 1, 1, 2048), np.uint8), format="int8", matrix=(64, 64)
            ),
            TypeError,
            "values must be uint8 of shape",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
