"""Sorts and moves rows in pure JAX.

A token has k pairs, (token, choice). A pair has at most one row, its expert's copy of the token.
Consider the sum of w[t, c] <x[t], y[row of (t, c)]> over all pairs with a row, for rows y [m, D],
tokens x [T, D] and weights w [T, k]. `gather_rows`, `combine_rows` and `row_dots` are its
derivatives with respect to y, x and w. Two arrays say which row belongs to which pair:

    row_of_pair [T, k]  the row of each pair, no row if not in [0, m)
    pair_of_row [m]     the pair of each row, as t * divisor + c; no pair if not in [0, T * divisor)

If `divisor` is k, c is the choice. If it is 1, c is 0, and a row has a token but no choice. Rows at
or past `count` [1] do not count as rows. If both arrays are given, they must agree. Sums are in
float32 at least, and rounded once. They are in the order of choices or, without `row_of_pair`, in
the order of rows.

Every operand may have a batch dimension in front. `weights` [T, 0], `count` [0], `row_of_pair`
[T, 0] and `pair_of_row` [0] stand for missing operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import vary_over, varying_axes


def sort_by_expert(experts: jax.Array, *, num_experts: int) -> list[jax.Array]:
    """Sorts pairs by expert. Pairs without an expert in [0, num_experts) are last; ties keep order.

    Returns:
      order [b?, n], inverse [b?, n], group_sizes [b?, num_experts].
    """

    def unbatched(experts):
        here = (0 <= experts) & (experts < num_experts)
        experts = jnp.where(here, experts, num_experts)
        order = jnp.argsort(experts, stable=True).astype(jnp.int32)
        pairs = jnp.arange(order.size, dtype=jnp.int32)
        inverse = jnp.zeros_like(order).at[order].set(pairs, unique_indices=True)
        # Compare and count in one fused reduction, because a bincount is a scatter-add with many
        # conflicts at a few addresses.
        names = jnp.arange(num_experts, dtype=jnp.int32)[None]
        group_sizes = jnp.sum(experts[:, None] == names, axis=0, dtype=jnp.int32)
        return [order, inverse, group_sizes]

    return over_batches(unbatched, (experts,), (1,))


def gather_rows(
    x: jax.Array,
    pair_of_row: jax.Array,
    row_of_pair: jax.Array,
    weights: jax.Array,
    count: jax.Array,
    *,
    divisor: int,
) -> jax.Array:
    """Returns y[i] = w[t, c] x[t] for the pair (t, c) of row i, zero if there is no row or pair.

    Returns:
      [b?, m, D], in the dtype of x.
    """

    def unbatched(x, pair_of_row, weights, count):
        if x.shape[0] == 0:
            return jnp.zeros((pair_of_row.shape[0], x.shape[1]), x.dtype)
        exists = _pairs_that_exist(pair_of_row, count, x.shape[0] * divisor)
        pair = jnp.where(exists, pair_of_row, 0)
        y = _take(x, pair // divisor)
        if weights.size:
            y = _take(weights.reshape(-1), pair)[:, None] * y.astype(accumulator(x.dtype))
        return jnp.where(exists[:, None], y, 0).astype(x.dtype)

    return over_batches(unbatched, (x, pair_of_row, weights, count), (2, 1, 2, 1))


def combine_rows(
    y: jax.Array,
    pair_of_row: jax.Array,
    row_of_pair: jax.Array,
    weights: jax.Array,
    count: jax.Array,
    *,
    divisor: int,
) -> jax.Array:
    """Returns x[t], the sum of w[t, c] y[row of (t, c)] over the choices c.

    Returns:
      [b?, T, D], in the dtype of y.
    """

    def unbatched(y, pair_of_row, row_of_pair, weights, count):
        if row_of_pair.shape[1] == 0 and 0 not in (*pair_of_row.shape, y.shape[1]):
            return _sums_of_rows(y, pair_of_row, count, row_of_pair.shape[0], divisor)
        exists, row_of_pair = _rows_that_exist(row_of_pair, count, y.shape[0])
        dtype = accumulator(y.dtype)
        x = jnp.zeros((row_of_pair.shape[0], y.shape[1]), dtype)
        for choice in range(row_of_pair.shape[1] if y.shape[0] else 0):
            part = _take(y, row_of_pair[:, choice]).astype(dtype)
            if weights.size:
                part = weights[:, choice, None] * part
            x += jnp.where(exists[:, choice, None], part, 0)
        return x.astype(y.dtype)

    operands = y, pair_of_row, row_of_pair, weights, count
    return over_batches(unbatched, operands, (2, 1, 2, 2, 1))


def _sums_of_rows(y, pair_of_row, count, num_tokens, divisor):
    """Returns the sums of each token's rows, in the order of the rows."""
    exists = _pairs_that_exist(pair_of_row, count, num_tokens * divisor)
    token_of_row = jnp.where(exists, pair_of_row // divisor, num_tokens)
    order = jnp.argsort(token_of_row, stable=True)
    tokens = jnp.arange(num_tokens, dtype=token_of_row.dtype)
    starts, ends = (
        jnp.searchsorted(token_of_row[order], tokens, side=side) for side in ("left", "right")
    )
    dtype = accumulator(y.dtype)

    def add(i, total):
        place = starts + i
        row = y[order[jnp.minimum(place, len(order) - 1)]]
        return total + jnp.where((place < ends)[:, None], row, 0).astype(dtype)

    total = _varying_zeros((num_tokens, y.shape[1]), y, pair_of_row).astype(dtype)
    most = jnp.max(ends - starts, initial=0)
    return lax.fori_loop(0, most, add, total).astype(y.dtype)


def row_dots(
    x: jax.Array,
    y: jax.Array,
    pair_of_row: jax.Array,
    row_of_pair: jax.Array,
    count: jax.Array,
    *,
    divisor: int,
) -> jax.Array:
    """Returns w[t, c] = <x[t], y[row of (t, c)]>, zero for a pair without a row.

    Returns:
      [b?, T, k], float32 at least.
    """

    def unbatched(x, y, row_of_pair, count):
        exists, row_of_pair = _rows_that_exist(row_of_pair, count, y.shape[0])
        dtype = accumulator(x.dtype)
        if 0 in (*row_of_pair.shape, y.shape[0]):
            return jnp.zeros(row_of_pair.shape, dtype)
        dots = [
            jnp.sum(x.astype(dtype) * _take(y, row).astype(dtype), axis=-1) for row in row_of_pair.T
        ]
        return jnp.where(exists, jnp.stack(dots, axis=-1), 0)

    return over_batches(unbatched, (x, y, row_of_pair, count), (2, 2, 2, 1))


def spread_rows(
    x: jax.Array, row_of_pair: jax.Array, weights: jax.Array, count: jax.Array, *, num_rows: int
) -> jax.Array:
    """Computes `gather_rows` from `row_of_pair` alone; several pairs may have the same row.

    Returns:
      [b?, num_rows, D], in the dtype of x.
    """

    def unbatched(x, row_of_pair, weights, count):
        exists, _ = _rows_that_exist(row_of_pair, count, num_rows)
        row_of_pair = jnp.where(exists, row_of_pair, num_rows)
        x = x.astype(accumulator(x.dtype))
        y = _varying_zeros((num_rows, x.shape[1]), x, row_of_pair)
        for choice in range(row_of_pair.shape[1]):
            part = weights[:, choice, None] * x if weights.size else x
            y = y.at[row_of_pair[:, choice]].add(part, mode="drop")
        return y

    operands = x, row_of_pair, weights, count
    return over_batches(unbatched, operands, (2, 2, 2, 1)).astype(x.dtype)


def accumulator(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which to sum numbers of `dtype`."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    return jnp.promote_types(dtype, jnp.float32) if inexact else np.dtype(dtype)


def over_batches(
    function: Callable[..., Any], operands: tuple[jax.Array, ...], ranks: tuple[int, ...]
) -> Any:
    """Maps `function` over the batch dimension of operands with more dimensions than `ranks`."""
    axes = [0 if x.ndim > rank else None for x, rank in zip(operands, ranks, strict=True)]
    return function(*operands) if set(axes) == {None} else jax.vmap(function, axes)(*operands)


def _pairs_that_exist(pair_of_row, count, num_pairs):
    exists = (0 <= pair_of_row) & (pair_of_row < num_pairs)
    if count.size:
        exists &= jnp.arange(pair_of_row.shape[0], dtype=jnp.int32) < count
    return exists


def _rows_that_exist(row_of_pair, count, num_rows):
    """Returns whether each pair has a row, and the index of the row, zero if there is none."""
    exists = (0 <= row_of_pair) & (row_of_pair < num_rows)
    if count.size:
        exists &= row_of_pair < count.reshape((1,) * row_of_pair.ndim)
    return exists, jnp.where(exists, row_of_pair, 0)


def _varying_zeros(shape, x, indices):
    """Returns zeros of the dtype of `x` that vary over the axes of `x` and `indices`."""
    return vary_over(jnp.zeros(shape, x.dtype), varying_axes(x, indices))


def _take(x, index):
    return x.at[index].get(mode="promise_in_bounds")
