"""The MLPs of a device's experts, on a number of rows that only the device knows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.expert_parallel.pairs import LocalPairs
from jax_grouped_gemm._src.mlp.experts import Experts
from jax_grouped_gemm._src.mlp.operands import Rows
from jax_grouped_gemm._src.rows.api import combine, gather_rows
from jax_grouped_gemm._src.rows.permutation import permute_rows


@dataclasses.dataclass(frozen=True)
class LocalExperts(Experts):
    """The experts of one device of a group, whose rows are in a buffer for the worst case."""

    counts_rows: ClassVar[bool] = True

    @property
    def combines(self) -> bool:
        """Whether `sums_on_tokens` may be called, which reads gradients of the sums in place."""
        return self.in_fp8 and not (callable(self.implementation) or self.weights_on_input)

    def sums_on_tokens(
        self, x: jax.Array, pairs: LocalPairs, weights: jax.Array, sources: int
    ) -> jax.Array:
        """Computes the MLPs of tokens [T, D] of `sources` devices, with row weights [m].

        Returns:
          The sum of each token's rows, [T, D].
        """
        # Do not add up rows that no expert owns, because they are zero. Products skip these rows,
        # but `token_of_row` names a token even for them, because loading a row without a token is
        # slow.
        inverse = jnp.where(pairs.inverse < pairs.valid_rows, pairs.inverse, pairs.num_rows)
        rows = Rows(x, pairs.token_of_row, inverse, pairs.valid_rows, sources)
        return self.mlp(rows, weights, pairs.groups, combines=True)

    def on_tokens(self, x: jax.Array, pairs: LocalPairs, weights: jax.Array) -> jax.Array:
        """Computes rows [m, D], of which `pairs.valid_rows` are valid, from tokens [T, D]."""
        rows = Rows(x, pairs.token_of_row, pairs.inverse, self._count(pairs))
        if self.takes_tokens(rows, weights, pairs.groups):
            return self.mlp(rows, weights, pairs.groups)
        return self.on_rows(self.copy(x, pairs), weights, pairs.groups)

    def copy(self, x: jax.Array, pairs: LocalPairs) -> jax.Array:
        """Copies tokens [T, D] to rows [m, D], sorted by expert."""
        options = dict(inverse=pairs.inverse, implementation=self.of_rows)
        return gather_rows(x, pairs.token_of_row, self._count(pairs), **options)

    def add_up(self, rows: jax.Array, pairs: LocalPairs) -> jax.Array:
        """Adds up the rows [m, D] of each token: [T, D]."""
        options = dict(count=self._count(pairs), implementation=self.of_rows)
        return combine(rows, pairs.inverse, order=pairs.pair_of_row, **options)

    def _count(self, pairs: LocalPairs) -> jax.Array | None:
        """Returns the number of rows to move, or None to move all rows. Rows that no expert owns
        are zero when they come back, so moving them does no harm."""
        return None if self.reads_every_row else pairs.valid_rows


def weights_of_rows(weights: jax.Array, pairs: LocalPairs) -> jax.Array:
    """Returns the rows' router weights [m] from [T, k], zero for rows that belong to no pair."""
    rows = permute_rows(weights.reshape(-1), pairs.order, pairs.inverse.reshape(-1))
    return jnp.where(pairs.valid, rows[: pairs.num_rows], 0)
