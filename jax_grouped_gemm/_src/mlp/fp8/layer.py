"""The MLP of experts in FP8, with a derivative of its own.

Tokens are quantised before they are copied to the rows of their experts, so that half the bytes are
copied, and scales with them, or none where the product reads tokens in place; the same holds for
the gradient of what is combined to tokens. Few tokens are quantised on their rows by one kernel.
Gate and up are one product forward and one backward. No
operand of a product in FP8 is read from an array of more bits: the elementwise steps between
products quantise what they compute.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.arrays import (
    align_varying,
    at_least_float32,
    is_static,
    vary_over,
    varying_axes,
)
from jax_grouped_gemm._src.autodiff import once_differentiable
from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.fp8 import primitive, reference
from jax_grouped_gemm._src.fp8.formats import Pair, SlicedPair
from jax_grouped_gemm._src.fp8.plan import PAIRED_COLUMNS, quantises_on_rows
from jax_grouped_gemm._src.fp8.products import FP8_LHS, FP8_RHS, Fp8Products, named, narrow
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.biases import bias_rows
from jax_grouped_gemm._src.mlp.composed import GATE, UP
from jax_grouped_gemm._src.mlp.fp8.hidden import (
    HiddenGradients,
    HiddenLayer,
    JoinedGradients,
)
from jax_grouped_gemm._src.mlp.fp8.hidden_op import (
    hidden_gradients,
    quantized_hidden,
    ragged_hidden_gradients,
)
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp, quantize_experts
from jax_grouped_gemm._src.mlp.reference import row_weights
from jax_grouped_gemm._src.plan import Product, current_tiles
from jax_grouped_gemm._src.ragged.reference import owned_rows, owned_window

Operands = Mapping[str, Any]

_NAME = "an MLP with a recipe"


@dataclasses.dataclass(frozen=True)
class _Layer(Fp8Products):
    """The static part of one layer.

    Attributes:
      hidden_layer: the elementwise step.
      dtypes: those of x, wi_0, wi_1, wo and of the result, by name; "projections" is that of gate
        and up.
      num_experts: matrices of each kind.
      combines: whether rows are summed up to tokens in the end.
    """

    hidden_layer: HiddenLayer
    dtypes: tuple[tuple[str, np.dtype], ...]
    num_experts: int
    combines: bool

    def dtype(self, name: str) -> np.dtype:
        return dict(self.dtypes)[name]

    def owned_rows(self, given: Operands, num_rows: int) -> jax.Array:
        """Which rows the experts here own: booleans [num_rows]."""
        indices = given["group_sizes"], given["group_offset"]
        return owned_rows(*indices, self.num_experts, num_rows)

    def quantize_operand(
        self, x: jax.Array, given: Operands, dtype: DTypeLike, *, copied: bool
    ) -> Pair:
        """Tokens, or rows where they are not `copied`, as an operand of a product of rows."""

        def owned():
            owned = self.owned_rows(given, given["rows"].shape[0] if copied else x.shape[0])
            if not copied:
                return owned
            tokens = jnp.where(owned, given["rows"], x.shape[0])
            of_tokens = vary_over(jnp.zeros(x.shape[:1], bool), varying_axes(tokens))
            return of_tokens.at[tokens].set(True, mode="drop", wrap_negative_indices=False)

        x = self.counted(x, owned)
        return self.quantize_rows(x, given["group_sizes"], dtype, plain=True)[0]

    def quantize_on_rows(self, x: jax.Array, given: Operands, dtype: DTypeLike) -> Pair:
        """The rows of tokens as an operand of a product of rows."""
        if self.recipe.scaling != "blockwise":
            return self.quantize_operand(token_rows.on_rows(x, given), given, dtype, copied=False)
        rows = token_rows.as_int32(given["rows"], x.shape[0])
        return Pair(*primitive.quantize_tokens(x, rows, **self._quantize_params(dtype)))

    def tokens_by_experts(
        self,
        which: Product,
        tokens: Pair,
        given: Operands,
        weights: Pair,
        dtype: np.dtype,
        *,
        copied: bool,
    ) -> jax.Array:
        """Quantised tokens, or rows where they are not `copied`, times matrices of experts."""
        indices = given["group_sizes"], given["group_offset"]
        if not copied:
            return self.rows_by_weights(which, tokens, weights, *indices, dtype)
        return self.tokens_by_weights(
            which,
            tokens,
            token_rows.as_int32(given["rows"], tokens.values.shape[0]),
            functools.partial(self.copied, tokens, given),
            weights,
            *indices,
            dtype,
        )

    def copied(self, tokens: Pair, given: Operands) -> Pair:
        """Quantised tokens on the rows of their experts."""
        copy = functools.partial(
            token_rows.copies, rows=given["rows"], inverse=given.get("inverse")
        )
        # The one scale of all tokens is that of all rows.
        has_scales = self.recipe.scaling != "tensorwise"
        return Pair(copy(tokens.values), copy(tokens.scales) if has_scales else tokens.scales)

    def tokens_for_wgrad(
        self, x: jax.Array, given: Operands, dtype: DTypeLike, *, copied: bool
    ) -> Any:
        """Tokens, or rows where they are not `copied`, as an operand of `weights_gradient`.

        In FP8 they have a scale a column: the other operand's, of blocks, are then the only ones
        that change along the rows, which makes the product a fifth faster.
        """
        copied = copied and "rows" in given
        if self.recipe.wgrad == "bf16":
            x = narrow(x)
            return token_rows.gather(x, given["rows"], given.get("inverse")) if copied else x
        sizes, offset = given["group_sizes"], given["group_offset"]
        if copied:
            # From -1, since XLA takes [0, n] for multiples of an iota and computes them.
            rows, window = given["rows"], jnp.array([-1, x.shape[0]])
        else:
            # Rows of no local expert have no say in the scales.
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
        return Pair(values, scale[None])

    def rows_for_wgrad(
        self, x: jax.Array | Pair | SlicedPair, given: Operands, dtype: DTypeLike
    ) -> Any:
        """Rows, if they are no such operand yet."""
        if isinstance(x, Pair | SlicedPair):
            return x
        if self.recipe.wgrad == "bf16":
            return narrow(x)
        sizes = given["group_sizes"]
        return self.quantize_rows(x, sizes, dtype, plain=False, transposed=True)[1]

    def hidden_gradients(
        self,
        projections: jax.Array,
        dh: jax.Array,
        weights: jax.Array,
        given: Operands,
        *,
        joined: bool,
    ) -> HiddenGradients | JoinedGradients:
        """The elementwise step backward, in the form that the gradients of weights are of; in one
        array, if they may be `joined`."""
        operands = self.hidden_layer, projections, dh, weights
        if self.recipe.wgrad == "fp8" and not given.keys() & {"b0", "b1"}:
            return ragged_hidden_gradients(
                *operands, given["group_sizes"], self.implementation, joined=joined
            )
        # Those of biases are sums of numbers that are not quantised.
        return hidden_gradients(*operands, self.implementation)

    def weights_gradients(
        self, lhs: Any, rhs: Mapping[str, Any], given: Operands, num_rows: int
    ) -> dict[str, jax.Array]:
        """lhs^T times each rhs, of each expert, in the dtype of the matrices of its name."""
        indices = given["group_sizes"], given["group_offset"]
        sizes: dict[str, Any] = dict(num_rows=num_rows, num_groups=self.num_experts)
        dtypes = {self.dtype(name) for name in rhs}
        is_pair = all(isinstance(x, Pair) for x in (lhs, *rhs.values()))
        if len(rhs) == 2 and len(dtypes) == 1 and is_pair:
            both = self.rows_by_each(lhs, [*rhs.values()], *indices, dtypes.pop(), **sizes)
            return dict(zip(rhs, both, strict=True))
        return {
            name: self.rows_by_rows(lhs, x, *indices, self.dtype(name), **sizes)
            for name, x in rhs.items()
        }


def mlp(
    recipe: Recipe,
    activation: Any,
    operands: Operands,
    quantized: QuantizedMlp | None,
    implementation: Implementation,
    *,
    combines: bool = False,
) -> jax.Array:
    """The MLP of checked operands: [m, D], or [T, D] where it `combines`; without wo [m, F].

    Args:
      recipe: with forward and dgrad in FP8.
      activation: an `Activation`.
      operands: x, rows, inverse, wi_0, wi_1, wo, b0, b1, bo, weights, group_sizes, group_offset, as
        of `mlp.api`; all but x, wi_0 and the last two may be missing. `tokens` is x as the recipe
        quantises it, if it is quantised already.
      quantized: the matrices, if they are quantised already.
      implementation: of the kernels.
      combines: whether the rows of each token, which `inverse` knows, are summed up.
    """
    leaves, tree = jax.tree.flatten((dict(operands), quantized))
    # Outside the custom derivative, where the casts have transposes.
    operands, quantized = jax.tree.unflatten(tree, align_varying(*leaves))
    operands = dict(operands)
    bo, tokens = operands.pop("bo", None), operands.pop("tokens", None)
    projections = jnp.result_type(*(operands[n] for n in ("x", "wi_0", "wi_1") if n in operands))
    out = jnp.result_type(projections, operands["wo"]) if "wo" in operands else projections
    dtypes: dict[str, Any] = {
        n: operands[n].dtype for n in ("x", "wi_0", "wi_1", "wo") if n in operands
    }
    dtypes |= dict(projections=projections, out=out if bo is None else at_least_float32(out))
    layer = _Layer(
        recipe,
        implementation,
        current_tiles(),
        HiddenLayer(activation, operands["wi_0"].shape[2], "wi_1" in operands, recipe),
        tuple(dtypes.items()),
        operands["wi_0"].shape[0],
        combines and bo is None,
    )
    y = _mlp(layer, operands, quantized, tokens)
    if bo is None:
        return y
    indices = operands["group_sizes"], operands["group_offset"]
    added = bias_rows(bo.astype(y.dtype), indices[0], indices[1][0], y.shape[0])
    if "weights" in operands:
        added *= _weights_of_rows(layer, operands, y)[:, None]
    y = (y + added).astype(out)
    return _combined(y, operands, operands["x"].shape[0]) if combines else y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    layer: _Layer, operands: Operands, quantized: QuantizedMlp | None, tokens: Pair | None
) -> jax.Array:
    return _forward(layer, operands, quantized, tokens, for_gradient=False)[0]


def _forward(layer, given, quantized, tokens, *, for_gradient):
    """The result; projections; and the matrices for the gradients of rows."""
    indices = given["group_sizes"], given["group_offset"]
    x, copied = given["x"], "rows" in given
    if tokens is None:
        if copied and quantises_on_rows(
            given["rows"].shape[0], x.shape[1], given["group_sizes"].shape[0]
        ):
            tokens, copied = layer.quantize_on_rows(x, given, layer.recipe.forward_dtype), False
        else:
            tokens = layer.quantize_operand(x, given, layer.recipe.forward_dtype, copied=copied)
    wi, wo = _matrices(layer, given, quantized, for_gradient)
    if for_gradient:
        tokens, wi, wo = (
            named(tokens, FP8_LHS),
            named(wi, FP8_RHS),
            named(wo, FP8_RHS),
        )
    dtype = layer.dtype("projections")
    has_biases = "b0" in given or "b1" in given
    projections = layer.tokens_by_experts(
        "forward",
        tokens,
        given,
        wi[1],
        at_least_float32(dtype) if has_biases else dtype,
        copied=copied,
    )
    if has_biases:
        projections = _with_biases(layer, projections, given).astype(dtype)
    if for_gradient:
        # Both in one array, so that a policy with either name keeps it.
        projections = checkpoint_name(checkpoint_name(projections, GATE), UP)
    weights = _weights_of_rows(layer, given, projections)
    if wo is None:
        y = layer.hidden_layer.hidden(projections, weights)
    else:
        hidden = quantized_hidden(layer.hidden_layer, projections, weights, layer.implementation)
        y = layer.rows_by_weights("forward", hidden, wo[1], *indices, layer.dtype("out"))
    if layer.combines:
        y = _combined(y, given, given["x"].shape[0])
    return y, projections, (wi[0], None if wo is None else wo[0])


def _mlp_forward(layer, operands, quantized, tokens):
    operands = once_differentiable(_NAME, operands)
    y, projections, matrices = _forward(layer, operands, quantized, tokens, for_gradient=True)
    kept = {name: x for name, x in operands.items() if name not in ("wi_0", "wi_1", "wo")}
    return y, (kept, projections, matrices)


def _mlp_backward(layer, kept, dy):
    kept, dy = once_differentiable(_NAME, (kept, dy))
    given, projections, (wi, wo) = kept
    indices = given["group_sizes"], given["group_offset"]
    forward_dtype, gradient_dtype = layer.recipe.forward_dtype, layer.recipe.gradient_dtype
    cotangents: dict[str, jax.Array | None] = {}
    if wo is None:
        dh = dy
    else:
        copied = layer.combines
        tokens = layer.quantize_operand(dy, given, gradient_dtype, copied=copied)
        dh = layer.tokens_by_experts(
            "dgrad", tokens, given, wo, layer.dtype("projections"), copied=copied
        )
    weights = _weights_of_rows(layer, given, projections)
    # Of the gradients of projections, [m, 2 F], and their product, [m, D] of 16 bits, the wider one
    # is there for the shorter time.
    hidden_columns = layer.hidden_layer.columns
    x_first = hidden_columns >= given["x"].shape[1]
    # One launch for the gradients of gate and up, which narrow ones have, reads them as two arrays.
    joined = x_first and wo is not None and is_static(hidden_columns)
    joined = joined and hidden_columns > PAIRED_COLUMNS
    gradients = layer.hidden_gradients(projections, dh, weights, given, joined=joined)
    num_rows = projections.shape[0]
    if "weights" in given:
        dweights = gradients.weights
        if wo is None:  # then dh is what a caller has, in rows that nobody owns too
            dweights = jnp.where(layer.owned_rows(given, num_rows), dweights, 0)
        cotangents["weights"] = dweights.astype(given["weights"].dtype)

    def rows_gradient(projections):
        dx = layer.rows_by_weights("dgrad", projections, wi, *indices, layer.dtype("x"))
        return _combined(dx, given, given["x"].shape[0]) if "rows" in given else dx

    def wo_gradient(dy, gradients):
        if wo is None:
            return {}
        dy_rows = layer.tokens_for_wgrad(dy, given, gradient_dtype, copied=layer.combines)
        hidden = layer.rows_for_wgrad(gradients.hidden, given, forward_dtype)
        return layer.weights_gradients(hidden, {"wo": dy_rows}, given, num_rows)

    def wi_gradients(x, gradients):
        x_rows = layer.tokens_for_wgrad(x, given, forward_dtype, copied=True)
        of_matrices = {
            name: layer.rows_for_wgrad(gradient, given, gradient_dtype)
            for name, gradient in (("wi_0", gradients.gate), ("wi_1", gradients.up))
            if gradient is not None
        }
        return layer.weights_gradients(x_rows, of_matrices, given, num_rows)

    # One [m, D] array at a time: each is made when what reads the one before it is done.
    steps = [(wo_gradient, dy), (wi_gradients, given["x"])]
    if isinstance(gradients, JoinedGradients):
        # The joined array can be where the gradient of wo will be.
        steps.reverse()
    if x_first:
        cotangents["x"] = rows_gradient(gradients.projections)
        gradients = gradients.without_projections()
    for name, gradient in (("b0", gradients.gate), ("b1", gradients.up)):
        if name in given:
            cotangents[name] = _bias_gradient(layer, name, gradient, given)
    for i, (gradient_of, tokens) in enumerate(steps):
        if i > 0 or x_first:
            tokens, gradients, cotangents = barrier((tokens, gradients, cotangents))
        cotangents |= gradient_of(tokens, gradients)
    if not x_first:
        rows, cotangents = barrier((gradients.projections, cotangents))
        cotangents["x"] = rows_gradient(rows)
    names = (*given, *(n for n in ("wi_0", "wi_1", "wo") if n in dict(layer.dtypes)))
    return {name: cotangents.get(name) for name in names}, None, None


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _matrices(layer, given, quantized, for_gradient):
    """(plain, transposed) pairs of gate and up, and of down."""
    wo = given.get("wo")
    if quantized is not None:
        pairs = ((Pair(*w[:2]), Pair(*w[2:])) for w in quantized)
        wi, down = pairs
        return wi, None if wo is None else down
    forms = dict(plain=for_gradient, transposed=True)
    return quantize_experts(layer, given["wi_0"], given.get("wi_1"), wo, **forms)


def _weights_of_rows(layer, given, projections):
    """Ones by default, and zero in rows that nobody owns, if those matter.

    No product takes such a row. But without wo they are a result, one scale of all rows is theirs
    too, and biases have gradients that are no products.
    """
    num_rows = projections.shape[0]
    matter = "wo" not in dict(layer.dtypes) or layer.recipe.scaling == "tensorwise"
    matter = matter or bool(given.keys() & {"b0", "b1"})
    owned = layer.owned_rows(given, num_rows) if matter else jnp.ones(num_rows, bool)
    return row_weights(given.get("weights"), owned, projections)


def _with_biases(layer, projections, given):
    halves = layer.hidden_layer.split(projections)
    sums = [
        x + _bias_rows(given[name].astype(x.dtype), given, x.shape[0]) if name in given else x
        for name, x in zip(("b0", "b1"), halves, strict=True)
    ]
    return layer.hidden_layer.join(*sums)


def _bias_rows(bias, given, num_rows):
    return bias_rows(bias, given["group_sizes"], given["group_offset"][0], num_rows)


def _bias_gradient(layer, name, gradient, given):
    wide = at_least_float32(gradient.dtype)
    bias = given[name]
    _, vjp = jax.vjp(lambda bias: _bias_rows(bias, given, gradient.shape[0]), bias.astype(wide))
    return vjp(gradient.astype(wide))[0].astype(bias.dtype)


def _combined(y, given, num_tokens):
    return token_rows.combine(y, given["rows"], given.get("inverse"), num_tokens=num_tokens)
