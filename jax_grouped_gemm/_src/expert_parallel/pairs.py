"""The (token, choice) pairs whose experts this device has, sorted by expert."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.mlp.operands import Groups
from jax_grouped_gemm._src.rows.api import sort_by_expert


class LocalPairs(NamedTuple):
    """Rows for the local experts of T tokens with k choices each, in a buffer of m rows."""

    order: jax.Array  # [T*k] int32, the pair of each row; pairs of other devices come last
    inverse: jax.Array  # [T, k] int32, the row of each pair; rows from `valid_rows` on do not exist
    group_sizes: jax.Array  # [experts here] int32, rows of each expert in the buffer
    valid_rows: jax.Array  # [1] int32, the sum of `group_sizes`
    wanted: jax.Array  # int32 scalar, number of rows that an endless buffer would have
    num_rows: int  # m, the rows of the buffer

    @property
    def groups(self) -> Groups:
        """The rows of the experts here."""
        return Groups(self.group_sizes, None)

    @property
    def pair_of_row(self) -> jax.Array:
        """The pair t * k + c of each row of the buffer: [m]."""
        return self.order[: self.num_rows]

    @property
    def token_of_row(self) -> jax.Array:
        """The token of each row of the buffer: [m]."""
        return self.pair_of_row // max(self.inverse.shape[1], 1)

    @property
    def valid(self) -> jax.Array:
        """Whether each row of the buffer belongs to a pair: booleans [m]."""
        return jnp.arange(self.num_rows, dtype=jnp.int32) < self.valid_rows[0]


def local_pairs(
    experts: jax.Array,
    first_expert: jax.Array,
    num_experts: int,
    num_rows: int,
    implementation: Implementation,
) -> LocalPairs:
    """Sorts the pairs of the experts [first_expert, first_expert + num_experts).

    Args:
      experts: [T, k].
      first_expert: int32 scalar.
      num_experts: experts of this device.
      num_rows: rows of the buffer. Rows past it are dropped, the rows of the last experts first.
      implementation: implementation of the sort.
    """
    order, inverse, sizes = sort_by_expert(
        experts - first_expert, num_experts, implementation=implementation
    )
    wanted = jnp.sum(sizes)
    if num_rows < order.size:
        ends = jnp.minimum(jnp.cumsum(sizes), num_rows)
        sizes = jnp.diff(ends, prepend=0)
    count = jnp.minimum(wanted, num_rows).reshape(1)
    return LocalPairs(order, inverse, sizes, count, wanted, num_rows)


def most_local_rows(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Returns the most rows that tokens can have here. A token never chooses an expert twice."""
    return num_tokens * min(top_k, num_experts)


def buffer_rows(
    num_tokens: int, top_k: int, num_experts: int, num_slices: int, factor: float | None
) -> int:
    """Returns the rows of the buffer: for the worst case, or `factor` times balanced rows."""
    most = most_local_rows(num_tokens, top_k, num_experts)
    if factor is None:
        return most
    balanced = num_tokens * top_k / num_slices
    return min(most, max(1, round(factor * balanced)))
