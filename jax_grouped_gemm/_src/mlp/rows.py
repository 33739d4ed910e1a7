"""Copies tokens to rows, and adds up rows for tokens; each is the other's transpose."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.mlp.operands import Rows
from jax_grouped_gemm._src.rows import primitive as moves


def on_rows(rows: Rows) -> jax.Array:
    """Returns the rows [m, D], or copies of tokens if tokens are given."""
    return rows.x if rows.rows is None else moves.gather_rows(rows.x, *_pairs(rows), **_way(rows))


def copies(rows: Rows) -> jax.Array:
    """Computes `on_rows` by a kernel even without `inverse`, for rows without derivatives."""
    return moves.gather_rows(rows.x, *_pairs(rows), divisor=1, implementation=None)


def combine(y: jax.Array, rows: Rows) -> jax.Array:
    """Adds up the rows y [m, D] of each token: [T, D], the transpose of `on_rows`.

    Terms are in the order of `inverse`, or in the order of rows if there is no `inverse`.
    """
    return moves.combine_rows(y, *_pairs(rows), **_way(rows))


def combine_for_sources(y: jax.Array, rows: Rows) -> jax.Array:
    """Computes `combine` with the sums for other devices first, so that these travel while this
    device adds up its own sums. The function is not differentiable."""
    if rows.sources == 1:
        return combine(y, rows)
    assert rows.inverse is not None
    parts = [jnp.split(a, rows.sources) for a in (rows.x, rows.inverse)]
    of_sources = [dataclasses.replace(rows, x=x, inverse=i) for x, i in zip(*parts, strict=True)]
    own, *others = of_sources
    sums = []
    for of_source in others:
        total = combine(y, of_source)
        inverse, total = barrier((own.inverse, total))
        own = dataclasses.replace(own, inverse=inverse)
        sums.append(total)
    return jnp.concatenate([combine(y, own), *sums])


def _pairs(rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the operands of `rows.reference`, without weights. Rows name tokens here, not
    pairs."""
    assert rows.rows is not None
    tokens, inverse, count = rows.x.shape[0], rows.inverse, rows.count
    if inverse is None:
        inverse = jnp.zeros((tokens, 0), jnp.int32)
    if count is None:
        count = jnp.zeros((0,), jnp.int32)
    return rows.rows, inverse, jnp.zeros((tokens, 0), jnp.float32), count


def _way(rows: Rows) -> dict[str, Any]:
    """Returns options with which XLA moves rows if there is no `inverse`, which kernels need."""
    return dict(divisor=1, implementation="xla" if rows.inverse is None else None)
