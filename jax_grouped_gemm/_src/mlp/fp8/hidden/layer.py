"""The elementwise steps of an MLP in FP8, which quantise their results for the next product.

Projections [m, P] are rows times `QuantizedMlp.wi`: without `wi_1` gate [m, F], else gate and up,
both with zeros up to the next multiple of 128 columns. As without FP8, hidden and gradients are
computed in float32 from rounded projections, and rounded to the dtype of projections. The rounded
values are quantised, so that products in FP8 and in 16 bits see the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped_gemm._src.activations import Activation
from jax_grouped_gemm._src.arrays import pad_to, round_up
from jax_grouped_gemm._src.fp8.formats import BLOCK, Scaled, ScaledView
from jax_grouped_gemm._src.fp8.quantize import reference
from jax_grouped_gemm._src.fp8.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class HiddenLayer:
    """hidden = weights * activation(gate) * up, and how it is quantised.

    Attributes:
      activation: the activation of the hidden layer.
      columns: F.
      has_up: whether there is an up projection.
      recipe: formats of the quantised results.
    """

    activation: Activation
    columns: int
    has_up: bool
    recipe: Recipe

    def split(self, projections: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns gate and up, [m, F] each."""
        gate = projections[:, : self.columns]
        if not self.has_up:
            return gate, None
        first = padded_columns(self.columns)
        return gate, projections[:, first : first + self.columns]

    def join(self, gate: jax.Array, up: jax.Array | None) -> jax.Array:
        """Computes the inverse of `split`."""
        if up is None:
            return gate
        padded = [pad_to(x, (x.shape[0], padded_columns(self.columns))) for x in (gate, up)]
        return jnp.concatenate(padded, axis=1)

    def hidden(self, projections: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns hidden [m, F] in the dtype of the projections."""
        hidden = self._of(weights, *self._wide(projections))
        return hidden.astype(projections.dtype)

    def quantized(self, projections: jax.Array, weights: jax.Array) -> Scaled:
        """Returns hidden, quantised as the operand of the product with wo."""
        return self._quantize(self.hidden(projections, weights), self.recipe.forward_dtype)

    def gradients(
        self, projections: jax.Array, dh: jax.Array, weights: jax.Array
    ) -> HiddenGradients:
        """Returns the gradients that follow from the gradient `dh` [m, F] of hidden."""
        dtype = projections.dtype
        hidden, vjp = jax.vjp(self._of, weights, *self._wide(projections))
        dweights, dgate, dup = vjp(dh.astype(jnp.float32))
        dgate, dup = dgate.astype(dtype), None if dup is None else dup.astype(dtype)
        rows = self._quantize(self.join(dgate, dup), self.recipe.gradient_dtype)
        return HiddenGradients(rows, dgate, dup, hidden.astype(dtype), dweights)

    def _wide(self, projections):
        gate, up = self.split(projections)
        return gate.astype(jnp.float32), None if up is None else up.astype(jnp.float32)

    def _of(self, weights, gate, up):
        return self.activation(gate, up) * weights[:, None]

    def _quantize(self, x: jax.Array, dtype: DTypeLike) -> Scaled:
        power_of_two = self.recipe.power_of_two_scales
        return Scaled(*reference.quantize_rows(x, dtype=np.dtype(dtype), power_of_two=power_of_two))


class HiddenGradients(NamedTuple):
    """The gradients that follow from the gradient of hidden, and hidden itself."""

    projections: Scaled | None  # gradients of gate and up in projections' layout, quantised
    gate: jax.Array | Scaled  # [m, F], or quantised in transposed blocks
    up: jax.Array | Scaled | None
    hidden: jax.Array | Scaled  # [m, F], computed again, or quantised in transposed blocks
    weights: jax.Array  # float32 [m]

    def without_projections(self) -> HiddenGradients:
        """Returns these without `projections`, for use after the last product that reads them."""
        return self._replace(projections=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedGradients:
    """`HiddenGradients` with the gradients of gate and up, by rows and transposed, in one array.

    XLA places only one array at a time in the memory of a later result, so the values are one
    array. It can use the memory of the gradient of wo, if the gradient of wo is computed last.

    Attributes:
      values: a flat array with the values of `projections`, `gate` and `up`.
      projections_scales, gate_scales, up_scales: the scales of these values.
        `projections_scales` is None after its last use.
      hidden, weights: as in `HiddenGradients`.
    """

    values: jax.Array
    projections_scales: jax.Array | None
    gate_scales: jax.Array
    up_scales: jax.Array
    hidden: Scaled
    weights: jax.Array

    @property
    def projections(self) -> ScaledView:
        """The gradients [m, 2 F], in the layout of projections."""
        assert self.projections_scales is not None
        rows, blocks = self.projections_scales.shape
        return ScaledView(self.values, self.projections_scales, (0, rows, blocks * BLOCK))

    @property
    def gate(self) -> ScaledView:
        """The gradient of gate, quantised in transposed blocks."""
        return self._transposed(self.gate_scales, 2)

    @property
    def up(self) -> ScaledView:
        """The gradient of up, quantised in transposed blocks."""
        return self._transposed(self.up_scales, 1)

    def _transposed(self, scales: jax.Array, places: int) -> ScaledView:
        """Returns the view that begins `places` times its size before the end of `values`."""
        size = scales.size * BLOCK
        return ScaledView(
            self.values, scales, (self.values.size - places * size, *scales.shape, BLOCK)
        )

    def without_projections(self) -> JoinedGradients:
        """Returns these without `projections_scales`, after the last product that reads them."""
        return dataclasses.replace(self, projections_scales=None)


def padded_columns(hidden: int) -> int:
    """Returns how many columns gate and the zeros after it have. Up begins at this column."""
    return round_up(hidden, BLOCK)
