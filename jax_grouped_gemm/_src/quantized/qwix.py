"""Reads arrays of qwix, a library that quantises JAX models, without importing qwix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arguments import as_array
from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.quantized.api import of_stored
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import Codes, named

E4M3 = np.dtype(jnp.float8_e4m3fn)
E2M1 = np.dtype(jnp.float4_e2m1fn)

_E2M1_FROM_1 = (0.5, 1, 1.5, 2, 3, 4, 6)
"""The values of the codes 1 to 7."""


def qwix(array: Any) -> QuantizedArray:
    """Returns weights [..., k, n] that `qwix.quantize` returned, without changing the codes.

        w = qwix.quantize(w, jnp.int4, channelwise_axes=(0, 2), tiled_axes={1: 128})
        y = jgg.ragged_dot(x, jgg.checkpoints.qwix(w), group_sizes)

    | `qtype` | elements that share a scale | format of the result |
    |---|---|---|
    | "mxfp4" | 32 along k | "mxfp4" |
    | int4, perhaps with zero points | 32 or 64 along k, or a multiple of 128 | "int4", scales rounded to bfloat16 |
    | int8 | columns | "int8" |
    | float8_e4m3fn | columns | "fp8" |
    | float8_e4m3fn | blocks of multiples of 128 | "fp8_128x128" |

    Several columns, or experts, may share a scale. Without rows, int4 has groups of 128, and
    float8_e4m3fn is "fp8".

    Args:
      array: a `qwix.QArray`, or an object with fields `qvalue`, `scale`, `zero_point` and `qtype`.

    Raises:
      TypeError: a field is missing, or has an unsuitable dtype or shape.
      ValueError: no format has such values, scales or zero points. Scales of "mxfp4" must be powers
        of two from 2^-127 on, and zero points must be integers from -8 to 7.
    """  # noqa: E501 - rows of a table
    if missing := [name for name in ("qvalue", "scale") if not hasattr(array, name)]:
        raise TypeError(
            f"qwix: array must be a qwix.QArray, got {type(array).__name__} without "
            f"{' and '.join(missing)}"
        )
    values, scales = as_array("qwix: qvalue", array.qvalue), as_array("qwix: scale", array.scale)
    zeros = getattr(array, "zero_point", None)
    stored = dict(scale=scales)
    if zeros is not None:
        stored["zero_point"] = zeros = as_array("qwix: zero_point", zeros)
    if values.ndim < 2:
        raise TypeError(f"qwix: qvalue must be [..., k, n], got {values.shape}")
    for name, x in stored.items():
        _check_numbers(name, x, values.shape)
        if x.shape != scales.shape:
            raise ValueError(
                f"qwix: zero_point {x.shape} must have the shape of scale, {scales.shape}"
            )
    *leading, k, n = values.shape
    if 0 in (k, n):
        # Columns without rows may lack scales here, but formats need one for each column.
        stored = {name: _without_elements(x, k, n) for name, x in stored.items()}
        scales = stored["scale"]
    rows, columns = k // scales.shape[-2], n // scales.shape[-1]
    dtype, qtype = values.dtype, getattr(array, "qtype", None)

    def refused(reason: str) -> ValueError:
        kind = qtype if isinstance(qtype, str) else dtype
        return ValueError(
            f"qwix: no format has {kind} {reason}; quantise otherwise, or dequantise the array"
        )

    if zeros is not None and dtype != jnp.int4:
        raise refused("with zero points")
    if qtype in ("nf4", "nvfp4") or dtype not in (jnp.int4, jnp.int8, E4M3, E2M1):
        raise refused("values")
    if dtype in (jnp.int8, E4M3) and rows == k:
        every = [_of_each(scales, (*leading, 1, n), (1, 1))[..., 0, :].astype(jnp.float32)]
        read, found = _of_columns, named("int8" if dtype == jnp.int8 else "fp8")
    elif dtype == E4M3 and not rows % 128 and (columns == n or not columns % 128):
        every = [_of_each(scales, values.shape, (128, 128)).astype(jnp.float32)]
        read, found = _of_columns, named("fp8_128x128", layout="packed")
    elif dtype == jnp.int4 and (rows in (32, 64) or rows == k or not rows % 128):
        if zeros is not None and not isinstance(zeros, jax.core.Tracer):
            wide = np.asarray(zeros, np.float64)
            if not ((wide == np.round(wide)) & (wide >= -8) & (wide <= 7)).all():
                raise refused("with zero points that are not integers from -8 to 7")
        size = rows if rows in (32, 64) else 128
        every = [_of_each(x, values.shape, (size, 1)) for x in stored.values()]
        read = _of_int4
        found = named("int4", group_size=size, zero_points=zeros is not None or None)
    elif dtype == E2M1 and (rows == 32 or k == 0):
        if not isinstance(scales, jax.core.Tracer):
            mantissas, exponents = np.frexp(np.asarray(scales, np.float64))
            fits = (mantissas == 0.5) & (exponents >= -126)
            if not (fits | ~np.isfinite(mantissas)).all():
                raise refused("whose scales are not powers of two from 2^-127 on")
        every = [_of_each(scales, values.shape, (32, 1)).astype(jnp.float32)]
        read, found = _of_e2m1, named("mxfp4")
    else:
        raise refused(f"with scales of {rows} along k and {columns} along n")
    return of_stored(read, (values, *every), (k, n), found, tuple(leading))


def _check_numbers(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises a `TypeError` unless tiles of an array of `shape` can have the numbers `x`."""
    kinds = dict(scale=(jnp.floating,), zero_point=(jnp.integer, jnp.floating))[name]
    if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        kind = "floating" if name == "scale" else "integers"
        raise TypeError(f"qwix: {name} must be {kind}, got {x.dtype} of shape {x.shape}")
    fits = x.ndim == len(shape)
    for dim, (size, count) in enumerate(zip(shape, x.shape, strict=False)):
        divides = dim >= len(shape) - 2 and count > 0 and size % count == 0
        fits &= divides or count in (1, size)
    if not fits:
        raise TypeError(
            f"qwix: the dimensions of {name} must divide those of qvalue {shape}, and those before "
            f"k and n must be 1 or equal, got {x.shape}"
        )


def _without_elements(x: jax.Array, k: int, n: int) -> jax.Array:
    """Returns ones in place of numbers of tiles of [..., k, n], one along each size that is 0."""
    *leading, groups, columns = x.shape
    return jnp.ones((*leading, groups if k else 1, columns if n else 1), x.dtype)


def _of_each(x: jax.Array, shape: tuple[int, ...], block: tuple[int, int]) -> jax.Array:
    """Returns one number for each `block` of a matrix, from numbers that blocks may share."""
    *leading, k, n = shape
    x = jnp.broadcast_to(x, (*leading, *x.shape[-2:]))
    for axis, size, step in ((-2, k, block[0]), (-1, n, block[1])):
        shared = max(size // x.shape[axis], 1)
        first = np.arange(cdiv(size, step)) * step // shared
        x = jnp.take(x, first, axis=axis)
    return x


def _of_columns(stored: Any) -> Codes:
    return Codes(*stored)


def _of_int4(stored: Any) -> Codes:
    """Adds 8 to codes and zero points, because this package stores both as numbers in 0..15."""
    values, scales, *zeros = stored

    def unsigned(x):
        return (x.astype(jnp.int8) + 8).astype(jnp.uint8)

    return Codes(unsigned(values), scales, *map(unsigned, zeros))


def _of_e2m1(stored: Any) -> Codes:
    values, scales = stored
    wide = values.astype(jnp.float32)
    codes = sum((jnp.abs(wide) >= limit).astype(jnp.uint8) for limit in _E2M1_FROM_1)
    exponents = lax.bitcast_convert_type(scales, jnp.uint32) >> 23 & 255
    return Codes(codes | jnp.signbit(wide).astype(jnp.uint8) << 3, exponents.astype(jnp.uint8))
