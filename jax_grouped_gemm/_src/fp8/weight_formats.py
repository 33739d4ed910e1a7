"""The FP8 formats of `QuantizedArray`, through the registration that every format goes through."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.fp8.quantize import reference
from jax_grouped_gemm._src.fp8.scaled.api import scaled_ragged_dot
from jax_grouped_gemm._src.quantized import pack
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import (
    Codes,
    Format,
    Matrix,
    Parts,
    ScaleLayout,
)
from jax_grouped_gemm._src.quantized.reference import UINT8, channel_decode, packed

E4M3 = np.dtype(jnp.float8_e4m3fn)
FLOAT32 = np.dtype(np.float32)
PLAIN = dict(dtype=E4M3, power_of_two=False)


def _packed_codes(codes: jax.Array) -> jax.Array:
    return pack.pack8(pack.bits_of(codes))


def _unpacked_codes(values: jax.Array, matrix: Matrix) -> jax.Array:
    return lax.bitcast_convert_type(pack.unpack8(values, matrix), E4M3)


def _channel_encode(x: jax.Array, format: Format) -> Codes:
    values, scales = reference.quantize(x, (0,), **PLAIN)
    return Codes(values, scales[0])


def _channel_pack(codes: Codes, format: Format) -> Parts:
    """A column with a code that is NaN has the scale NaN: kernels decode codes by shifts."""
    is_nan = jnp.isnan(codes.codes.astype(jnp.float32)).any(axis=0)
    scales = pack.pad_columns(jnp.where(is_nan, np.nan, codes.scales), 1)
    return Parts(_packed_codes(codes.codes), None, scales)


def _channel_unpack(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    return Codes(_unpacked_codes(parts.values, matrix), parts.channel_scales[: matrix[1]])


def _blocks_encode(x: jax.Array, format: Format) -> Codes:
    """Blocks of 1 x 128 or of 128 x 128, as `quantize_blockwise` has them."""
    assert format.scales is not None
    if format.scales.block[0] == 1:
        return Codes(*reference.quantize_rows(x, **PLAIN))
    values, scales = reference.quantize_blocks(x[None], plain=True, transposed=False, **PLAIN)
    return Codes(values[0], scales[0])


def _blocks_decode(codes: Codes, format: Format, dtype: np.dtype) -> jax.Array:
    """The product of a code and its block's scale in float32, rounded to `dtype`."""
    assert format.scales is not None
    scales = codes.scales
    for axis, (size, block) in enumerate(zip(codes.codes.shape, format.scales.block, strict=True)):
        scales = jnp.repeat(scales, block, axis=axis)
        scales = lax.slice_in_dim(scales, 0, size, axis=axis)
    return (codes.codes.astype(jnp.float32) * scales).astype(dtype)


def _blocks_pack(codes: Codes, format: Format) -> Parts:
    """Scales lie as the records do, [ceil(n / 128), ceil(k / 128)]."""
    return Parts(_packed_codes(codes.codes), codes.scales.T)


def _blocks_unpack(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    return Codes(_unpacked_codes(parts.values, matrix), parts.scales.T)


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
    """`ragged_dot` of rows in blocks of 1 x 128 and weights in blocks of 128 x 128."""
    if lhs.format != ROWS_1X128:
        raise TypeError(
            f"ragged_dot: lhs must be of the format {ROWS_1X128} where rhs is of "
            f"{rhs.format}, got {lhs.format} in the layout {lhs.format.layout!r}"
        )
    if precision is not None or out_sharding is not None:
        raise ValueError(
            "ragged_dot: precision and out_sharding must be None for FP8 operands, got "
            f"{precision!r} and {out_sharding!r}"
        )
    return scaled_ragged_dot(
        lhs.values,
        lhs.scales,
        rhs.values,
        rhs.scales,
        group_sizes,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type or jnp.bfloat16,
        group_offset=group_offset,
        implementation=implementation,
    )


def _as_rows(codes: Codes, format: Format) -> Parts:
    return Parts(codes.codes, codes.scales)


def _of_rows(parts: Parts, format: Format, matrix: Matrix) -> Codes:
    return Codes(parts.values, parts.scales)


FP8 = packed(
    Format("fp8", UINT8, 8, channel_scales=True, values_rank=3),
    encode=_channel_encode,
    decode=channel_decode,
    pack=_channel_pack,
    unpack=_channel_unpack,
)
BLOCKS = packed(
    Format("fp8_128x128", UINT8, 8, ScaleLayout((BLOCK, BLOCK), FLOAT32), values_rank=3),
    encode=_blocks_encode,
    decode=_blocks_decode,
    pack=_blocks_pack,
    unpack=_blocks_unpack,
)
_ROWS: dict[str, Any] = dict(
    encode=_blocks_encode, decode=_blocks_decode, pack=_as_rows, unpack=_of_rows
)
ROWS_128X128 = packed(
    Format("fp8_128x128", E4M3, 8, ScaleLayout((BLOCK, BLOCK), FLOAT32), layout="rows"),
    products=dict(ragged_dot=_ragged_dot),
    **_ROWS,
)
ROWS_1X128 = packed(
    Format("fp8_1x128", E4M3, 8, ScaleLayout((1, BLOCK), FLOAT32), layout="rows"), **_ROWS
)
