"""Scaled ragged matmuls of FP8 operands in pure JAX.

They accumulate as the CUDA kernels do: in float32, and block by block of 128 contracted elements.
"""

from __future__ import annotations

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
from jax_grouped_gemm._src.fp8.formats import BLOCK, Scaling
from jax_grouped_gemm._src.fp8.quantize.reference import GroupBlocks
from jax_grouped_gemm._src.ragged import reference


def scaled_ragged_noncontracting(
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    transpose_rhs: bool,
    lhs_scaling: Scaling,
    rhs_scaling: Scaling,
    preferred_element_type: np.dtype,
    fast_accumulation: bool,
) -> jax.Array:
    """Multiplies each group's rows of `lhs` by the group's own matrix, both dequantised.

    Args:
      lhs: [b?, m, k].
      lhs_scale: float32 [b?, m or 1, ceil(k / 128) or 1]. If `lhs_scaling` is column-major,
        scales are transposed, and have m columns or more.
      rhs: [b?, g, k, n], or [b?, g, n, k] with `transpose_rhs`.
      rhs_scale: float32, like `rhs`, but with each of the last two dimensions divided by 128,
        unchanged or 1.
      group_sizes, group_offset: see `reference.ragged_noncontracting`.
      lhs_scaling, rhs_scaling: the elements that share a scale.
      preferred_element_type: dtype of the result.
      fast_accumulation: allows less precision, which has no effect here.

    Returns:
      [b?, m, n], zero in the rows that no local group owns.
    """

    def unbatched(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset):
        m, k = lhs.shape
        axes = varying_axes(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
        if lhs_scaling.column_major:
            lhs_scale = lhs_scale[:, :m].T
        if not transpose_rhs:
            rhs, rhs_scale = rhs.mT, rhs_scale.mT
        n = rhs.shape[1]
        if 0 in (*lhs.shape, *rhs.shape):
            return vary_over(jnp.zeros((m, n), preferred_element_type), axes)
        rhs_scale = jnp.repeat(rhs_scale, rhs_scaling.block[1] or 1, axis=1)
        if not rhs_scaling.is_single:
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
      lhs_scale: float32 [b?, blocks, k], or [b?, 1, k] if all blocks share the scales.
      rhs: [b?, blocks, n, 128].
      rhs_scale: float32 [b?, blocks, n] or [b?, 1, n].
      group_sizes, group_offset: see `reference.ragged_contracting`.
      num_rows: rows of all groups. The running sum of group sizes is at most this number.
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
        blocks = GroupBlocks.of(group_sizes, num_rows)
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
    """An FP8 operand [..., k] with scales [..., ceil(k / 128) or 1], to dequantise by blocks."""

    def __init__(self, values: jax.Array, scales: jax.Array):
        growth = round_up(values.shape[-1], BLOCK) - values.shape[-1]
        values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, growth)])
        self.dtype, self.scales = values.dtype, scales
        self.bits = to_bits(values)

    def dequantized(self, block: jax.Array) -> jax.Array:
        """Returns the 128 columns of block number `block` in float32: [..., 128]."""
        bits = lax.dynamic_slice_in_dim(self.bits, block * BLOCK, BLOCK, axis=-1)
        values = from_bits(bits, self.dtype).astype(jnp.float32)
        scale_block = 0 if self.scales.shape[-1] == 1 else block
        return values * lax.dynamic_slice_in_dim(self.scales, scale_block, 1, axis=-1)
