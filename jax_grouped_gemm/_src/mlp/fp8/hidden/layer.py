"""The elementwise steps of an MLP in FP8: what the products leave, quantised for the next one.

Projections [m, P] are gate [m, F], with `wi_1` zeros up to the next multiple of 128 columns, and up
after them, as the product with `QuantizedMlp.wi` leaves them. As without FP8, hidden and gradients
are computed in float32 from projections as they are rounded, and rounded to their dtype; that is
what is quantised, so that products in FP8 and in 16 bits see the same numbers.
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
      activation: of the hidden layer.
      columns: F.
      has_up: whether there is an up projection.
      recipe: formats of the quantised results.
    """

    activation: Activation
    columns: int
    has_up: bool
    recipe: Recipe

    def split(self, projections: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Gate and up, [m, F] each."""
        gate = projections[:, : self.columns]
        if not self.has_up:
            return gate, None
        first = padded_columns(self.columns)
        return gate, projections[:, first : first + self.columns]

    def join(self, gate: jax.Array, up: jax.Array | None) -> jax.Array:
        """The inverse of `split`."""
        if up is None:
            return gate
        padded = [pad_to(x, (x.shape[0], padded_columns(self.columns))) for x in (gate, up)]
        return jnp.concatenate(padded, axis=1)

    def hidden(self, projections: jax.Array, weights: jax.Array) -> jax.Array:
        """[m, F] in the dtype of the projections."""
        hidden = self._of(weights, *self._wide(projections))
        return hidden.astype(projections.dtype)

    def quantized(self, projections: jax.Array, weights: jax.Array) -> Scaled:
        """Hidden, as the operand of the product with wo."""
        return self._quantize(self.hidden(projections, weights), self.recipe.forward_dtype)

    def gradients(
        self, projections: jax.Array, dh: jax.Array, weights: jax.Array
    ) -> HiddenGradients:
        """From the gradient `dh` of hidden."""
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
    """The results of the backward pass from the gradient of hidden."""

    projections: Scaled | None  # the gradients of gate and up as projections lie, quantised
    gate: jax.Array | Scaled  # [m, F], or quantised in transposed blocks
    up: jax.Array | Scaled | None
    hidden: jax.Array | Scaled  # the same, computed again
    weights: jax.Array  # float32 [m]

    def without_projections(self) -> HiddenGradients:
        """The rest, when projections have been read."""
        return self._replace(projections=None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedGradients:
    """`HiddenGradients` with those of gate and up, in both forms, in one array.

    XLA has one array at a time in the memory of a result: this one can be in that of the gradient
    of wo, if that is computed last.

    Attributes:
      values: flat: the values of `projections`, `gate` and `up`.
      projections_scales, gate_scales, up_scales: theirs; None for what has been read.
      hidden, weights: as `HiddenGradients` has them.
    """

    values: jax.Array
    projections_scales: jax.Array | None
    gate_scales: jax.Array
    up_scales: jax.Array
    hidden: Scaled
    weights: jax.Array

    @property
    def projections(self) -> ScaledView:
        """[m, 2 F], as projections lie."""
        assert self.projections_scales is not None
        rows, blocks = self.projections_scales.shape
        return ScaledView(self.values, self.projections_scales, (0, rows, blocks * BLOCK))

    @property
    def gate(self) -> ScaledView:
        """Quantised in transposed blocks."""
        return self._transposed(self.gate_scales, 2)

    @property
    def up(self) -> ScaledView:
        """Quantised in transposed blocks too."""
        return self._transposed(self.up_scales, 1)

    def _transposed(self, scales: jax.Array, places: int) -> ScaledView:
        """The view that begins that many times its size before the end."""
        size = scales.size * BLOCK
        return ScaledView(
            self.values, scales, (self.values.size - places * size, *scales.shape, BLOCK)
        )

    def without_projections(self) -> JoinedGradients:
        """The rest, when projections have been read."""
        return dataclasses.replace(self, projections_scales=None)


def padded_columns(hidden: int) -> int:
    """The columns of gate, with those of zeros after which up begins."""
    return round_up(hidden, BLOCK)
