"""FP8 operands: quantisation in blocks that share a float32 scale.

The value of an element is `values * scales`, with the scale of its block. A scale is the block's
largest magnitude over the largest number of the FP8 format (448 for e4m3, 57344 for e5m2), so that
no finite number overflows; values are rounded to the nearest, ties to even. A block of zeros has
scale 1. Infinities and NaN become NaN and do not count for the scale. No scale is below 2**-100:
blocks of smaller numbers lose precision.

Blocks of 1 x 128 for activations and gradients and of 128 x 128 for weights are the recipe of
DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import register_namedtuple_serialization
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    as_array,
    checked_boolean,
    checked_group_sizes,
    checked_implementation,
)
from jax_grouped_gemm._src.fp8 import weight_formats
from jax_grouped_gemm._src.fp8.formats import BLOCK, checked_fp8_dtype
from jax_grouped_gemm._src.fp8.quantize import primitive
from jax_grouped_gemm._src.quantized.array import QuantizedArray

SOURCE_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class QuantizedWeights(NamedTuple):
    """Matrices [..., k, n] in blocks of 128 x 128, as they are and transposed. FP8 tensor cores
    contract the last dimension of both operands, so the forward product reads n x k, and
    dgrad k x n. Programs of `jax.export` may take and return a `QuantizedWeights`. The public name
    is deprecated, and will be removed in 0.4. Pass on what `quantize_weights` returns, or use
    `array` and `transposed`, which are a `QuantizedArray` each."""

    values: jax.Array  # [..., k, n] FP8
    scales: jax.Array  # [..., ceil(k / 128), ceil(n / 128)] float32
    values_t: jax.Array  # [..., n, k] FP8, the same values
    scales_t: jax.Array  # [..., ceil(n / 128), ceil(k / 128)] float32, the same scales

    @property
    def array(self) -> QuantizedArray:
        """The matrices [..., k, n] as a `QuantizedArray` of the layout "rows"."""
        return QuantizedArray(self.values, self.scales, format=weight_formats.ROWS_128X128)

    @property
    def transposed(self) -> QuantizedArray:
        """The matrices [..., n, k] as a `QuantizedArray` of the layout "rows"."""
        return QuantizedArray(self.values_t, self.scales_t, format=weight_formats.ROWS_128X128)


class QuantizedRows(NamedTuple):
    """Ragged rows [m, k] in blocks of 1 x 128, and also transposed, in blocks of rows.

    There are b = ceil(m / 128) + min(G, m) transposed blocks, each of at most 128 rows of one
    group.

    These blocks are in the order of the rows, and a group's first block starts with its first row.
    Row r of block i has the values `values_t[i, :, r]`, with scales `scales_t[i]`. If a block has
    fewer than 128 rows, the values after its last row are zero. Unused blocks at the end have
    scales of one. The public name is deprecated, and will be removed in 0.4. Pass on what
    `quantize_ragged` returns.
    """

    values: jax.Array  # [m, k] FP8
    scales: jax.Array  # [m, ceil(k / 128)] float32
    values_t: jax.Array  # [b, k, 128] FP8
    scales_t: jax.Array  # [b, k] float32


# Exported programs take and return these types. Files contain the names, which must not change.
register_namedtuple_serialization(
    QuantizedWeights, serialized_name="jax_grouped_gemm.QuantizedWeights"
)
register_namedtuple_serialization(QuantizedRows, serialized_name="jax_grouped_gemm.QuantizedRows")


def quantize_blockwise(
    x: ArrayLike,
    block_shape: tuple[int, int] = (1, BLOCK),
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    power_of_two_scales: bool = False,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantises `x` [..., r, c] in blocks of its last two dimensions.

    Args:
      x: bfloat16, float16 or float32, with at least two dimensions.
      block_shape: (1, 128) or (128, 128). Blocks at the edges are smaller if r or c is not a
        multiple of 128.
      dtype: float8_e4m3fn or float8_e5m2.
      power_of_two_scales: rounds scales up to powers of two. Dequantisation is then exact.
      implementation: None takes the CUDA kernel where it can run and the reference, with the same
        bits, elsewhere; "cuda" insists on the kernel; "xla" is pure JAX.

    Returns:
      values [..., r, c] of `dtype`, scales float32 [..., r, ceil(c / 128)] or
      [..., ceil(r / 128), ceil(c / 128)].

    Raises:
      TypeError: the dtype or shape of `x`, or `dtype`, is unsuitable.
      ValueError: `block_shape` or `implementation` is invalid.
    """
    x, params = _checked(x, dtype, power_of_two_scales, implementation)
    if block_shape == (1, BLOCK):
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        values, scales = primitive.quantize_rows(rows, **params)
        return values.reshape(x.shape), scales.reshape(*x.shape[:-1], scales.shape[-1])
    if block_shape != (BLOCK, BLOCK):
        raise ValueError(f"block_shape must be (1, 128) or (128, 128), got {block_shape!r}")
    return _quantize_blocks(x, params, plain=True, transposed=False)


def quantize_weights(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    power_of_two_scales: bool = False,
    implementation: Implementation = None,
) -> QuantizedWeights:
    """Quantises weights [..., k, n] in blocks of 128 x 128, plain and transposed, in one pass.

    Args:
      x, dtype, power_of_two_scales, implementation: see `quantize_blockwise`.
    """
    x, params = _checked(x, dtype, power_of_two_scales, implementation)
    return QuantizedWeights(*_quantize_blocks(x, params, plain=True, transposed=True))


def quantize_ragged(
    x: ArrayLike,
    group_sizes: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    power_of_two_scales: bool = False,
    implementation: Implementation = None,
) -> QuantizedRows:
    """Quantises the rows [m, k] of a ragged product for all products of training, in one pass.

    Args:
      x, dtype, power_of_two_scales, implementation: see `quantize_blockwise`; `x` has exactly two
        dimensions.
      group_sizes: integers [G], as for `ragged_dot`.
    """
    x, params = _checked(x, dtype, power_of_two_scales, implementation)
    group_sizes = checked_group_sizes(group_sizes)
    if x.ndim != 2:
        raise TypeError(f"x must have the shape [m, k], got {x.shape}")
    return QuantizedRows(
        *primitive.quantize_ragged(x, group_sizes, plain=True, transposed=True, **params)
    )


def _checked(x, dtype, power_of_two_scales, implementation) -> tuple[jax.Array, dict[str, Any]]:
    x = as_array("x", x)
    if x.dtype not in SOURCE_DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim < 2:
        raise TypeError(f"x must have at least two dimensions, got the shape {x.shape}")
    params = dict(
        dtype=checked_fp8_dtype("dtype", dtype),
        power_of_two=checked_boolean("power_of_two_scales", power_of_two_scales),
        implementation=checked_implementation(implementation),
    )
    return x, params


def _quantize_blocks(x, params, *, plain, transposed):
    matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    results = primitive.quantize_blocks(matrices, plain=plain, transposed=transposed, **params)
    return tuple(y.reshape(*x.shape[:-2], *y.shape[-2:]) for y in results)
