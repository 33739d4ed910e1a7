"""Rows of an MLP: copied from tokens, and added up again; each is the other's transpose."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.mlp.operands import Rows
from jax_grouped_gemm._src.rows import primitive as moves


def on_rows(rows: Rows) -> jax.Array:
    """The rows [m, D], copies of tokens where those are given."""
    return rows.x if rows.rows is None else moves.gather_rows(rows.x, *_pairs(rows), **_way(rows))


def copies(rows: Rows) -> jax.Array:
    """`on_rows` by a kernel whatever is known: the bits of quantised tokens, or scales."""
    return moves.gather_rows(rows.x, *_pairs(rows), divisor=1, implementation=None)


def combine(y: jax.Array, rows: Rows) -> jax.Array:
    """The sum of each token's rows: y [m, D] -> [T, D], the transpose of `on_rows`.

    The order of the terms is that of `inverse`, or of the rows without it.
    """
    return moves.combine_rows(y, *_pairs(rows), **_way(rows))


def combine_for_sources(y: jax.Array, rows: Rows) -> jax.Array:
    """`combine`, but for derivatives, which it lacks: the sums of other devices come first, so that
    they travel while those of this device are added up."""
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
    """Rows and tokens as `rows.reference` has them, without weights. Rows know their tokens, not
    their pairs."""
    assert rows.rows is not None
    tokens, inverse, count = rows.x.shape[0], rows.inverse, rows.count
    if inverse is None:
        inverse = jnp.zeros((tokens, 0), jnp.int32)
    if count is None:
        count = jnp.zeros((0,), jnp.int32)
    return rows.rows, inverse, jnp.zeros((tokens, 0), jnp.float32), count


def _way(rows: Rows) -> dict[str, Any]:
    """Without `inverse` XLA moves rows, since no kernel adds them up then."""
    return dict(divisor=1, implementation="xla" if rows.inverse is None else None)
