"""The ragged matmuls in pure JAX, which define the result of every other implementation.

They run on every backend. Primitives lower to them where the CUDA kernels do not apply. For a small
product or a single group, every group multiplies all rows, and masks select the group's own rows.
Larger products loop over tiles of rows (`tile_loop`). The loop does not multiply the work by the
number of groups, but XLA compiles each loop separately.

An operand may have a leading batch dimension. The whole batch shares operands without it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import (
    from_bits,
    is_static,
    map_batch,
    to_bits,
    vary_over,
    varying_axes,
    whole_bytes_dtype,
    zero_bits,
)
from jax_grouped_gemm._src.ragged import tile_loop
from jax_grouped_gemm._src.ragged.dot import Dot, element, rows_between, where_owned

# Up to this number of float32 multiplications, masked products of all rows are about as fast on a
# CPU as the loop over tiles, and compile faster. A mask takes as long as `MASKED_COLUMNS` columns
# of a product. docs/notes/ragged.md has the measurements.
MAX_MULTIPLICATIONS = 2**19
MASKED_COLUMNS = 16

FORMS = ("auto", "tiles")
"""Values for `with form(...)`: "auto" uses masks where they are as fast as tiles, and "tiles" never
uses masks."""
form = jax.make_user_context(FORMS[0])


def ragged_noncontracting(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
    preferred_element_type: np.dtype,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Multiplies each group's rows of `lhs` by the group's own matrix of `rhs`.

    Args:
      lhs: [b?, m, k], or [b?, k, m] with `transpose_lhs`.
      rhs: [b?, g, k, n], or [b?, g, n, k] with `transpose_rhs`.
      group_sizes: int32 [b?, G], the number of consecutive rows of each global group.
      group_offset: int32 [b?, 1]; `rhs[i]` belongs to the global group `group_offset + i`.
      preferred_element_type: dtype of the result.
      precision: precision of the dots.

    Returns:
      [b?, m, n], zero in the rows that no local group owns.
    """
    row_axis = 1 if transpose_lhs else 0
    lhs, rhs = (x.astype(whole_bytes_dtype(x.dtype)) for x in (lhs, rhs))
    contracting = (1 - row_axis, 1 if transpose_rhs else 0)
    dot = Dot.of(lhs, rhs, contracting, whole_bytes_dtype(preferred_element_type), precision)

    def unbatched(lhs, rhs, group_sizes, group_offset):
        num_rows, num_groups = lhs.shape[row_axis], rhs.shape[0]
        if 0 in (*lhs.shape, *rhs.shape):
            num_columns = rhs.shape[1 if transpose_rhs else 2]
            out = zero_bits((num_rows, num_columns), dot.result_dtype)
            return vary_over(out, varying_axes(lhs, rhs, group_sizes, group_offset))

        bounds = local_group_bounds(group_sizes, group_offset, num_groups, num_rows)
        if not _multiplies_all_rows(
            dot, group_sizes.shape[0], num_groups, num_rows, *rhs.shape[1:]
        ):
            return tile_loop.noncontracting(dot, lhs, rhs, bounds)

        owned = jax.vmap(rows_between, (None, 0, 0))(num_rows, *bounds)
        # Broadcast lhs, because XLA cannot compile some 16-bit products for a CPU without it.
        products = jax.vmap(dot)(lax.broadcast(lhs, (num_groups,)), rhs)  # [g, m, n]
        if num_groups == 1:
            # Skip the selection, because XLA does not remove it for a single group.
            chosen = products[0]
        else:
            chosen = jax.vmap(element, (1, 0))(products, lax.argmax(owned, 0, jnp.int32))
        return dot.result(where_owned(jnp.any(owned, axis=0), chosen, axis=0))

    operands = (to_bits(lhs), to_bits(rhs), group_sizes, group_offset)
    bits = map_batch(unbatched, operands, ranks=(2, 3, 1, 1))
    return from_bits(bits, dot.result_dtype).astype(preferred_element_type)


def ragged_contracting(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    num_groups: int,
    transpose_lhs: bool,
    transpose_rhs: bool,
    preferred_element_type: np.dtype,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Returns `lhs[rows].T @ rhs[rows]` for the rows of each group.

    Args:
      lhs: [b?, m, k], or [b?, k, m] with `transpose_lhs`.
      rhs: [b?, m, n], or [b?, n, m] with `transpose_rhs`.
      group_sizes: int32 [b?, G], the number of consecutive rows of each global group.
      group_offset: int32 [b?, 1]; result `i` belongs to the global group `group_offset + i`.
      num_groups: number of results.
      preferred_element_type: dtype of the result.
      precision: precision of the dots.

    Returns:
      [b?, num_groups, k, n], zero for a group without rows.
    """
    lhs_axis, rhs_axis = (1 if transpose_lhs else 0), (1 if transpose_rhs else 0)
    lhs, rhs = (x.astype(whole_bytes_dtype(x.dtype)) for x in (lhs, rhs))
    contracting = (lhs_axis, rhs_axis)
    dot = Dot.of(lhs, rhs, contracting, whole_bytes_dtype(preferred_element_type), precision)

    def unbatched(lhs, rhs, group_sizes, group_offset):
        num_rows = lhs.shape[lhs_axis]
        result_shape = (lhs.shape[1 - lhs_axis], rhs.shape[1 - rhs_axis])
        if 0 in (num_rows, num_groups):
            out = zero_bits((num_groups, *result_shape), dot.result_dtype)
            return vary_over(out, varying_axes(lhs, rhs, group_sizes, group_offset))

        bounds = local_group_bounds(group_sizes, group_offset, num_groups, num_rows)
        if not _multiplies_all_rows(dot, group_sizes.shape[0], num_groups, num_rows, *result_shape):
            return tile_loop.contracting(dot, lhs, rhs, bounds)

        def of_group(start, end):
            owned = rows_between(num_rows, start, end)
            # Mask both factors, because a zero in one does not silence a NaN in the other.
            return dot(where_owned(owned, lhs, lhs_axis), where_owned(owned, rhs, rhs_axis))

        return dot.result(jax.vmap(of_group)(*bounds))

    operands = (to_bits(lhs), to_bits(rhs), group_sizes, group_offset)
    bits = map_batch(unbatched, operands, ranks=(2, 2, 1, 1))
    return from_bits(bits, dot.result_dtype).astype(preferred_element_type)


def ragged_accumulate(
    accumulator: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    **options: Any,
) -> jax.Array:
    """Adds a `ragged_contracting` product with `options` to `accumulator`.

    Args:
      accumulator: [b?, g, k, n]; it has the batch dimension if any operand has it.

    Returns:
      An array like `accumulator`.
    """
    product = ragged_contracting(
        lhs,
        rhs,
        group_sizes,
        group_offset,
        num_groups=accumulator.shape[-3],
        preferred_element_type=accumulator.dtype,
        **options,
    )
    return accumulator + product


def ends_of_groups(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns the end row of each group [.., G]; see `local_group_bounds`."""
    sizes = jnp.minimum(jnp.maximum(group_sizes, 0), num_rows)
    total_groups = sizes.shape[-1]
    if is_static(num_rows, total_groups) and num_rows * total_groups < 2**31:
        return jnp.minimum(lax.cumsum(sizes, axis=sizes.ndim - 1), num_rows)
    # A plain sum could overflow. This sum saturates at num_rows.
    return lax.associative_scan(lambda a, b: a + jnp.minimum(b, num_rows - a), sizes, axis=-1)


def local_group_bounds(
    group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Returns first row and end row of each of the `num_groups` groups from `group_offset` on.

    All rows are inside [0, num_rows] for any input: negative sizes count as zero, the running sum
    saturates at `num_rows`, and a local group that is not a global group owns no rows.
    """
    total_groups = group_sizes.shape[0]
    if total_groups == 0:
        empty = jnp.zeros(num_groups, jnp.int32)
        return empty, empty
    ends = ends_of_groups(group_sizes, num_rows)
    # Pad with empty groups on both sides, for offsets that reach beyond the global groups.
    none = jnp.zeros(num_groups, ends.dtype)
    offset = jnp.minimum(jnp.maximum(group_offset, -num_groups), total_groups) + num_groups

    def local(bounds):
        padded = lax.concatenate([none, *bounds, none], 0)
        return lax.dynamic_slice_in_dim(
            padded, offset.reshape(()), num_groups, allow_negative_indices=False
        )

    return local([jnp.zeros_like(ends[:1]), ends[:-1]]), local([ends])


def _multiplies_all_rows(
    dot: Dot, total_groups: int, num_groups: int, num_rows: int, *dimensions: int
) -> bool:
    """Returns whether each local group multiplies all rows, with masks, instead of tiles.

    Args:
      dot: dot of one group.
      total_groups: number of global groups.
      num_groups: number of local groups.
      num_rows: number of all rows.
      dimensions: k and n in any order.
    """
    if (total_groups, num_groups) == (1, 1):
        return True
    if dot.accumulator_dtype != np.float32 or form.value == "tiles":
        return False
    if not is_static(num_groups, num_rows, *dimensions):
        return False
    multiplications = math.prod(max(size, MASKED_COLUMNS) for size in dimensions)
    return num_groups * num_rows * multiplications <= MAX_MULTIPLICATIONS


def owned_rows(
    group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, num_rows: int
) -> jax.Array:
    """Returns whether a local group owns each row: booleans [num_rows]."""
    first, end = owned_window(group_sizes, group_offset, num_groups, num_rows)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return (rows >= first) & (rows < end)


def owned_window(
    group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the first row that a local group owns, and the end of these rows."""
    # Rows of local groups are contiguous. Local groups that are not global groups are 0 to 0.
    starts, ends = local_group_bounds(group_sizes, group_offset, num_groups, num_rows)
    first = jnp.min(jnp.where(ends > starts, starts, num_rows), initial=num_rows)
    return first, jnp.max(ends, initial=0)
