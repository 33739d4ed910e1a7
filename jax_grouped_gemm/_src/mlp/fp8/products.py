"""The products of an MLP in FP8, and the quantised operands of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped_gemm._src.fp8.choice import Choice
from jax_grouped_gemm._src.fp8.formats import Scaled, ScaledView
from jax_grouped_gemm._src.fp8.products import Fp8Products, in_16_bits
from jax_grouped_gemm._src.fp8.quantize import primitive, reference
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenGradients, HiddenLayer, JoinedGradients
from jax_grouped_gemm._src.mlp.fp8.hidden.primitive import hidden_gradients, ragged_hidden_gradients
from jax_grouped_gemm._src.mlp.operands import MlpOperands, Rows
from jax_grouped_gemm._src.plan import Product
from jax_grouped_gemm._src.ragged.reference import owned_rows, owned_window


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """The dtypes of the given matrices, of gate and up, and of the result."""

    wi_0: np.dtype | None
    wi_1: np.dtype | None
    wo: np.dtype | None
    projections: np.dtype
    out: np.dtype


@dataclasses.dataclass(frozen=True)
class Layer(Fp8Products):
    """The static part of one layer.

    Attributes:
      hidden_layer: the elementwise step.
      dtypes: dtypes of the arrays.
      num_experts: number of matrices of each kind.
      combines: whether rows are summed up to tokens in the end.
      alone: the choice of bf16 for a forward pass without a backward pass, or None.
      trained: the choice of bf16 for a forward pass with a backward pass, or None.
    """

    hidden_layer: HiddenLayer
    dtypes: Dtypes
    num_experts: int
    combines: bool
    alone: Choice | None = None
    trained: Choice | None = None

    def owned_rows(self, given: MlpOperands, num_rows: int) -> jax.Array:
        """Whether the experts here own each row: booleans [num_rows]."""
        return owned_rows(*given.groups.indices, self.num_experts, num_rows)

    def quantize_operand(self, x: jax.Array, given: MlpOperands, dtype: DTypeLike) -> Scaled:
        """Quantises tokens, or rows, as an operand of a product of rows."""
        return self.quantize_rows(x, given.groups.sizes, dtype, plain=True)[0]

    def quantize_on_rows(self, given: MlpOperands, dtype: DTypeLike) -> Scaled:
        """Quantises the rows of tokens as an operand of a product of rows."""
        x, rows = given.rows.x, given.rows.rows
        assert rows is not None
        return Scaled(*primitive.quantize_tokens(x, rows, **self._quantize_params(dtype)))

    def tokens_by_experts(
        self,
        which: Product,
        tokens: Scaled,
        given: MlpOperands,
        weights: Scaled,
        dtype: np.dtype,
        *,
        copied: bool,
    ) -> jax.Array:
        """Multiplies quantised tokens, or rows if they are no copies, by matrices of experts."""
        indices, rows = given.groups.indices, given.rows.rows
        if not copied:
            return self.rows_by_weights(which, tokens, weights, *indices, dtype)
        assert rows is not None
        return self.tokens_by_weights(
            which,
            tokens,
            rows,
            functools.partial(self.copied, tokens, given.rows),
            weights,
            *indices,
            dtype,
        )

    def copied(self, tokens: Scaled, rows: Rows) -> Scaled:
        """Copies quantised tokens to the rows of their experts."""
        return Scaled(*(token_rows.copies(rows.of(x)) for x in tokens))

    def tokens_for_wgrad(
        self, x: jax.Array, given: MlpOperands, dtype: DTypeLike, *, copied: bool
    ) -> Any:
        """Returns tokens, or rows if they are no copies, as an operand of `weights_gradients`.

        In FP8 each column has one scale. Then only the scales of the other operand's blocks change
        along the rows, which makes the product a fifth faster.
        """
        rows = given.rows.rows if copied else None
        if self.recipe.wgrad == "bf16":
            return token_rows.on_rows(given.rows.of(in_16_bits(x))) if copied else in_16_bits(x)
        sizes, offset = given.groups.indices
        if rows is not None:
            # Begin at -1: XLA would turn the constant [0, n] into an iota times n, and compute it.
            window = jnp.array([-1, x.shape[0]])
        else:
            # Rows of no local expert do not count for the scales.
            window = jnp.stack(owned_window(sizes, offset, self.num_experts, x.shape[0]))
            rows = jnp.arange(x.shape[0])
        maxima = primitive.column_maxima(
            x, window.astype(jnp.int32), implementation=self.implementation
        )
        params = self._quantize_params(dtype)
        scale = reference.column_scales(
            maxima, dtype=params["dtype"], power_of_two=params["power_of_two"]
        )
        values = primitive.quantize_gathered(x, rows.astype(jnp.int32), scale, sizes, **params)
        return Scaled(values, scale[None])

    def rows_for_wgrad(
        self, x: jax.Array | Scaled | ScaledView, given: MlpOperands, dtype: DTypeLike
    ) -> Any:
        """Returns rows as an operand of `weights_gradients`, unchanged if they are in FP8."""
        if isinstance(x, Scaled | ScaledView):
            return x
        if self.recipe.wgrad == "bf16":
            return in_16_bits(x)
        sizes = given.groups.sizes
        return self.quantize_rows(x, sizes, dtype, plain=False, transposed=True)[1]

    def hidden_gradients(
        self,
        projections: jax.Array,
        dh: jax.Array,
        weights: jax.Array,
        given: MlpOperands,
        *,
        joined: bool,
    ) -> HiddenGradients | JoinedGradients:
        """Returns the elementwise step's gradients, as operands of the gradients of weights; in one
        array if they may be `joined`."""
        operands = self.hidden_layer, projections, dh, weights
        if self.recipe.wgrad == "fp8" and not given.experts.has_biases:
            return ragged_hidden_gradients(
                *operands, given.groups.sizes, self.implementation, joined=joined
            )
        # The gradients of biases are sums of unquantised numbers.
        return hidden_gradients(*operands, self.implementation)

    def weights_gradients(
        self, lhs: Any, rhs: Sequence[Any], dtypes: Sequence[Any], given: MlpOperands, num_rows: int
    ) -> list[jax.Array]:
        """Returns lhs^T times each rhs, for each expert, in the dtype of this rhs."""
        indices = given.groups.indices
        sizes: dict[str, Any] = dict(num_rows=num_rows, num_groups=self.num_experts)
        are_scaled = all(isinstance(x, Scaled) for x in (lhs, *rhs))
        if len(rhs) == 2 and len(set(dtypes)) == 1 and are_scaled:
            return self.rows_by_each(lhs, rhs, *indices, dtypes[0], **sizes)
        return [
            self.rows_by_rows(lhs, x, *indices, dtype, **sizes)
            for x, dtype in zip(rhs, dtypes, strict=True)
        ]
