"""The ragged matmuls as loops over tiles of rows, whose number is known only at run time.

A loop does O(M*K*N) work plus one tile per group, and makes no [G, M, K] temporary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv, is_static, vary_over, varying_axes, zero_bits
from jax_grouped_gemm._src.ragged.dot import Dot, element, rows_between, select_rows, where_owned

MIN_TILE_ROWS = 16
MAX_TILE_ROWS = 256
SYMBOLIC_TILE_ROWS = 64  # rows of a tile if the number of rows or groups is symbolic


def noncontracting(
    dot: Dot, lhs: jax.Array, rhs: jax.Array, bounds: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Multiplies the rows of each group by the group's own matrix.

    Args:
      dot: the dot of a tile of lhs and a matrix.
      lhs: bits of [m, k] or [k, m].
      rhs: bits of [g, k, n] or [g, n, k].
      bounds: [g], first row and end row of each group.

    Returns:
      bits of [m, n], zero in rows that no group owns.
    """
    lhs_axis = 1 - dot.contracting[0]
    num_rows, num_groups = lhs.shape[lhs_axis], rhs.shape[0]
    num_columns = rhs.shape[2 - dot.contracting[1]]
    axes = varying_axes(lhs, rhs, *bounds)
    tile_rows = _tile_rows(num_rows, num_groups)
    tiles = _Tiles.of(bounds, tile_rows, num_rows)
    lhs = _with_a_window(lhs, lhs_axis, tile_rows)
    padded_rows = lhs.shape[lhs_axis]
    out = vary_over(zero_bits((padded_rows, num_columns), dot.result_dtype), axes)

    def compute_tile(tile, out):
        group, first, end = tiles.at(tile)
        window = _RowWindow(first, end, tile_rows, padded_rows)
        product = dot.result(dot(window.load(lhs, lhs_axis), element(rhs, group)))
        # The window may include rows of other groups, which must keep their values.
        kept = window.load(out, axis=0)
        return window.store(out, select_rows(window.mask, product, kept, axis=0))

    return lax.fori_loop(0, tiles.count, compute_tile, out)[:num_rows]


def contracting(
    dot: Dot, lhs: jax.Array, rhs: jax.Array, bounds: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Contracts the rows of each group.

    Args:
      dot: the dot of a tile of lhs and a tile of rhs.
      lhs: bits of [m, k] or [k, m].
      rhs: bits of [m, n] or [n, m].
      bounds: [g], first row and end row of each group.

    Returns:
      bits of [g, k, n], zero for a group without rows.
    """
    lhs_axis, rhs_axis = dot.contracting
    num_rows, num_groups = lhs.shape[lhs_axis], bounds[0].shape[0]
    result_shape = (lhs.shape[1 - lhs_axis], rhs.shape[1 - rhs_axis])
    axes = varying_axes(lhs, rhs, *bounds)
    tile_rows = _tile_rows(num_rows, num_groups)
    tiles = _Tiles.of(bounds, tile_rows, num_rows)
    lhs = _with_a_window(lhs, lhs_axis, tile_rows)
    rhs = _with_a_window(rhs, rhs_axis, tile_rows)
    padded_rows = lhs.shape[lhs_axis]

    def accumulate_tile(tile, carry):
        accumulator, out = carry
        group, first, end = tiles.at(tile)
        window = _RowWindow(first, end, tile_rows, padded_rows)
        # Mask both factors, because a zero in one does not silence a NaN in the other.
        product = dot(window.load_masked(lhs, lhs_axis), window.load_masked(rhs, rhs_axis))
        # Select zeros for a group's first tile instead of multiplying by zero, because the sum of
        # the previous group may be NaN.
        before = lax.select(
            lax.broadcast(first == element(tiles.start, group), accumulator.shape),
            jnp.zeros_like(accumulator),
            accumulator,
        )
        accumulator = before + product
        # Store the sum so far; the last tile of the group stores the final sum.
        result = dot.result(accumulator)
        return accumulator, _with_element(out, result, group)

    accumulator = vary_over(jnp.zeros(result_shape, dot.accumulator_dtype), axes)
    out = vary_over(zero_bits((num_groups, *result_shape), dot.result_dtype), axes)
    return lax.fori_loop(0, tiles.count, accumulate_tile, (accumulator, out))[1]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of all groups, in order.

    As much as possible is computed here instead of in the loop, because XLA compiles this code once
    for all products of the same groups, but the body of a loop once for each product.

    Attributes:
      group: [T], the group of each tile; only the first `count` tiles exist.
      base: [G], for each group the first row that tile 0 would have if it belonged to the group.
      start, end: [G], first and end row of each group.
      count: number of tiles.
      tile_rows: rows of each tile.
    """

    group: jax.Array
    base: jax.Array
    start: jax.Array
    end: jax.Array
    count: jax.Array
    tile_rows: int

    @classmethod
    def of(cls, bounds: tuple[jax.Array, jax.Array], tile_rows: int, num_rows: int) -> _Tiles:
        """Returns the tiles of groups with these first and end rows."""
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
        """Returns the group of a tile, the first row of the tile, and the end row of the group."""
        group = element(self.group, tile)
        first = element(self.base, group) + tile * self.tile_rows
        return group, first, element(self.end, group)


def _with_element(x: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x.at[index].set(value), for an index that is in range."""
    return lax.dynamic_update_index_in_dim(x, value, index, 0, allow_negative_indices=False)


class _RowWindow:
    """A window of `tile_rows` rows of a matrix, with a mask of the rows in [first, end).

    A dynamic slice must lie inside its array, so the last window begins before `first`. The mask
    then excludes the rows before `first` as well as those from `end` on.
    """

    def __init__(self, first: jax.Array, end: jax.Array, tile_rows: int, num_rows: int):
        self.tile_rows = tile_rows
        self.start = jnp.minimum(first, num_rows - tile_rows)
        self.mask = rows_between(tile_rows, first - self.start, end - self.start)

    def load(self, x: jax.Array, axis: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(
            x, self.start, self.tile_rows, axis, allow_negative_indices=False
        )

    def load_masked(self, x: jax.Array, axis: int) -> jax.Array:
        return where_owned(self.mask, self.load(x, axis), axis)

    def store(self, x: jax.Array, tile: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(
            x, tile, self.start, axis=0, allow_negative_indices=False
        )


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """Returns the rows per tile, so that a group of average size has about one tile."""
    if not is_static(num_rows, num_groups):
        return SYMBOLIC_TILE_ROWS
    average = cdiv(num_rows, num_groups)
    power_of_two = 1 << (average - 1).bit_length()
    return min(max(power_of_two, MIN_TILE_ROWS), MAX_TILE_ROWS, num_rows)


def _with_a_window(x: jax.Array, axis: int, tile_rows: int) -> jax.Array:
    """Pads `x` so that a window fits, because a symbolic number of rows may be small."""
    if is_static(x.shape[axis]):
        return x
    return jnp.pad(x, [(0, tile_rows if i == axis else 0) for i in range(x.ndim)])
