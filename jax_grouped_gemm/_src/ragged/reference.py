"""The ragged matmuls in pure JAX: what every other implementation must compute.

Both functions walk over the row tiles that really exist (a loop with a traced trip count), so they
do O(M*K*N) work plus one tile per group and never build a [G, M, K] temporary. They run on every
backend and are what the primitives lower to where the CUDA kernels do not apply.

An operand may carry a leading batch dimension; one without it is shared by the whole batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import (
    at_least_float32,
    cdiv,
    from_bits,
    is_static,
    map_batch,
    to_bits,
    vary_over,
    varying_axes,
    whole_bytes_dtype,
    zero_bits,
)

MIN_TILE_ROWS = 16
MAX_TILE_ROWS = 256
SYMBOLIC_TILE_ROWS = 64  # for any number of rows


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
      group_sizes: int32 [b?, G], how many consecutive rows each global group owns.
      group_offset: int32 [b?, 1]; `rhs[i]` belongs to the global group `group_offset + i`.
      preferred_element_type: dtype of the result.
      precision: precision of the dots.

    Returns:
      [b?, m, n], zero in the rows that no local group owns.
    """
    row_axis = 1 if transpose_lhs else 0
    dimension_numbers = (((1 - row_axis,), (1 if transpose_rhs else 0,)), ((), ()))
    lhs, rhs = (x.astype(whole_bytes_dtype(x.dtype)) for x in (lhs, rhs))
    lhs_dtype, rhs_dtype = lhs.dtype, rhs.dtype
    result_dtype = preferred_element_type
    preferred_element_type = whole_bytes_dtype(result_dtype)
    accumulator_dtype = _accumulator_dtype(lhs, rhs, preferred_element_type)

    def unbatched(lhs, rhs, group_sizes, group_offset):
        num_rows, num_groups = lhs.shape[row_axis], rhs.shape[0]
        num_columns = rhs.shape[1 if transpose_rhs else 2]
        axes = varying_axes(lhs, rhs, group_sizes, group_offset)
        if 0 in (*lhs.shape, *rhs.shape):
            return vary_over(zero_bits((num_rows, num_columns), preferred_element_type), axes)

        bounds = local_group_bounds(group_sizes, group_offset, num_groups, num_rows)
        if group_sizes.shape == (1,) and num_groups == 1:
            mask = _rows_between(num_rows, *bounds)
            product = _dot(
                from_bits(lhs, lhs_dtype),
                from_bits(rhs[0], rhs_dtype),
                dimension_numbers,
                precision,
                accumulator_dtype,
            )
            product = to_bits(_convert(product, preferred_element_type))
            return _where_owned(mask, product, axis=0)

        tile_rows = _tile_rows(num_rows, num_groups)
        tiles = _Tiles.of(bounds, tile_rows, num_rows)
        lhs = _with_a_window(lhs, row_axis, tile_rows)
        padded_rows = lhs.shape[row_axis]
        out = vary_over(zero_bits((padded_rows, num_columns), preferred_element_type), axes)

        def compute_tile(tile, out):
            group, first, end = tiles.at(tile)
            window = _RowWindow(first, end, tile_rows, padded_rows)
            lhs_tile = from_bits(window.load(lhs, row_axis), lhs_dtype)
            rhs_matrix = from_bits(_element(rhs, group), rhs_dtype)
            product = _dot(lhs_tile, rhs_matrix, dimension_numbers, precision, accumulator_dtype)
            product = to_bits(_convert(product, preferred_element_type))
            # The window may reach into rows of other groups: those keep what they have.
            kept = window.load(out, axis=0)
            return window.store(out, _select_rows(window.mask, product, kept, axis=0))

        return lax.fori_loop(0, tiles.count, compute_tile, out)[:num_rows]

    operands = (to_bits(lhs), to_bits(rhs), group_sizes, group_offset)
    bits = map_batch(unbatched, operands, ranks=(2, 3, 1, 1))
    return from_bits(bits, preferred_element_type).astype(result_dtype)


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
    """Contracts the rows that each group owns in `lhs` and `rhs`: `lhs[rows].T @ rhs[rows]`.

    Args:
      lhs: [b?, m, k], or [b?, k, m] with `transpose_lhs`.
      rhs: [b?, m, n], or [b?, n, m] with `transpose_rhs`.
      group_sizes: int32 [b?, G], how many consecutive rows each global group owns.
      group_offset: int32 [b?, 1]; result `i` belongs to the global group `group_offset + i`.
      num_groups: number of results.
      preferred_element_type: dtype of the result.
      precision: precision of the dots.

    Returns:
      [b?, num_groups, k, n], zero for a group without rows.
    """
    lhs_row_axis, rhs_row_axis = (1 if transpose_lhs else 0), (1 if transpose_rhs else 0)
    dimension_numbers = (((lhs_row_axis,), (rhs_row_axis,)), ((), ()))
    lhs, rhs = (x.astype(whole_bytes_dtype(x.dtype)) for x in (lhs, rhs))
    lhs_dtype, rhs_dtype = lhs.dtype, rhs.dtype
    result_dtype = preferred_element_type
    preferred_element_type = whole_bytes_dtype(result_dtype)
    accumulator_dtype = _accumulator_dtype(lhs, rhs, preferred_element_type)

    def unbatched(lhs, rhs, group_sizes, group_offset):
        num_rows = lhs.shape[lhs_row_axis]
        slice_shape = (lhs.shape[1 - lhs_row_axis], rhs.shape[1 - rhs_row_axis])
        axes = varying_axes(lhs, rhs, group_sizes, group_offset)
        if 0 in (num_rows, num_groups):
            out = zero_bits((num_groups, *slice_shape), preferred_element_type)
            return vary_over(out, axes)

        bounds = local_group_bounds(group_sizes, group_offset, num_groups, num_rows)
        if group_sizes.shape == (1,) and num_groups == 1:
            mask = _rows_between(num_rows, *bounds)
            owned_lhs = from_bits(_where_owned(mask, lhs, lhs_row_axis), lhs_dtype)
            owned_rhs = from_bits(_where_owned(mask, rhs, rhs_row_axis), rhs_dtype)
            product = _dot(owned_lhs, owned_rhs, dimension_numbers, precision, accumulator_dtype)
            return to_bits(_convert(product, preferred_element_type))[None]

        tile_rows = _tile_rows(num_rows, num_groups)
        tiles = _Tiles.of(bounds, tile_rows, num_rows)
        lhs = _with_a_window(lhs, lhs_row_axis, tile_rows)
        rhs = _with_a_window(rhs, rhs_row_axis, tile_rows)
        padded_rows = lhs.shape[lhs_row_axis]

        def accumulate_tile(tile, carry):
            accumulator, out = carry
            group, first, end = tiles.at(tile)
            window = _RowWindow(first, end, tile_rows, padded_rows)
            # Both factors are masked: a zero in one does not silence a NaN in the other.
            lhs_tile = from_bits(window.load_masked(lhs, lhs_row_axis), lhs_dtype)
            rhs_tile = from_bits(window.load_masked(rhs, rhs_row_axis), rhs_dtype)
            product = _dot(lhs_tile, rhs_tile, dimension_numbers, precision, accumulator_dtype)
            # A group starts from nothing. The sum before may be NaN.
            before = lax.select(
                lax.broadcast(first == _element(tiles.start, group), accumulator.shape),
                jnp.zeros_like(accumulator),
                accumulator,
            )
            accumulator = before + product
            # The sum so far; that of the group's last tile stays.
            result = to_bits(_convert(accumulator, preferred_element_type))
            return accumulator, _with_element(out, result, group)

        accumulator = vary_over(jnp.zeros(slice_shape, accumulator_dtype), axes)
        out = vary_over(zero_bits((num_groups, *slice_shape), preferred_element_type), axes)
        return lax.fori_loop(0, tiles.count, accumulate_tile, (accumulator, out))[1]

    operands = (to_bits(lhs), to_bits(rhs), group_sizes, group_offset)
    bits = map_batch(unbatched, operands, ranks=(2, 2, 1, 1))
    return from_bits(bits, preferred_element_type).astype(result_dtype)


def ragged_accumulate(
    accumulator: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    **options: Any,
) -> jax.Array:
    """Adds a `ragged_contracting` product, which takes `options` too, to `accumulator`.

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


def local_group_bounds(
    group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """First row and end row of each of the `num_groups` groups from `group_offset` on.

    Negative sizes count as zero, the running sum saturates at `num_rows`, and a local group beyond
    the global ones owns nothing, so any input gives rows inside [0, num_rows].
    """
    total_groups = group_sizes.shape[0]
    if total_groups == 0:
        empty = jnp.zeros(num_groups, jnp.int32)
        return empty, empty
    sizes = jnp.minimum(jnp.maximum(group_sizes, 0), num_rows)
    if is_static(num_rows, total_groups) and num_rows * total_groups < 2**31:
        ends = jnp.minimum(lax.cumsum(sizes), num_rows)
    else:
        # A plain sum could overflow; this one saturates without ever exceeding num_rows.
        ends = lax.associative_scan(lambda a, b: a + jnp.minimum(b, num_rows - a), sizes)
    # Beside the global groups there are as many empty ones as an offset can reach.
    none = jnp.zeros(num_groups, ends.dtype)
    offset = jnp.minimum(jnp.maximum(group_offset, -num_groups), total_groups) + num_groups

    def local(bounds):
        padded = lax.concatenate([none, *bounds, none], 0)
        return lax.dynamic_slice_in_dim(
            padded, offset.reshape(()), num_groups, allow_negative_indices=False
        )

    return local([jnp.zeros_like(ends[:1]), ends[:-1]]), local([ends])


def _rows_between(num_rows: int, start: jax.Array, end: jax.Array) -> jax.Array:
    """Which rows are in [start, end), of bounds [1]."""
    rows = lax.broadcasted_iota(jnp.int32, (num_rows,), 0)
    return (rows >= start) & (rows < end)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of all groups, in order; all are [T], of which the first `count` exist.

    Made as far as possible before the loop over tiles: what products of the same groups do there
    XLA compiles once, but the body of a loop once for each product.

    Attributes:
      group: [T], whose rows they are, in order; the first `count` exist.
      base: [G], the first row of a group's tile 0, had it one.
      start, end: [G], first and end row of each group.
      count: how many tiles there are.
      tile_rows: rows of each.
    """

    group: jax.Array
    base: jax.Array
    start: jax.Array
    end: jax.Array
    count: jax.Array
    tile_rows: int

    @classmethod
    def of(cls, bounds: tuple[jax.Array, jax.Array], tile_rows: int, num_rows: int) -> _Tiles:
        """The tiles of groups with these first and end rows."""
        start, end = bounds
        num_groups = start.shape[0]
        tiles = lax.div(end - start + (tile_rows - 1), jnp.int32(tile_rows))
        last = lax.cumsum(tiles)
        # Every group may have a partial tile.
        most = cdiv(num_rows, tile_rows) + num_groups
        tile = lax.broadcasted_iota(jnp.int32, (most, num_groups), 0)
        is_past = (lax.broadcast_in_dim(last, tile.shape, (1,)) <= tile).astype(jnp.int32)
        group = jnp.sum(is_past, axis=1, dtype=jnp.int32)
        return cls(group, start - (last - tiles) * tile_rows, start, end, last[-1], tile_rows)

    def at(self, tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The group of a tile, its first row, and its group's end."""
        group = _element(self.group, tile)
        first = _element(self.base, group) + tile * self.tile_rows
        return group, first, _element(self.end, group)


def _element(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], for an index that is in range."""
    return lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def _with_element(x: jax.Array, element: jax.Array, index: jax.Array) -> jax.Array:
    """x.at[index].set(element), likewise."""
    return lax.dynamic_update_index_in_dim(x, element, index, 0, allow_negative_indices=False)


def _where_owned(mask: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Rows along `axis` of `x` where `mask` is true, else zeros."""
    return _select_rows(mask, x, jnp.zeros_like(x), axis)


def _select_rows(mask: jax.Array, x: jax.Array, other: jax.Array, axis: int) -> jax.Array:
    """Rows along `axis` of `x` where `mask` is true, else of `other`."""
    # Not a product: what is left out may hold NaN or Inf.
    return lax.select(lax.broadcast_in_dim(mask, x.shape, (axis,)), x, other)


class _RowWindow:
    """`tile_rows` rows of a matrix, of which only those in [first, end) count.

    A dynamic slice must lie inside its array, so the last window is moved up and masks the rows
    before `first` as well as those from `end` on.
    """

    def __init__(self, first: jax.Array, end: jax.Array, tile_rows: int, num_rows: int):
        self.tile_rows = tile_rows
        self.start = jnp.minimum(first, num_rows - tile_rows)
        rows = self.start + lax.iota(jnp.int32, tile_rows)
        self.mask = (rows >= first) & (rows < end)

    def load(self, x: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(
            x, self.start, self.tile_rows, axis, allow_negative_indices=False
        )

    def load_masked(self, x: jax.Array, axis: int) -> jax.Array:
        return _where_owned(self.mask, self.load(x, axis), axis)

    def store(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(
            x, tile, self.start, axis=0, allow_negative_indices=False
        )


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """Rows per tile: about one tile for a group of average size."""
    if not is_static(num_rows, num_groups):
        return SYMBOLIC_TILE_ROWS
    average = cdiv(num_rows, num_groups)
    power_of_two = 1 << (average - 1).bit_length()
    return min(max(power_of_two, MIN_TILE_ROWS), MAX_TILE_ROWS, num_rows)


def _with_a_window(x: jax.Array, axis: int, tile_rows: int) -> jax.Array:
    """`x` with rows for a window, however few its symbolic number of rows may turn out to be."""
    if is_static(x.shape[axis]):
        return x
    return jnp.pad(x, [(0, tile_rows if i == axis else 0) for i in range(x.ndim)])


def _accumulator_dtype(lhs: jax.Array, rhs: jax.Array, out_dtype: np.dtype) -> np.dtype:
    """Returns at least float32 for floating point; modular integers need no extra bits."""
    if not jnp.issubdtype(out_dtype, jnp.inexact):
        return out_dtype
    return jnp.result_type(*map(at_least_float32, (lhs.dtype, rhs.dtype, out_dtype)))


def _dot(lhs, rhs, dimension_numbers, precision, accumulator_dtype) -> jax.Array:
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.astype(accumulator_dtype), rhs.astype(accumulator_dtype)
    return lax.dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision=precision,
        preferred_element_type=accumulator_dtype,
    )


def _convert(accumulator: jax.Array, dtype: np.dtype) -> jax.Array:
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        # The cotangent of a real factor, where the other one is complex.
        accumulator = jnp.real(accumulator)
    return accumulator.astype(dtype)
