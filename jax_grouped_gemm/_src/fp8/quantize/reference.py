"""FP8 quantisation in pure JAX.

It gives the same bits as the CUDA kernels, except for rare elements, because XLA does not round all
divisions correctly on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv, round_up, rows_or_zeros
from jax_grouped_gemm._src.fp8.formats import BLOCK, COLUMN_ROWS, row_blocks
from jax_grouped_gemm._src.ragged import reference

SMALLEST_SCALE = 2.0**-100
"""With a smaller scale, the inverse could overflow, and not all denormals would round to zero."""


def quantize_rows(x: jax.Array, *, dtype: np.dtype, power_of_two: bool) -> list[jax.Array]:
    """Quantises x [rows, cols] in blocks of 1 x 128.

    Returns:
      values [rows, cols] and scales [rows, ceil(cols / 128)].
    """
    blocks = _in_blocks(x, axis=1)
    values, scales = quantize(blocks, (2,), dtype, power_of_two)
    values = values.reshape(x.shape[0], blocks.shape[1] * BLOCK)[:, : x.shape[1]]
    return [values, scales[:, :, 0]]


def quantize_blocks(
    x: jax.Array, *, dtype: np.dtype, power_of_two: bool, plain: bool, transposed: bool
) -> list[jax.Array]:
    """Quantises x [g, rows, cols] in blocks of 128 x 128.

    Returns:
      with `plain`, values [g, rows, cols] and scales [g, ceil(rows / 128), ceil(cols / 128)]; with
      `transposed`, both with their last two dimensions exchanged.
    """
    g, rows, cols = x.shape
    blocks = _in_blocks(_in_blocks(x, axis=2), axis=1)  # [g, rows / 128, 128, cols / 128, 128]
    values, scales = quantize(blocks, (2, 4), dtype, power_of_two)
    values = values.reshape(g, blocks.shape[1] * BLOCK, blocks.shape[3] * BLOCK)[:, :rows, :cols]
    scales = scales[:, :, 0, :, 0]
    forms = [values, scales] if plain else []
    return [*forms, values.mT, scales.mT] if transposed else forms


def quantize_joined(
    x: jax.Array,
    y: jax.Array,
    *,
    dtype: np.dtype,
    power_of_two: bool,
    plain: bool,
    transposed: bool,
) -> list[jax.Array]:
    """Quantises x and y [g, rows, cols], side by side in one matrix for each g.

    Returns:
      what `quantize_blocks` returns for matrices with the columns of x, zeros up to the next
      multiple of 128, the columns of y, and zeros up to the next multiple again.
    """
    joined = side_by_side((x, y))
    return quantize_blocks(
        joined, dtype=dtype, power_of_two=power_of_two, plain=plain, transposed=transposed
    )


def quantize_ragged(
    x: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: np.dtype,
    power_of_two: bool,
    plain: bool,
    transposed: bool,
) -> list[jax.Array]:
    """Quantises x [b?, m, cols] in blocks of 1 x 128, and in transposed blocks of 128 rows.

    Args:
      x: the rows of a ragged product.
      group_sizes: int32 [b?, G]. A transposed block has rows of one group.

    Returns:
      with `plain`, values [b?, m, cols] and scales [b?, m, ceil(cols / 128)]; with `transposed`,
      values [b?, blocks, cols, 128] and scales [b?, blocks, cols], of `row_blocks(m, G)` blocks.
      Values without a row are zero, and scales without a row are 1.
    """

    def unbatched(x, group_sizes):
        results = []
        if plain:
            results += quantize_rows(x, dtype=dtype, power_of_two=power_of_two)
        if transposed:
            blocks = _group_blocks(x, group_sizes)  # [blocks, 128, cols]
            values, scales = quantize(blocks, (1,), dtype, power_of_two)
            results += [values.mT, scales[:, 0]]
        return results

    in_axes = (0 if x.ndim > 2 else None, 0 if group_sizes.ndim > 1 else None)
    return (unbatched if in_axes == (None, None) else jax.vmap(unbatched, in_axes))(x, group_sizes)


def column_maxima(x: jax.Array, window: jax.Array) -> list[jax.Array]:
    """Returns the largest finite magnitude of each column in every 256 rows of x [m, cols].

    Args:
      x: [m, cols].
      window: int32 [2], the first row that counts, and the row after the last one that counts.

    Returns:
      float32 [ceil(m / 256), cols].
    """
    m, cols = x.shape
    row = jnp.arange(m)[:, None]
    counts = (row >= window[0]) & (row < window[1]) & jnp.isfinite(x)
    magnitudes = jnp.where(counts, jnp.abs(x), jnp.zeros_like(x)).astype(jnp.float32)
    chunks = cdiv(m, COLUMN_ROWS)
    padded = jnp.pad(magnitudes, ((0, chunks * COLUMN_ROWS - m), (0, 0)))
    return [padded.reshape(chunks, COLUMN_ROWS, cols).max(axis=1)]


def column_scales(maxima: jax.Array, *, dtype: np.dtype, power_of_two: bool) -> jax.Array:
    """Returns the scales float32 [cols] of columns, from the result of `column_maxima`."""
    return scales_of(maxima, (0,), dtype, power_of_two)[0]


def quantize_gathered(
    x: jax.Array,
    rows: jax.Array,
    scale: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: np.dtype,
    power_of_two: bool,
) -> list[jax.Array]:
    """Quantises rows of x [T, cols] in transposed blocks of 128 rows of one group.

    Args:
      x: tokens.
      rows: int32 [m], the token of each row of a ragged product. A row without a token is zero.
      scale: float32 [cols], see `column_scales`.
      group_sizes: int32 [G].

    Returns:
      values [blocks, cols, 128], of `row_blocks(m, G)` blocks.
    """
    return [
        divided(_group_blocks(rows_or_zeros(x, rows), group_sizes), scale[None, None], dtype).mT
    ]


def side_by_side(stacks: Sequence[jax.Array]) -> jax.Array:
    """Joins stacks [..., n] along their last axis, each padded with zeros to a multiple of 128. A
    single stack is returned unchanged."""
    if len(stacks) == 1:
        return stacks[0]
    padded = [
        jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, round_up(x.shape[-1], BLOCK) - x.shape[-1])])
        for x in stacks
    ]
    return jnp.concatenate(padded, axis=-1)


def quantize(
    x: jax.Array, axes: tuple[int, ...], dtype: np.dtype, power_of_two: bool
) -> tuple[jax.Array, jax.Array]:
    """Quantises `x` in blocks that span `axes`: values like `x`, scales with `axes` of extent 1."""
    scale = scales_of(x, axes, dtype, power_of_two)
    return divided(x, scale, dtype), scale


def scales_of(
    x: jax.Array, axes: tuple[int, ...], dtype: np.dtype, power_of_two: bool
) -> jax.Array:
    """Returns the scales of `quantize`."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axes, keepdims=True, initial=0)
    return scales_of_largest(largest, dtype, power_of_two)


def scales_of_largest(largest: jax.Array, dtype: np.dtype, power_of_two: bool) -> jax.Array:
    """Returns the float32 scales of blocks with these largest finite magnitudes."""
    largest_value = float(jnp.finfo(dtype).max)
    scale = jnp.maximum(largest * np.float32(1 / largest_value), np.float32(SMALLEST_SCALE))
    if power_of_two:
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        scale = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(largest < jnp.finfo(jnp.float32).tiny, np.float32(1), scale)


def divided(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns `x` over `scale`, rounded to FP8; infinity becomes NaN."""
    x = x.astype(jnp.float32)
    largest_value = float(jnp.finfo(dtype).max)
    # Multiply by the inverse, as the kernels do, because divisions would limit their speed.
    scaled = jnp.clip(x * (1 / scale), -largest_value, largest_value)
    return jnp.where(jnp.isfinite(x), _round(scaled, dtype), np.nan).astype(dtype)


def _round(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds float32 `x` to the nearest value of `dtype`, ties to even.

    Some backends of XLA convert through float16, which rounds twice. The result of this function
    converts exactly.
    """
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    step = np.float32(info.smallest_subnormal)
    denormal = lax.round(x * (1 / step), lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < np.float32(info.tiny), denormal, normal)


def _in_blocks(x: jax.Array, axis: int) -> jax.Array:
    """Splits `axis` into blocks of 128 elements, the last of them filled up with zeros."""
    num_blocks = cdiv(x.shape[axis], BLOCK)
    growth = num_blocks * BLOCK - x.shape[axis]
    x = jnp.pad(x, [(0, growth if i == axis else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:axis], num_blocks, BLOCK, *x.shape[axis + 1 :])


class GroupBlocks(NamedTuple):
    """Positions of each group's blocks of 128 rows, all int32 [G]."""

    first_row: jax.Array
    end_row: jax.Array
    first_block: jax.Array
    end_block: jax.Array

    @classmethod
    def of(cls, group_sizes: jax.Array, num_rows: int) -> GroupBlocks:
        offset = jnp.zeros(1, jnp.int32)
        starts, ends = reference.local_group_bounds(
            group_sizes, offset, group_sizes.shape[0], num_rows
        )
        num_blocks = -(-(ends - starts) // BLOCK)
        end_blocks = lax.cumsum(num_blocks)
        return cls(starts, ends, end_blocks - num_blocks, end_blocks)


def _group_blocks(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns all groups' blocks of rows in order, [blocks, 128, cols], filled up with zeros."""
    m, cols = x.shape
    num_groups = group_sizes.shape[0]
    num_blocks = row_blocks(m, num_groups)
    if 0 in (m, num_groups):
        return jnp.zeros((num_blocks, BLOCK, cols), x.dtype)
    groups = GroupBlocks.of(group_sizes, m)
    block = jnp.arange(num_blocks)
    group = jnp.searchsorted(groups.end_block, block, side="right")
    exists = group < num_groups
    group = jnp.minimum(group, num_groups - 1)
    first_row = groups.first_row[group] + (block - groups.first_block[group]) * BLOCK
    rows = first_row[:, None] + jnp.arange(BLOCK)[None]
    valid = exists[:, None] & (rows < groups.end_row[group][:, None])
    blocks = x[jnp.minimum(rows, m - 1)]
    return jnp.where(valid[:, :, None], blocks, jnp.zeros_like(blocks))
