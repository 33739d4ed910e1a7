"""Encodes and decodes MXFP4, int4 and int8 in pure JAX.

Every function takes one matrix [k, n]. MXFP4 is decoded with integer operations, because XLA
flushes subnormal results on the CPU and the format has values of 2^-128.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv, round_up
from jax_grouped_gemm._src.quantized import pack
from jax_grouped_gemm._src.quantized.format import (
    Codes,
    Format,
    Matrix,
    Parts,
    ScaleLayout,
    register,
)

BIAS = 127  # the bias of the exponents of float32, bfloat16 and e8m0
NAN_BLOCK = 255  # the e8m0 code of NaN
SYMMETRIC_ZERO = 8  # the code of zero in int4 without zero points


def in_groups(x: jax.Array, size: int) -> jax.Array:
    """Returns [k, n] as [ceil(k / size), size, n], padded with zeros."""
    k, n = x.shape
    padded = jnp.pad(x, ((0, round_up(k, size) - k), (0, 0)))
    return padded.reshape(cdiv(k, size), size, n)


def of_groups(groups: jax.Array, k: int) -> jax.Array:
    """Returns [k, n] from the result of `in_groups`."""
    count, size, n = groups.shape
    return groups.reshape(count * size, n)[:k]  # -1 is ambiguous if n is 0


def each_row(scales: jax.Array, size: int, k: int) -> jax.Array:
    """Returns [k, n] from [groups, n] by repeating each group's numbers for its `size` rows."""
    return jnp.repeat(scales, size, axis=0, total_repeat_length=scales.shape[0] * size)[:k]


def largest_finite(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns the largest finite magnitude along `axis`, and whether all elements are finite.

    Both results keep `axis` with size 1.
    """
    finite = jnp.isfinite(x)
    magnitudes = jnp.where(finite, jnp.abs(x), 0)
    return magnitudes.max(axis, keepdims=True, initial=0), finite.all(axis, keepdims=True)


def _f32_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32).astype(jnp.int32)


def _of_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32), jnp.float32)


# --- MXFP4


def _e2m1_times(codes: jax.Array, exponents: jax.Array) -> jax.Array:
    """Returns e2m1 `codes` times 2^(exponents - 127), exact in float32, subnormals included."""
    codes, exponents = codes.astype(jnp.int32), exponents.astype(jnp.int32)
    magnitude = codes & 7
    # Code 1 is 0.5, or 2^-1. Codes from 2 on are (1 + half / 2) 2^(code // 2 - 1).
    is_half = (magnitude == 1).astype(jnp.int32)
    half = jnp.where(magnitude >= 2, magnitude & 1, 0)
    exponent = exponents + jnp.where(magnitude >= 2, magnitude // 2 - 1, -is_half)
    normal = exponent << 23 | half << 22
    # If `exponent` is 0 or -1, the result is subnormal: shift the mantissa right, with its leading
    # bit. The shift loses no bit, because every result is a multiple of 2^-128.
    subnormal = (1 << 23 | half << 22) >> jnp.clip(1 - exponent, 0, 2)
    bits = jnp.where(exponent < 1, subnormal, jnp.where(exponent > 254, 255 << 23, normal))
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(exponents == NAN_BLOCK, 0x7FC00000, bits)
    return _of_bits(bits | (codes >> 3) << 31)


def exactly(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Converts float32 `x` with bfloat16 values to `dtype`, without flushing subnormals."""
    if dtype == jnp.bfloat16:
        upper = lax.bitcast_convert_type(x, jnp.uint32) >> 16
        return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return x.astype(dtype)


def mxfp4_encode(x: jax.Array, format: Format) -> Codes:
    """Encodes blocks with the exponent of the largest element minus 2; values saturate at 6."""
    blocks = in_groups(x, 32)
    largest, finite = largest_finite(blocks, 1)
    exponents = jnp.clip((_f32_bits(largest) >> 23) - 2, 0, 254)
    scaled = jnp.abs(jnp.where(jnp.isfinite(blocks), blocks, 0)) * _of_bits((254 - exponents) << 23)
    # Ties round to the even code: down for 0.25, 1.25, 2.5 and 5.
    code = jnp.zeros(blocks.shape, jnp.uint8)
    for limit in (0.25, 1.25, 2.5, 5.0):
        code += scaled > limit
    for limit in (0.75, 1.75, 3.5):
        code += scaled >= limit
    code |= jnp.signbit(blocks).astype(jnp.uint8) << 3  # `mxfp4_pack` clears them in NaN blocks
    exponents = jnp.where(finite, exponents, NAN_BLOCK)[:, 0].astype(jnp.uint8)
    return Codes(of_groups(code, x.shape[0]).astype(jnp.uint8), exponents)


def mxfp4_decode(codes: Codes, format: Format, dtype: np.dtype) -> jax.Array:
    """Decodes exactly in bfloat16 and float32."""
    exponents = each_row(codes.scales, 32, codes.codes.shape[0])
    # Without this barrier XLA would store several 32-bit integers in memory for each code.
    code = lax.optimization_barrier(codes.codes)
    return exactly(_e2m1_times(code, exponents), dtype)


def mxfp4_pack(codes: Codes, format: Format) -> Parts:
    """Packs codes, and raises the exponents of each column by `move`, so that the largest is 254.

    Kernels read the bits of a code as a bfloat16, which is 2^-126 times the code's value. Exponents
    are raised as far as they go, so that weights are far from the smallest numbers of bfloat16.
    With a `move` of 254 - `largest`, the channel scale 2^(126 - move) undoes both this factor and
    the raised exponents. The epilogue multiplies sums by the channel scale, so that the mainloop
    does not have to.
    """
    code, exponents = codes.codes, codes.scales.astype(jnp.int32)
    is_nan = exponents == NAN_BLOCK
    largest = jnp.where(is_nan, -1, exponents).max(axis=0, initial=-1)
    largest = jnp.where(largest < 0, BIAS, largest)
    moved = jnp.where(is_nan, NAN_BLOCK, exponents + 254 - largest).astype(jnp.uint8)
    # The bits of 2^(largest - 128), which is subnormal if `largest` is less than 2.
    scale_bits = jnp.where(largest < 2, 1 << (21 + largest), (largest - 1) << 23)
    code = jnp.where(each_row(is_nan, 32, code.shape[0]), 0, code).astype(jnp.uint8)
    return Parts(
        pack.pack4(code, fp4=True),
        pack.pack_groups(moved, record=2),
        pack.pad_columns(_of_bits(scale_bits), 1),
    )


def mxfp4_unpack(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    """Unpacks exactly, except the codes of NaN blocks, which become zeros."""
    k, n = matrix
    bits = _f32_bits(parts.channel_scales[:n])
    largest = jnp.where(bits >> 23, (bits >> 23) + 1, bits >> 22)
    moved = pack.unpack_groups(parts.scales, (cdiv(k, 32), n), record=2).astype(jnp.int32)
    exponents = jnp.where(moved == NAN_BLOCK, NAN_BLOCK, moved - 254 + largest)
    return Codes(pack.unpack4(parts.values, matrix, fp4=True), exponents.astype(jnp.uint8))


# --- int4


def int4_encode(x: jax.Array, format: Format) -> Codes:
    """Encodes groups with the scale largest / 7, or (largest - least) / 15 with zero points."""
    assert format.group_size is not None
    groups = in_groups(x, format.group_size)
    largest, finite = largest_finite(groups, 1)
    if format.zero_points:
        numbers = jnp.where(jnp.isfinite(groups), groups, 0)
        high, low = (
            numbers.max(1, keepdims=True, initial=0),
            numbers.min(1, keepdims=True, initial=0),
        )
        span = (high - low) / 15
    else:
        span = largest / 7
    scale = span.astype(jnp.bfloat16)
    scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    wide = scale.astype(jnp.float32)
    zero = jnp.full_like(wide, SYMMETRIC_ZERO)
    if format.zero_points:
        zero = jnp.clip(jnp.round(-low / wide), 0, 15)
    code = jnp.clip(jnp.round(jnp.where(jnp.isfinite(groups), groups, 0) / wide) + zero, 0, 15)
    code = of_groups(code, x.shape[0]).astype(jnp.uint8)
    scale = jnp.where(finite, scale, jnp.full_like(scale, np.nan))[:, 0]
    return Codes(code, scale, zero[:, 0].astype(jnp.uint8) if format.zero_points else None)


def int4_decode(codes: Codes, format: Format, dtype: np.dtype) -> jax.Array:
    """Returns (code - zero) * scale, which is exact in float32, rounded once to `dtype`."""
    assert format.group_size is not None
    k = codes.codes.shape[0]
    zero: jax.Array | int = SYMMETRIC_ZERO
    if codes.zero_points is not None:
        zero = each_row(codes.zero_points, format.group_size, k).astype(jnp.int32)
    steps = codes.codes.astype(jnp.int32) - zero
    scales = each_row(codes.scales, format.group_size, k)
    return (steps.astype(jnp.float32) * scales.astype(jnp.float32)).astype(dtype)


def int4_pack(codes: Codes, format: Format) -> Parts:
    """Packs codes. Padding groups get zero scales. Padding in a group gets the zero point."""
    code, zero = codes.codes, codes.zero_points
    groups = cdiv(round_up(code.shape[0], pack.SIDE), format.group_size or 1)

    def packed_groups(x):
        return pack.pack_groups(jnp.pad(x, ((0, groups - x.shape[0]), (0, 0))))

    if zero is not None:
        # A zero point is the code of zero, so padding along k decodes to zero.
        k = code.shape[0]
        more = round_up(k, pack.SIDE) - k
        group = jnp.minimum((k + jnp.arange(more)) // (format.group_size or 1), zero.shape[0] - 1)
        code = jnp.concatenate([code, zero[group]])
    return Parts(
        pack.pack4(code, fp4=False, fill=0 if zero is not None else SYMMETRIC_ZERO),
        packed_groups(codes.scales),
        None,
        None if zero is None else packed_groups(zero),
    )


def int4_unpack(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    """Returns the codes that `int4_pack` packed, exactly."""
    k, n = matrix
    shape = cdiv(k, format.group_size or 1), n
    zero = parts.zero_points
    return Codes(
        pack.unpack4(parts.values, matrix, fp4=False),
        pack.unpack_groups(parts.scales, shape),
        None if zero is None else pack.unpack_groups(zero, shape),
    )


# --- int8


def int8_encode(x: jax.Array, format: Format) -> Codes:
    """Encodes columns with the scale largest / 127, or 1 for columns of zeros."""
    largest, finite = largest_finite(x, 0)
    scale = largest / 127
    scale = jnp.where(scale > 0, scale, 1)
    code = jnp.clip(jnp.round(jnp.where(jnp.isfinite(x), x, 0) / scale), -127, 127)
    return Codes(code.astype(jnp.int8), jnp.where(finite, scale, np.nan)[0])


def channel_decode(codes: Codes, format: Format, dtype: np.dtype) -> jax.Array:
    """Returns the float32 product of a code and its column's scale, rounded to `dtype`."""
    return (codes.codes.astype(jnp.float32) * codes.scales[None]).astype(dtype)


def int8_pack(codes: Codes, format: Format) -> Parts:
    """Packs codes plus 128 as bytes, and pads scales to the columns of the records."""
    values = pack.pack8(pack.bits_of(codes.codes) ^ 128, fill=128)
    return Parts(values, None, pack.pad_columns(codes.scales, 1))


def int8_unpack(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    """Returns the codes that `int8_pack` packed, exactly."""
    codes = lax.bitcast_convert_type(pack.unpack8(parts.values, matrix) ^ 128, jnp.int8)
    return Codes(codes, parts.channel_scales[: matrix[1]])


def packed(format: Format, *, encode, decode, pack, unpack, **options) -> Format:
    """Registers a format in the layout "packed" with functions that encode, decode and pack."""

    def quantize(x, format):
        return pack(encode(x, format), format)

    def dequantize(parts, format, matrix, dtype):
        return decode(unpack(parts, format, matrix), format, dtype)

    functions = dict(quantize=quantize, dequantize=dequantize, pack=pack, unpack=unpack)
    return register(format, **functions, **options)


UINT8 = np.dtype(np.uint8)

packed(
    Format(
        "mxfp4",
        UINT8,
        4,
        ScaleLayout((32, 1), UINT8),
        channel_scales=True,
        values_rank=3,
        version=2,
    ),
    encode=mxfp4_encode,
    decode=mxfp4_decode,
    pack=mxfp4_pack,
    unpack=mxfp4_unpack,
)
packed(
    Format("int4", UINT8, 4, ScaleLayout((128, 1), np.dtype(jnp.bfloat16)), values_rank=3),
    encode=int4_encode,
    decode=int4_decode,
    pack=int4_pack,
    unpack=int4_unpack,
    group_sizes=(32, 64, 128),
    may_have_zero_points=True,
    scales_below=2.0**68,
)
packed(
    Format("int8", UINT8, 8, channel_scales=True, values_rank=3, version=2),
    encode=int8_encode,
    decode=channel_decode,
    pack=int8_pack,
    unpack=int8_unpack,
    scales_below=2.0**122,
)
