"""The MLPs of the experts that a device has, on as many rows as there happen to be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.activations import Activation
from jax_grouped_gemm._src.arguments import canonical_offset
from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.expert_parallel.pairs import LocalPairs
from jax_grouped_gemm._src.fp8.formats import Pair
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp import api as mlp
from jax_grouped_gemm._src.mlp import composed
from jax_grouped_gemm._src.mlp.fp8 import experts as fp8_experts
from jax_grouped_gemm._src.mlp.operands import ExpertWeights, Groups, MlpOperands, Rows
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.rows.api import combine, gather_rows
from jax_grouped_gemm._src.rows.permutation import permute_rows


@dataclasses.dataclass(frozen=True)
class Experts:
    """The matrices of the local experts, and how their MLPs are computed.

    Attributes:
      weights: the matrices and biases.
      weights_on_input: whether a router weight multiplies the input instead of the result.
      activation, precision, implementation, recipe: see `moe.dropless_mlp`.
      max_sms: how many multiprocessors products fill at most beside which gradients of tokens may
        travel, None for all.
    """

    weights: ExpertWeights
    weights_on_input: bool
    activation: Activation
    precision: Any
    implementation: Any
    recipe: Recipe | None
    max_sms: int | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return self.weights.count

    @property
    def of_rows(self) -> Any:
        """The implementation of what moves rows."""
        return None if callable(self.implementation) else self.implementation

    @property
    def reads_every_row(self) -> bool:
        """Whether rows that no expert owns have to be numbers: scales of FP8 are found of all rows,
        and a product that is not ours may multiply them by zero."""
        return self.recipe is not None or callable(self.implementation)

    def takes_rows_of(self, recipe: Recipe) -> bool:
        """Whether products take tokens that are quantised by another recipe as they are."""
        own = self.recipe
        if own is None or self.weights_on_input or (own.forward, own.dgrad) != ("fp8", "fp8"):
            return False
        names = "scaling", "forward_dtype", "power_of_two_scales"
        return all(getattr(own, name) == getattr(recipe, name) for name in names)

    def on_tokens(
        self, x: jax.Array, pairs: LocalPairs, weights: jax.Array, quantized: Pair | None = None
    ) -> jax.Array:
        """Tokens [T, D] and weights [m] -> rows [m, D], of which `pairs.valid_rows` are valid.

        What is `quantized`, if anything, are the same tokens for products in FP8.
        """
        if callable(self.implementation) or self.weights_on_input:
            return self.on_rows(self.copy(x, pairs), pairs, weights)
        count = None if self.recipe is not None else pairs.valid_rows
        rows = Rows(x, pairs.token_of_row, pairs.inverse, count)
        return self._mlp(rows, pairs, weights, quantized)

    def on_rows(self, rows: jax.Array, pairs: LocalPairs, weights: jax.Array) -> jax.Array:
        """Rows [m, D], sorted by expert, and weights [m] -> rows [m, D]."""
        of_result: jax.Array | None = weights
        if self.weights_on_input:
            dtype = at_least_float32(rows.dtype)
            rows = (rows.astype(dtype) * weights.astype(dtype)[:, None]).astype(rows.dtype)
            of_result = None
        if not callable(self.implementation):
            return self._mlp(Rows(rows), pairs, of_result)
        ragged_dot = functools.partial(self.implementation, precision=self.precision)
        groups = Groups(pairs.group_sizes, None)
        operands = MlpOperands(Rows(rows), self.weights, of_result, groups)
        return composed.mlp(ragged_dot, self.activation, operands)

    def copy(self, x: jax.Array, pairs: LocalPairs) -> jax.Array:
        """Tokens [T, D] -> rows [m, D], sorted by expert."""
        options = dict(inverse=pairs.inverse, implementation=self.of_rows)
        return gather_rows(x, pairs.token_of_row, self._count(pairs), **options)

    def add_up(self, rows: jax.Array, pairs: LocalPairs) -> jax.Array:
        """Rows [m, D] -> the sum of each token's: [T, D]."""
        options = dict(count=self._count(pairs), implementation=self.of_rows)
        return combine(rows, pairs.inverse, order=pairs.pair_of_row, **options)

    def _count(self, pairs: LocalPairs) -> jax.Array | None:
        """Past which row nothing is moved. Rows that no expert owns are zero where they come back,
        so that they may be moved as well."""
        return None if self.reads_every_row else pairs.valid_rows

    def _mlp(
        self,
        rows: Rows,
        pairs: LocalPairs,
        weights: jax.Array | None,
        quantized: Pair | None = None,
    ) -> jax.Array:
        # What moves rows ends at the last valid one, and nothing but biases reads the others.
        options = Options.of(
            self.activation,
            self.precision,
            self.implementation,
            zeroes_unowned=self.reads_every_row or self.weights.has_biases,
            max_sms=self.max_sms,
        )
        if weights is not None:
            weights = weights.astype(at_least_float32(rows.x.dtype))
        groups = Groups(pairs.group_sizes, canonical_offset(None))
        operands = MlpOperands(rows, self.weights, weights, groups)
        if self.recipe is None:
            return mlp.of_operands(options, operands)
        return fp8_experts.mlp(
            "expert_parallel_mlp",
            options,
            operands,
            self.recipe,
            None,
            self.precision,
            tokens=quantized,
        )


def weights_of_rows(weights: jax.Array, pairs: LocalPairs) -> jax.Array:
    """Router weights [T, k] -> [m], zero for rows that belong to no pair."""
    rows = permute_rows(weights.reshape(-1), pairs.order, pairs.inverse.reshape(-1))
    return jnp.where(pairs.valid, rows[: pairs.num_rows], 0)
