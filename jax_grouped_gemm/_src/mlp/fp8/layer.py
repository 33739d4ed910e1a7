"""The MLP of experts in FP8, with a custom derivative.

Tokens are quantised before they are copied to the rows of their experts, which halves the bytes to
copy. Where the product reads tokens in place, nothing is copied. The gradient of combined results
is also quantised before it is copied to rows. For few tokens, one kernel copies and quantises. Gate
and up are one product forward and one backward. Products read FP8 operands only, because the
elementwise steps between products quantise their results.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.activations import Activation
from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.arrays import align_varying, at_least_float32, is_static
from jax_grouped_gemm._src.autodiff import once_differentiable
from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.fp8.choice import Choice, bf16_choice
from jax_grouped_gemm._src.fp8.formats import Scaled
from jax_grouped_gemm._src.fp8.products import FP8_LHS, FP8_RHS, named
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.fp8.scaled.plan import PAIRED_FP8_COLUMNS, quantises_on_rows
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.biases import bias_rows
from jax_grouped_gemm._src.mlp.composed import GATE, UP
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer, JoinedGradients
from jax_grouped_gemm._src.mlp.fp8.hidden.primitive import quantized_hidden
from jax_grouped_gemm._src.mlp.fp8.products import Dtypes, Layer
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp, quantize_experts
from jax_grouped_gemm._src.mlp.layer import mlp as mlp_of_arrays
from jax_grouped_gemm._src.mlp.operands import Differentials, ExpertWeights, MlpOperands, Rows
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.mlp.reference import row_weights
from jax_grouped_gemm._src.note.primitive import noted
from jax_grouped_gemm._src.partition import groups_split_like
from jax_grouped_gemm._src.tile_choices import current_tiles

_NAME = "an MLP with a recipe"


def mlp(
    recipe: Recipe,
    activation: Activation,
    implementation: Implementation,
    operands: MlpOperands,
    quantized: QuantizedMlp | None,
    *,
    combines: bool,
    has_values: bool,
) -> jax.Array:
    """Computes the MLP of checked operands: [m, D], [T, D] if it `combines`, [m, F] without wo.

    Args:
      recipe: a recipe with forward and dgrad in FP8.
      activation: activation of the hidden layer.
      implementation: implementation of the kernels.
      operands: operands with gate and up in two matrices.
      quantized: the matrices, if they are quantised already.
      combines: whether the rows of each token, which `inverse` has, are summed up.
      has_values: whether matrices of operands have values, even if `quantized` has them too.
    """
    has_quantized = quantized is not None
    leaves, tree = jax.tree.flatten((operands, quantized))
    # Cast outside the custom derivative, so that JAX transposes the casts.
    operands, quantized = jax.tree.unflatten(tree, align_varying(*leaves))
    layer = layer_of(
        recipe,
        activation,
        implementation,
        operands,
        combines=combines,
        has_values=has_values,
        has_quantized=has_quantized,
    )
    bo, operands = operands.experts.bo, operands.with_experts(bo=None)
    y = fp8_mlp(layer, operands, quantized)
    if bo is None:
        return y
    added = _bias_rows(bo.astype(y.dtype), operands, y.shape[0])
    if operands.weights is not None:
        added *= _weights_of_rows(layer, operands, y)[:, None]
    y = (y + added).astype(operands.dtype)
    return token_rows.combine(y, operands.rows) if combines else y


def layer_of(
    recipe: Recipe,
    activation: Activation,
    implementation: Implementation,
    operands: MlpOperands,
    *,
    combines: bool,
    has_values: bool,
    has_quantized: bool,
) -> Layer:
    """Returns the static part of the layer that `mlp` computes, from shapes alone."""
    alone, trained = (
        _choice(recipe, implementation, operands, training, has_quantized)
        if has_values and (has_quantized or not training)
        else None
        for training in (False, True)
    )
    experts, out = operands.experts, operands.dtype
    gate, up, down = (
        None if w is None else w.dtype for w in (experts.wi_0, experts.wi_1, experts.wo)
    )
    projections = np.dtype(jnp.result_type(operands.rows.x, *experts.projections))
    is_last = experts.bo is None  # whether nothing is added to the products of hidden
    dtypes = Dtypes(gate, up, down, projections, out if is_last else at_least_float32(out))
    return Layer(
        recipe,
        implementation,
        current_tiles(),
        HiddenLayer(activation, experts.hidden_columns, experts.has_up, recipe),
        dtypes,
        experts.count,
        combines and is_last,
        alone,
        trained,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_mlp(layer: Layer, operands: MlpOperands, quantized: QuantizedMlp | None) -> jax.Array:
    """Computes the MLP of operands without `bo`, in the dtype `layer.dtypes.out`."""
    if layer.alone:
        return _in_bf16(layer, layer.alone, operands)
    return _forward(layer, operands, quantized, for_gradient=False)[0]


def _choice(
    recipe: Recipe, implementation: Implementation, operands: MlpOperands, *how: bool
) -> Choice | None:
    """Returns the choice of bf16 if that is predicted to be faster; `how` is as in `Choice`."""
    rows, experts = operands.rows, operands.experts
    sizes = rows.num_rows, operands.groups.sizes.shape[0]
    of = experts.layer(rows.x, *sizes, are_copies=rows.rows is not None)
    dtypes = [rows.x.dtype, *(x.dtype for x in experts.matrices)]
    return bf16_choice(Choice(of, recipe, *how), dtypes, implementation)


def _in_bf16(layer: Layer, choice: Choice, given: MlpOperands) -> jax.Array:
    """Computes the layer without a recipe."""
    groups = dataclasses.replace(given.groups, sizes=noted(given.groups.sizes, choice))
    given = dataclasses.replace(given, groups=groups)
    options = Options.of(layer.hidden_layer.activation, None, layer.implementation)
    y = mlp_of_arrays(options, given)
    return (token_rows.combine(y, given.rows) if layer.combines else y).astype(layer.dtypes.out)


def _forward(layer: Layer, given: MlpOperands, quantized, *, for_gradient):
    """Returns the result, the projections, and the matrices for the gradients of rows."""
    indices, num_groups = given.groups.indices, given.groups.sizes.shape[0]
    x, copied = given.rows.x, given.rows.rows is not None
    if copied and quantises_on_rows(given.num_rows, x.shape[1], num_groups):
        tokens, copied = layer.quantize_on_rows(given, layer.recipe.forward_dtype), False
    else:
        tokens = layer.quantize_operand(x, given, layer.recipe.forward_dtype)
    wi, wo = _matrices(layer, given, quantized, for_gradient)
    if for_gradient:
        tokens, wi, wo = (
            named(tokens, FP8_LHS),
            named(wi, FP8_RHS),
            named(wo, FP8_RHS),
        )
    dtype, has_biases = layer.dtypes.projections, given.experts.has_biases
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
        # Gate and up share one array, which a policy with either name keeps.
        projections = checkpoint_name(checkpoint_name(projections, GATE), UP)
    weights = _weights_of_rows(layer, given, projections)
    if wo is None:
        y = layer.hidden_layer.hidden(projections, weights)
    else:
        hidden = quantized_hidden(
            layer.hidden_layer, projections, weights, layer.implementation, given.rows.count
        )
        y = layer.rows_by_weights("forward", hidden, wo[1], *indices, layer.dtypes.out)
    if layer.combines:
        y = token_rows.combine_for_sources(y, given.rows)
    return y, projections, (wi[0], None if wo is None else wo[0])


def _mlp_forward(layer, operands, quantized):
    operands = once_differentiable(_NAME, operands)
    if layer.trained:
        return jax.vjp(functools.partial(_in_bf16, layer, layer.trained), operands)
    y, projections, matrices = _forward(layer, operands, quantized, for_gradient=True)
    kept = operands.with_experts(wi_0=None, wi_1=None, wo=None)
    return y, (kept, projections, matrices)


def _mlp_backward(layer: Layer, kept, dy):
    if layer.trained:
        return *kept(dy), None
    kept, dy = once_differentiable(_NAME, (kept, dy))
    given: MlpOperands = kept[0]
    _, projections, (wi, wo) = kept
    rows, experts, indices = given.rows, given.experts, given.groups.indices
    forward_dtype, gradient_dtype = layer.recipe.forward_dtype, layer.recipe.gradient_dtype
    dtypes, found = layer.dtypes, Differentials()
    if wo is None:
        dh = dy
    else:
        copied = layer.combines
        tokens = layer.quantize_operand(dy, given, gradient_dtype)
        dh = layer.tokens_by_experts("dgrad", tokens, given, wo, dtypes.projections, copied=copied)
    weights = _weights_of_rows(layer, given, projections)
    # Keep the wider buffer for less time: the FP8 gradients of projections [m, 2 F], or the
    # 16-bit gradient of x [m, D].
    hidden_columns = layer.hidden_layer.columns
    x_first = hidden_columns >= rows.x.shape[1]
    # Do not join narrow gradients of gate and up, because the kernel for both reads two arrays.
    joined = x_first and wo is not None and is_static(hidden_columns)
    joined = joined and hidden_columns > PAIRED_FP8_COLUMNS
    gradients = layer.hidden_gradients(projections, dh, weights, given, joined=joined)
    num_rows = projections.shape[0]
    if given.weights is not None:
        dweights = gradients.weights
        if wo is None:  # then dh comes from the caller, who may have set unowned rows too
            dweights = jnp.where(layer.owned_rows(given, num_rows), dweights, 0)
        found = dataclasses.replace(found, weights=dweights.astype(given.weights.dtype))

    def rows_gradient(projections):
        dx = layer.rows_by_weights("dgrad", projections, wi, *indices, rows.x.dtype)
        return dx if rows.rows is None else token_rows.combine_for_sources(dx, rows)

    def wo_gradient(found, dy, gradients):
        if wo is None:
            return found
        dy_rows = layer.tokens_for_wgrad(dy, given, gradient_dtype, copied=layer.combines)
        hidden = layer.rows_for_wgrad(gradients.hidden, given, forward_dtype)
        (dwo,) = layer.weights_gradients(hidden, [dy_rows], [dtypes.wo], given, num_rows)
        return dataclasses.replace(found, wo=groups_split_like(dwo, wo))

    def wi_gradients(found, x, gradients):
        x_rows = layer.tokens_for_wgrad(x, given, forward_dtype, copied=True)
        of_matrices = [
            layer.rows_for_wgrad(gradient, given, gradient_dtype)
            for gradient in (gradients.gate, gradients.up)
            if gradient is not None
        ]
        every = [dtypes.wi_0, dtypes.wi_1][: len(of_matrices)]
        of_wi = layer.weights_gradients(x_rows, of_matrices, every, given, num_rows)
        wi_0, *wi_1 = (groups_split_like(of_matrix, wi) for of_matrix in of_wi)
        return dataclasses.replace(found, wi_0=wi_0, wi_1=wi_1[0] if wi_1 else None)

    # Keep one [m, D] array at a time: make each after the last reader of the previous one.
    steps = [(wo_gradient, dy), (wi_gradients, rows.x)]
    if isinstance(gradients, JoinedGradients):
        # The joined array can share memory with the gradient of wo.
        steps.reverse()
    if x_first:
        found = dataclasses.replace(found, x=rows_gradient(gradients.projections))
        gradients = gradients.without_projections()
    if experts.b0 is not None:
        db0 = _bias_gradient(experts.b0, gradients.gate, given)
        found = dataclasses.replace(found, b0=db0)
    if experts.b1 is not None:
        db1 = _bias_gradient(experts.b1, gradients.up, given)
        found = dataclasses.replace(found, b1=db1)
    for i, (add_gradients, tokens) in enumerate(steps):
        if i > 0 or x_first:
            tokens, gradients, found = barrier((tokens, gradients, found))
        found = add_gradients(found, tokens, gradients)
    if not x_first:
        of_rows, found = barrier((gradients.projections, found))
        found = dataclasses.replace(found, x=rows_gradient(of_rows))
    of_experts = ExpertWeights(
        wi_0=found.wi_0, wi_1=found.wi_1, b0=found.b0, b1=found.b1, wo=found.wo
    )
    assert found.x is not None
    of_integers: Any = None
    of_x = Rows(found.x, sources=rows.sources)
    return MlpOperands(of_x, of_experts, found.weights, of_integers), None


fp8_mlp.defvjp(_mlp_forward, _mlp_backward)


def _matrices(layer: Layer, given: MlpOperands, quantized, for_gradient):
    """Returns (plain, transposed) forms of gate and up, and of down."""
    wi_0, wi_1, wo = given.experts.wi_0, given.experts.wi_1, given.experts.wo
    if quantized is not None:
        matrices = ((Scaled(*w[:2]), Scaled(*w[2:])) for w in quantized)
        wi, down = matrices
        return wi, None if wo is None else down
    forms = dict(plain=for_gradient, transposed=True)
    return quantize_experts(layer, wi_0, wi_1, wo, **forms)


def _weights_of_rows(layer: Layer, given: MlpOperands, projections: jax.Array) -> jax.Array:
    """Returns the weights of rows, by default ones, but zeros in unowned rows that matter.

    Unowned rows matter without wo, because the result has them, and with biases, because gradients
    of biases may depend on them. Otherwise they do not, because no product reads them.
    """
    num_rows = projections.shape[0]
    matter = layer.dtypes.wo is None or given.experts.has_biases
    owned = layer.owned_rows(given, num_rows) if matter else jnp.ones(num_rows, bool)
    return row_weights(given.weights, owned, projections)


def _with_biases(layer: Layer, projections: jax.Array, given: MlpOperands) -> jax.Array:
    gate, up = layer.hidden_layer.split(projections)
    b0, b1 = given.experts.b0, given.experts.b1
    if b0 is not None:
        gate += _bias_rows(b0.astype(gate.dtype), given, gate.shape[0])
    if up is not None and b1 is not None:
        up += _bias_rows(b1.astype(up.dtype), given, up.shape[0])
    return layer.hidden_layer.join(gate, up)


def _bias_rows(bias, given: MlpOperands, num_rows):
    sizes, offset = given.groups.indices
    return bias_rows(bias, sizes, offset[0], num_rows)


def _bias_gradient(bias, gradient, given: MlpOperands):
    wide = at_least_float32(gradient.dtype)
    _, vjp = jax.vjp(lambda bias: _bias_rows(bias, given, gradient.shape[0]), bias.astype(wide))
    return vjp(gradient.astype(wide))[0].astype(bias.dtype)
