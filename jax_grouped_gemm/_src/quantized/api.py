"""`quantize`, `dequantize` and `from_codes`: weights in a quantised format."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import as_array, checked_boolean
from jax_grouped_gemm._src.quantized import reference  # noqa: F401 - registers formats
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import (
    Codes,
    Format,
    Layout,
    Matrix,
    Parts,
    functions_of,
    named,
)


def quantize(
    x: ArrayLike,
    format: str | Format = "mxfp4",
    *,
    group_size: int | None = None,
    zero_points: bool = False,
    layout: Layout | None = None,
) -> QuantizedArray:
    """Quantises weights [..., k, n] to a `QuantizedArray`, which products take in their place.

        q = jgg.quantize(w, "mxfp4")
        y = jgg.ragged_dot(x, q, group_sizes)

    One matrix after the other, so that temporaries are one matrix's. Do it once, when weights are
    loaded: inside a training or decoding step it would be repeated in every step. Numbers are
    rounded to the nearest, ties to even. A block, group or column with a number that is not finite
    becomes NaN.

    | format | a weight is | scale |
    |---|---|---|
    | "mxfp4" | e2m1 times 2^e | of 32 along k: the exponent of the largest, less 2, as OCP has it |
    | "int4" | (q - 8) s, or (q - z) s | of `group_size` along k, bfloat16: the largest over 7 |
    | "int8" | q s | of a column, float32: the largest over 127 |
    | "fp8" | float8_e4m3fn times s | of a column, float32: the largest over 448 |
    | "fp8_128x128" | float8_e4m3fn times s | of a block, float32, as `quantize_weights` |
    | "fp8_1x128" | float8_e4m3fn times s | of 128 along n, float32, as `quantize_blockwise` |

    Args:
      x: [..., k, n], floating.
      format: its name, or a `Format`.
      group_size: of "int4": 32, 64 or 128, by default 128.
      zero_points: whether groups of "int4" have a zero point z, for weights that are not symmetric.
      layout: "packed", which products of bf16 activations and quantised weights read, or "rows",
        which products of two FP8 operands read. By default "packed", where the format has it.

    Raises:
      TypeError: `x` is no floating array of two dimensions at least.
      ValueError: `format` is not registered, or has no such option.
    """
    x = as_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.ndim < 2:
        raise TypeError(f"x must be floating, [..., k, n], got {jax.typeof(x)}")
    zero_points = checked_boolean("zero_points", zero_points)
    found = named(format, layout=layout, group_size=group_size, zero_points=zero_points or None)
    if functions_of(found).quantize is None:
        raise ValueError(f"the format {found} has no function that quantises")
    return _of_parts(_quantized(x, found), x.shape[-2:], found)


def dequantize(q: QuantizedArray, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """The matrices [..., k, n] of a `QuantizedArray` as an array of `dtype`.

    MXFP4 is exact in bfloat16 and float32, subnormals included. Of int4 the product of code and
    scale is rounded once. Of int8 and FP8 it is rounded to float32 and then to `dtype`.

    Args:
      q: what `quantize`, `from_codes` or `checkpoints` return.
      dtype: floating.

    Raises:
      TypeError: `q` is no `QuantizedArray`, or `dtype` is not floating.
    """
    return checked("q", q).dequantize(dtype)


def from_codes(
    codes: ArrayLike,
    scales: ArrayLike,
    format: str | Format,
    *,
    zero_points: ArrayLike | None = None,
    group_size: int | None = None,
) -> QuantizedArray:
    """Packs codes that are quantised already; `QuantizedArray.unpack` is the inverse.

    Args:
      codes: [..., k, n], one an element: uint8 in 0..15 for "mxfp4" and "int4", int8 for "int8",
        float8_e4m3fn for "fp8" and "fp8_128x128".
      scales: [..., ceil(k / 32), n] uint8 exponents for "mxfp4", bfloat16
        [..., ceil(k / group_size), n] for "int4", float32 [..., n] for "int8" and "fp8", float32
        [..., ceil(k / 128), ceil(n / 128)] for "fp8_128x128".
      format: its name, or a `Format`.
      zero_points: of "int4", in the shape of its scales, integers in 0..15; None means 8.
      group_size: of "int4", by default what the shape of the scales says.

    Raises:
      TypeError: an array has an unsuitable dtype or shape.
      ValueError: `format` is not registered, or has no such option.
    """
    codes, scales = as_array("codes", codes), as_array("scales", scales)
    has_zeros = zero_points is not None
    found = named(format, group_size=group_size, zero_points=has_zeros or None)
    functions = functions_of(found)
    if functions.pack is None or functions.unpack is None:
        raise ValueError(f"arrays of the format {found} are not packed: make a QuantizedArray")
    if codes.ndim < 2:
        raise TypeError(f"codes must be [..., k, n], got {jax.typeof(codes)}")
    k, n = codes.shape[-2:]
    if group_size is None and isinstance(format, str) and functions.group_sizes:
        fits = [
            size
            for size in functions.group_sizes
            if scales.ndim >= 2 and -(-k // size) == scales.shape[-2]
        ]
        if fits and found.group_size not in fits:
            found = named(found, group_size=fits[0])
    given = Codes(codes, scales, as_array("zero_points", zero_points) if has_zeros else None)
    given = _checked_codes(given, found, (k, n))
    return _of_parts(_packed(given, found), (k, n), found)


def checked(name: str, q: Any) -> QuantizedArray:
    """`q` if it is a `QuantizedArray`, else a `TypeError`."""
    if not isinstance(q, QuantizedArray):
        raise TypeError(f"{name} must be a QuantizedArray, got {type(q).__name__}")
    return q


def _checked_codes(codes: Codes, format: Format, matrix: Matrix) -> Codes:
    """`codes` in the dtypes of the format."""
    functions = functions_of(format)

    def unpacked():
        assert functions.quantize is not None and functions.unpack is not None
        parts = functions.quantize(jnp.zeros(matrix, jnp.float32), format)
        return functions.unpack(parts, format, matrix)

    wanted = jax.eval_shape(unpacked)
    leading = codes.codes.shape[:-2]
    found = {}
    for name, want in wanted._asdict().items():
        x = getattr(codes, name)
        if want is None or x is None:
            found[name] = x
            continue
        both_float = all(jnp.issubdtype(d, jnp.floating) for d in (x.dtype, want.dtype))
        both_integer = all(jnp.issubdtype(d, jnp.integer) for d in (x.dtype, want.dtype))
        one_byte = want.dtype.itemsize == 1 and x.dtype != want.dtype and both_float
        if x.shape != (*leading, *want.shape) or not (both_float or both_integer) or one_byte:
            raise TypeError(
                f"{name} of {format} must be {want.dtype} of shape {(*leading, *want.shape)}, got "
                f"{x.dtype} of shape {x.shape}"
            )
        found[name] = x.astype(want.dtype)
    return Codes(**found)


def _of_parts(parts: Parts, matrix: Any, format: Format) -> QuantizedArray:
    return QuantizedArray(*parts, format=format, matrix=tuple(matrix))


@functools.partial(jax.jit, static_argnums=1)
def _quantized(x: jax.Array, format: Format) -> Parts:
    quantize = functions_of(format).quantize
    assert quantize is not None
    return _each(lambda x: quantize(x.astype(jnp.float32), format), x, x.shape[:-2])


@functools.partial(jax.jit, static_argnums=1)
def _packed(codes: Codes, format: Format) -> Parts:
    pack = functions_of(format).pack
    assert pack is not None
    return _each(lambda codes: pack(codes, format), codes, codes.codes.shape[:-2])


def _each(function: Any, arrays: Any, leading: tuple[int, ...]) -> Any:
    """`function` of one matrix after the other."""
    rank, count = len(leading), math.prod(leading)
    flat = jax.tree.map(lambda x: x.reshape(count, *x.shape[rank:]), arrays)
    out = lax.map(function, flat)
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)
