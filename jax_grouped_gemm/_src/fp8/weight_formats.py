"""Registers the FP8 formats of `QuantizedArray`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import Implementation, canonical_precision
from jax_grouped_gemm._src.arrays import cdiv, round_up
from jax_grouped_gemm._src.fp8.formats import BLOCK, ROW_BLOCKS, ROWS, TENSOR
from jax_grouped_gemm._src.fp8.quantize import primitive, reference
from jax_grouped_gemm._src.fp8.scaled.api import scaled_product
from jax_grouped_gemm._src.quantized import pack
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import (
    Codes,
    Format,
    Matrix,
    Parts,
    ScaleLayout,
    register,
)
from jax_grouped_gemm._src.quantized.reference import (
    UINT8,
    channel_decode,
    in_groups,
    largest_finite,
    packed,
)

E4M3 = np.dtype(jnp.float8_e4m3fn)
F32 = np.dtype(np.float32)
E5M2 = np.dtype(jnp.float8_e5m2)


def _params(format: Format) -> dict[str, Any]:
    """Returns the parameters of the quantisers. Packed values are float8_e4m3fn."""
    return dict(dtype=E4M3 if format.values == UINT8 else format.values, power_of_two=False)


def _packed_codes(codes: jax.Array) -> jax.Array:
    """Packs codes, with the bits of every two consecutive bytes interleaved.

    In the 16 bits that hold both codes, the bits of the first code are where a bfloat16 has its
    sign, the end of its exponent and the beginning of its mantissa. Kernels then need one
    instruction for the first code, and four for the second.
    """
    both = pack.pack8(pack.bits_of(codes))
    first, second = both[..., ::2], both[..., 1::2]
    low = first << 4 | second & 0x0F
    high = first & 0x80 | second & 0x70 | (second & 0x80 | first & 0x70) >> 4
    return jnp.stack([low, high], axis=-1).reshape(both.shape)


def _unpacked_codes(values: jax.Array, matrix: Matrix) -> jax.Array:
    low, high = values[..., ::2], values[..., 1::2]
    first = high & 0x80 | (high & 0x07) << 4 | low >> 4
    second = (high & 0x08) << 4 | high & 0x70 | low & 0x0F
    both = jnp.stack([first, second], axis=-1).reshape(values.shape)
    return lax.bitcast_convert_type(pack.unpack8(both, matrix), E4M3)


def _channel_encode(x: jax.Array, format: Format) -> Codes:
    values, scales = reference.quantize(x, (0,), **_params(format))
    return Codes(values, scales[0])


def _channel_pack(codes: Codes, format: Format) -> Parts:
    """Gives a column with a NaN code the scale NaN, because kernels decode NaN codes to numbers."""
    is_nan = jnp.isnan(codes.codes.astype(jnp.float32)).any(axis=0)
    scales = pack.pad_columns(jnp.where(is_nan, np.nan, codes.scales), 1)
    return Parts(_packed_codes(codes.codes), None, scales)


def _channel_unpack(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    return Codes(_unpacked_codes(parts.values, matrix), parts.channel_scales[: matrix[1]])


def _blocks_encode(x: jax.Array, format: Format) -> Codes:
    """Encodes x with a scale for each row, for all of x, or for blocks of 1 x 128 or 128 x 128."""
    assert format.scales is not None
    block, params = format.scales.block, _params(format)
    if block == (1, BLOCK):
        return Codes(*primitive.quantize_rows(x, **params, implementation=None))
    if block == (BLOCK, BLOCK):
        forms = dict(plain=True, transposed=False, implementation=None)
        values, scales = primitive.quantize_blocks(x[None], **forms, **params)
        return Codes(values[0], scales[0])
    axes = tuple(axis for axis, size in enumerate(block) if size is None)
    return Codes(*reference.quantize(x, axes, **params))


def _blocks_decode(codes: Codes, format: Format, dtype: np.dtype) -> jax.Array:
    """Returns the float32 product of a code and its block's scale, rounded to `dtype`."""
    assert format.scales is not None
    scales = codes.scales
    for axis, (size, block) in enumerate(zip(codes.codes.shape, format.scales.block, strict=True)):
        if block is not None:
            scales = jnp.repeat(scales, block, axis=axis)
            scales = lax.slice_in_dim(scales, 0, size, axis=axis)
    return (codes.codes.astype(jnp.float32) * scales).astype(dtype)


def _power_of_two(exponents: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponents + 127) << 23, jnp.float32)


def _each_record(x: jax.Array, matrix: Matrix) -> jax.Array:
    """Returns numbers of blocks, [ceil(k / 128), ceil(n / 128)], for records [n / 64, k / 64]."""
    for axis, size in enumerate(matrix):
        x = jnp.repeat(x, BLOCK // pack.SIDE, axis=axis)
        x = lax.slice_in_dim(x, 0, cdiv(size, pack.SIDE), axis=axis)
    return x.T


def _blocks_pack(codes: Codes, format: Format) -> Parts:
    """Packs codes, with four numbers for each record: the scale, its high and low part, and zero.

    Kernels read the bits of a code as a bfloat16, which is 2^-120 times the code's value, and
    multiply it by the sum of two numbers of bfloat16, which is 2^120 times the scale. Scales of a
    column whose largest is 64 or more are divided by a power of two first, the channel scale.

    A block with a NaN code gets the scale NaN, because kernels decode NaN codes to numbers.
    """
    matrix = codes.codes.shape
    is_nan = jnp.isnan(codes.codes.astype(jnp.float32))
    for _ in matrix:
        is_nan = in_groups(is_nan, BLOCK).any(axis=1).T
    scales = jnp.where(is_nan, np.nan, codes.scales)
    largest, _ = largest_finite(scales, 0)
    shift = jnp.maximum(jnp.frexp(largest)[1] - 6, 0)  # [1, ceil(n / 128)]
    moved = scales * _power_of_two(120 - shift)
    # The compiler may leave out casts to bfloat16 and back.
    high = lax.reduce_precision(moved, exponent_bits=8, mantissa_bits=7)
    low = jnp.where(jnp.isfinite(moved), moved - high, 0)
    low = lax.reduce_precision(low, exponent_bits=8, mantissa_bits=7)
    every = [_each_record(x, matrix) for x in (scales, high, low, jnp.zeros_like(low))]
    channel_scales = jnp.repeat(_power_of_two(shift[0]), BLOCK)[: round_up(matrix[1], pack.SIDE)]
    return Parts(_packed_codes(codes.codes), jnp.stack(every, axis=-1), channel_scales)


def _blocks_unpack(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    step = BLOCK // pack.SIDE
    return Codes(_unpacked_codes(parts.values, matrix), parts.scales[::step, ::step, 0].T)


def _records_decode(parts: Parts, format: Format, matrix: Matrix, dtype: np.dtype) -> jax.Array:
    """Takes the scale of each record, as kernels do, because slices of matrices may cut blocks."""
    records = dataclasses.replace(format, scales=ScaleLayout((pack.SIDE, pack.SIDE), F32))
    codes = Codes(_unpacked_codes(parts.values, matrix), parts.scales[..., 0].T)
    return _blocks_decode(codes, records, dtype)


ROW_SCALINGS = {"fp8_1x128": ROW_BLOCKS, "fp8_row": ROWS, "fp8_tensor": TENSOR}
"""Which elements of rows share a scale, by format."""

FAST = {
    None: False,
    lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32: False,
    lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM: True,
}
"""Whether the tensor cores alone add up products, by precision."""


def _ragged_dot(
    lhs: QuantizedArray,
    rhs: QuantizedArray,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    transpose_rhs: bool = False,
    implementation: Implementation = None,
) -> jax.Array:
    """Computes `ragged_dot` of rows and matrices that are both in FP8, in the layout "rows"."""
    if lhs.format.name not in ROW_SCALINGS:
        raise TypeError(
            f"ragged_dot: lhs must be of the format {' or '.join(ROW_SCALINGS)} if rhs is of "
            f"the format {rhs.format}, got {lhs.format} in the layout {lhs.format.layout!r}"
        )
    precision = None if precision is None else canonical_precision(precision)
    if precision not in FAST or out_sharding is not None:
        raise ValueError(
            "ragged_dot: out_sharding must be None and precision None, ANY_F8_ANY_F8_F32 or "
            f"ANY_F8_ANY_F8_F32_FAST_ACCUM for FP8 operands, got {out_sharding!r} and {precision!r}"
        )
    of_columns = "fp8_row" if transpose_rhs else "fp8"
    if rhs.format.name not in ("fp8_128x128", "fp8_tensor", of_columns):
        raise TypeError(
            f"ragged_dot: rhs must be of the format fp8_128x128, fp8_tensor or {of_columns} with "
            f"transpose_rhs={transpose_rhs}, got {rhs.format}"
        )
    rhs_scale = rhs.channel_scales if rhs.scales is None else rhs.scales
    if rhs.format.name != "fp8_128x128" and rhs.scales is not None:
        rhs_scale = rhs_scale.reshape(rhs.shape[0], -1)
    return scaled_product(
        lhs.values,
        lhs.scales,
        rhs.values,
        rhs_scale,
        group_sizes,
        lhs_scaling=ROW_SCALINGS[lhs.format.name],
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type or jnp.bfloat16,
        group_offset=group_offset,
        fast_accumulation=FAST[precision],
        implementation=implementation,
    )


def _as_rows(codes: Codes, format: Format) -> Parts:
    return Parts(codes.codes, codes.scales)


def _of_rows(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    return Codes(parts.values, parts.scales)


FP8 = packed(
    Format("fp8", UINT8, 8, channel_scales=True, values_rank=3, version=2),
    encode=_channel_encode,
    decode=channel_decode,
    pack=_channel_pack,
    unpack=_channel_unpack,
)
BLOCKS = register(
    Format(
        "fp8_128x128",
        UINT8,
        8,
        ScaleLayout((BLOCK, BLOCK), F32),
        channel_scales=True,
        values_rank=3,
        version=3,
    ),
    dequantize=_records_decode,
    quantize=lambda x, format: _blocks_pack(_blocks_encode(x, format), format),
    pack=_blocks_pack,
    unpack=_blocks_unpack,
)


def _rows(
    name: str, block: tuple[int | None, int | None], products: dict[str, Any] | None = None
) -> Format:
    """Registers a format of the layout "rows", with a scale for each `block`."""
    return packed(
        Format(name, E4M3, 8, ScaleLayout(block, F32), layout="rows"),
        encode=_blocks_encode,
        decode=_blocks_decode,
        pack=_as_rows,
        unpack=_of_rows,
        dtypes=(E5M2,),
        products=products or {},
    )


_PRODUCTS = dict(ragged_dot=_ragged_dot)
ROWS_128X128 = _rows("fp8_128x128", (BLOCK, BLOCK), _PRODUCTS)
ROWS_1X128 = _rows("fp8_1x128", (1, BLOCK))
ROWS_ROW = _rows("fp8_row", (1, None), _PRODUCTS)
ROWS_TENSOR = _rows("fp8_tensor", (None, None), _PRODUCTS)
ROWS_CHANNEL = packed(
    Format("fp8", E4M3, 8, channel_scales=True, layout="rows"),
    encode=_channel_encode,
    decode=channel_decode,
    pack=lambda codes, format: Parts(codes.codes, None, codes.scales),
    unpack=lambda parts, format, matrix: Codes(parts.values, parts.channel_scales),
    dtypes=(E5M2,),
    products=_PRODUCTS,
)
