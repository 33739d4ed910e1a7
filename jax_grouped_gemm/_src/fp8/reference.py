"""FP8 quantisation and scaled ragged matmuls in pure JAX.

The quantisers give the same bits as the CUDA kernels, but for rare elements where XLA does not
round a division correctly, as on a GPU. The products accumulate as the kernels do, in float32 and
one block of 128 contracted elements after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import (
    cdiv,
    from_bits,
    map_batch,
    round_up,
    to_bits,
    vary_over,
    varying_axes,
)
from jax_grouped_gemm._src.fp8.formats import BLOCK, COLUMN_ROWS, row_blocks
from jax_grouped_gemm._src.ragged import reference

SMALLEST_SCALE = 2.0**-100
"""Below it a scale's inverse could overflow, and denormal inputs would not all round to zero."""


def quantize_rows(x: jax.Array, *, dtype: np.dtype, power_of_two: bool) -> list[jax.Array]:
    """x [rows, cols] in blocks of 1 x 128.

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
    """x [g, rows, cols] in blocks of 128 x 128.

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
    """x and y [g, rows, cols] in blocks of 128 x 128, next to each other in one matrix of each.

    Returns:
      what `quantize_blocks` does of the columns of x, zeros up to the next multiple of 128, and the
      same of y.
    """
    growth = round_up(x.shape[2], BLOCK) - x.shape[2]
    joined = jnp.concatenate([jnp.pad(z, [(0, 0), (0, 0), (0, growth)]) for z in (x, y)], axis=2)
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
    """x [b?, m, cols] in blocks of 1 x 128, and in transposed blocks of 128 rows of one group.

    Args:
      x: the rows of a ragged product.
      group_sizes: int32 [b?, G].

    Returns:
      with `plain`, values [b?, m, cols] and scales [b?, m, ceil(cols / 128)]; with `transposed`,
      values [b?, blocks, cols, 128] and scales [b?, blocks, cols], of `row_blocks(m, G)` blocks.
      Values without a row are zero, and scales without one 1.
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
    """The largest finite magnitude of each column of x [m, cols], of 256 rows each.

    Args:
      x: [m, cols].
      window: int32 [2], the first of the rows that count and the end of them.

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
    """The scales float32 [cols] of columns whose largest magnitudes are `column_maxima`."""
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
    """Rows of x [T, cols] in transposed blocks of 128 rows of one group.

    Args:
      x: tokens.
      rows: int32 [m], the token of each row of a ragged product; zeros if none.
      scale: float32 [cols], see `column_scales`.
      group_sizes: int32 [G].

    Returns:
      values [blocks, cols, 128], of `row_blocks(m, G)` blocks.
    """
    copies = x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return [divided(_group_blocks(copies, group_sizes), scale[None, None], dtype).mT]


def quantize(
    x: jax.Array, axes: tuple[int, ...], dtype: np.dtype, power_of_two: bool
) -> tuple[jax.Array, jax.Array]:
    """`x` in blocks that span `axes`: values of `x`'s shape, scales with `axes` of extent 1."""
    scale = scales_of(x, axes, dtype, power_of_two)
    return divided(x, scale, dtype), scale


def scales_of(
    x: jax.Array, axes: tuple[int, ...], dtype: np.dtype, power_of_two: bool
) -> jax.Array:
    """The scales of `quantize`."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axes, keepdims=True, initial=0)
    largest_value = float(jnp.finfo(dtype).max)
    scale = jnp.maximum(largest * np.float32(1 / largest_value), np.float32(SMALLEST_SCALE))
    if power_of_two:
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        scale = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    return jnp.where(largest < jnp.finfo(jnp.float32).tiny, np.float32(1), scale)


def divided(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` over `scale`, rounded to FP8; what is not finite becomes NaN."""
    x = x.astype(jnp.float32)
    largest_value = float(jnp.finfo(dtype).max)
    # The kernels multiply: a division an element would cost more than their memory traffic.
    scaled = jnp.clip(x * (1 / scale), -largest_value, largest_value)
    return jnp.where(jnp.isfinite(x), _round(scaled, dtype), np.nan).astype(dtype)


def _round(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """float32 `x` rounded to the nearest value of `dtype`, ties to even.

    XLA converts by way of float16 on some backends, which rounds twice; what this returns is
    converted exactly.
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


class _GroupBlocks(NamedTuple):
    """Where the blocks of 128 rows of each group are, all int32 [G]."""

    first_row: jax.Array
    end_row: jax.Array
    first_block: jax.Array
    end_block: jax.Array

    @classmethod
    def of(cls, group_sizes: jax.Array, num_rows: int) -> _GroupBlocks:
        offset = jnp.zeros(1, jnp.int32)
        starts, ends = reference.local_group_bounds(
            group_sizes, offset, group_sizes.shape[0], num_rows
        )
        num_blocks = -(-(ends - starts) // BLOCK)
        end_blocks = lax.cumsum(num_blocks)
        return cls(starts, ends, end_blocks - num_blocks, end_blocks)


def _group_blocks(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The blocks of rows of all groups, one after the other, [blocks, 128, cols]; zero-filled."""
    m, cols = x.shape
    num_groups = group_sizes.shape[0]
    num_blocks = row_blocks(m, num_groups)
    if 0 in (m, num_groups):
        return jnp.zeros((num_blocks, BLOCK, cols), x.dtype)
    groups = _GroupBlocks.of(group_sizes, m)
    block = jnp.arange(num_blocks)
    group = jnp.searchsorted(groups.end_block, block, side="right")
    exists = group < num_groups
    group = jnp.minimum(group, num_groups - 1)
    first_row = groups.first_row[group] + (block - groups.first_block[group]) * BLOCK
    rows = first_row[:, None] + jnp.arange(BLOCK)[None]
    valid = exists[:, None] & (rows < groups.end_row[group][:, None])
    blocks = x[jnp.minimum(rows, m - 1)]
    return jnp.where(valid[:, :, None], blocks, jnp.zeros_like(blocks))


def scaled_ragged_noncontracting(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    transpose_rhs: bool,
    lhs_scaling: str,
    rhs_scaling: str,
    preferred_element_type: np.dtype,
    fast_accumulation: bool,
) -> jax.Array:
    """Multiplies each group's rows of `lhs` by the group's own matrix, both dequantised.

    Args:
      lhs: [b?, m, k].
      lhs_scale: float32 [b?, m or 1, ceil(k / 128) or 1], transposed if `lhs_scaling` is
        "1x128 column-major" and then with any number of columns from m on.
      rhs: [b?, g, k, n], or [b?, g, n, k] with `transpose_rhs`.
      rhs_scale: float32, each of the last two dimensions of `rhs` divided by 128, itself or 1.
      group_sizes, group_offset: see `reference.ragged_noncontracting`.
      lhs_scaling, rhs_scaling: members of `LHS_SCALINGS` and `RHS_SCALINGS`.
      preferred_element_type: dtype of the result.
      fast_accumulation: allows less precision, of which no use is made here.

    Returns:
      [b?, m, n], zero in the rows that no local group owns.
    """

    def unbatched(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset):
        m, k = lhs.shape
        axes = varying_axes(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
        if lhs_scaling == "1x128 column-major":
            lhs_scale = lhs_scale[:, :m].T
        if not transpose_rhs:
            rhs, rhs_scale = rhs.mT, rhs_scale.mT
        n = rhs.shape[1]
        if 0 in (*lhs.shape, *rhs.shape):
            return vary_over(jnp.zeros((m, n), preferred_element_type), axes)
        rhs_scale = jnp.repeat(rhs_scale, BLOCK if rhs_scaling == "128x128" else 1, axis=1)
        if rhs_scaling != "group":
            rhs_scale = rhs_scale[:, :n]
        lhs, rhs = _Blocks(lhs, lhs_scale), _Blocks(rhs, rhs_scale)

        def accumulate_block(block, out):
            return out + reference.ragged_noncontracting(
                lhs.dequantized(block),
                rhs.dequantized(block),
                group_sizes,
                group_offset,
                transpose_lhs=False,
                transpose_rhs=True,
                preferred_element_type=np.dtype(np.float32),
                precision=lax.Precision.HIGHEST,
            )

        out = vary_over(jnp.zeros((m, n), jnp.float32), axes)
        out = lax.fori_loop(0, cdiv(k, BLOCK), accumulate_block, out)
        return out.astype(preferred_element_type)

    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return map_batch(unbatched, operands, ranks=(2, 2, 3, 3, 1, 1))


def scaled_ragged_contracting(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    num_rows: int,
    num_groups: int,
    preferred_element_type: np.dtype,
) -> jax.Array:
    """Contracts each group's rows of two operands in the transposed form of `quantize_ragged`.

    Args:
      lhs: [b?, blocks, k, 128].
      lhs_scale: float32 [b?, blocks, k], or [b?, 1, k] where all blocks have the same.
      rhs: [b?, blocks, n, 128].
      rhs_scale: float32 [b?, blocks, n] or [b?, 1, n].
      group_sizes, group_offset: see `reference.ragged_contracting`.
      num_rows: rows of all groups, at which the running sum of the sizes is cut.
      num_groups: number of results.
      preferred_element_type: dtype of the result.

    Returns:
      [b?, num_groups, k, n], zero for a group without rows.
    """

    def unbatched(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset):
        shape = (lhs.shape[1], rhs.shape[1])
        axes = varying_axes(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
        total_groups = group_sizes.shape[0]
        if 0 in (*lhs.shape, *rhs.shape, num_groups, total_groups):
            return vary_over(jnp.zeros((num_groups, *shape), preferred_element_type), axes)
        blocks = _GroupBlocks.of(group_sizes, num_rows)
        lhs_bits, rhs_bits = to_bits(lhs), to_bits(rhs)

        def dequantized(bits, dtype, scale, block):
            values = from_bits(bits[block], dtype).astype(jnp.float32)
            return values * scale[block if scale.shape[0] > 1 else 0][:, None]

        def compute_group(group):
            exists = (group >= 0) & (group < total_groups)
            group = jnp.clip(group, 0, total_groups - 1)

            def accumulate_block(block, out):
                return out + lax.dot_general(
                    dequantized(lhs_bits, lhs.dtype, lhs_scale, block),
                    dequantized(rhs_bits, rhs.dtype, rhs_scale, block),
                    (((1,), (1,)), ((), ())),
                    precision=lax.Precision.HIGHEST,
                )

            out = vary_over(jnp.zeros(shape, jnp.float32), axes)
            first = blocks.first_block[group]
            end = jnp.where(exists, blocks.end_block[group], first)
            return lax.fori_loop(first, end, accumulate_block, out).astype(preferred_element_type)

        first = jnp.clip(group_offset, -num_groups, total_groups)
        return lax.map(compute_group, first + jnp.arange(num_groups, dtype=jnp.int32))

    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return map_batch(unbatched, operands, ranks=(3, 2, 3, 2, 1, 1))


class _Blocks:
    """An FP8 operand [..., k] with scales [..., ceil(k / 128) or 1], a block of 128 at a time."""

    def __init__(self, values: jax.Array, scales: jax.Array):
        growth = round_up(values.shape[-1], BLOCK) - values.shape[-1]
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, growth)])
        self.dtype, self.scales = values.dtype, scales
        self.bits = to_bits(values)

    def dequantized(self, block: jax.Array) -> jax.Array:
        """The block in float32, [..., 128]."""
        bits = lax.dynamic_slice_in_dim(self.bits, block * BLOCK, BLOCK, axis=-1)
        values = from_bits(bits, self.dtype).astype(jnp.float32)
        scale_block = 0 if self.scales.shape[-1] == 1 else block
        return values * lax.dynamic_slice_in_dim(self.scales, scale_block, 1, axis=-1)
