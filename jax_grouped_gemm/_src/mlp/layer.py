"""The MLP of experts, and its derivative.

JAX does not differentiate the parts of `ragged_mlp`. The tangent of the whole MLP is one primitive,
linear in the tangents of all operands. Its transpose consists of three fused operations and the
products of the weights' gradients.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jax_grouped_gemm._src import activations
from jax_grouped_gemm._src.activations import hidden_layer
from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.mlp import composed, plan, reference
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.operands import (
    Differentials,
    DownOperands,
    DownWeightsOperands,
    GradientOperands,
    Groups,
    MlpOperands,
    PairedOperands,
    PairedWeightsOperands,
    Rows,
    TangentOperands,
    named,
)
from jax_grouped_gemm._src.mlp.primitive import (
    BIASED,
    DOWN_WEIGHTS,
    GATED,
    GATED_TRANSPOSE,
    PAIRED,
    PAIRED_WEIGHTS,
    TANGENT,
    Options,
    bind,
)
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.ragged.reference import owned_rows


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def ragged_mlp(options: Options, combines: bool, operands: MlpOperands) -> jax.Array:
    """Returns y [m, D] = hidden wo + weights bo, for operands of one dtype.

    With `combines` the rows of each token are summed up: [T, D].
    """
    (hidden,) = gated_ragged_dot(options, operands, residuals=False)
    return _result(combines, operands, down(options, operands, hidden))


def _result(combines: bool, operands: MlpOperands, y: jax.Array) -> jax.Array:
    if not combines:
        return y
    return token_rows.combine(checkpoint_name(y, composed.RESULT), operands.rows)


@functools.partial(ragged_mlp.defjvp, symbolic_zeros=True)
def _ragged_mlp_jvp(options, combines, primals, tangents):
    (operands,), (tangents,) = primals, tangents
    hidden, *projected = gated_ragged_dot(options, operands, residuals=True)
    gate = checkpoint_name(projected[0], composed.GATE)
    up = checkpoint_name(projected[1], composed.UP) if operands.experts.has_up else None
    y = _result(combines, operands, down(options, operands, hidden))
    active = {
        name: tangent
        for name, tangent in named(tangents).items()
        if not isinstance(tangent, SymbolicZero)
    }
    if not active:
        return y, jnp.zeros_like(y)
    # Drop the biases of gate and up: gate and up are linear in them, so tangents need no values.
    kept = operands.with_experts(b0=None, b1=None)
    given = TangentOperands(Differentials(**active), gate, up, kept)
    return y, bind(TANGENT, given, combines=combines, **vars(options))


def mlp(options: Options, operands: MlpOperands, *, combines: bool = False) -> jax.Array:
    """Returns y [m, D], or hidden [m, F] without wo, for operands of one dtype.

    With `combines`, the rows of each token are summed up (`in_place.of_dy`).
    """
    has_down = operands.experts.wo is not None
    if has_down and not closes_over_traced(options, operands):
        return ragged_mlp(options, combines, operands)
    (hidden,) = gated_ragged_dot(options, operands, residuals=False)
    return down(options, operands, hidden) if has_down else hidden


def gated_ragged_dot(
    options: Options, operands: MlpOperands, *, residuals: bool
) -> list[jax.Array]:
    """Binds `GATED` to the operands that are given."""
    given = operands.with_experts(wo=None, bo=None)
    if closes_over_traced(options, given):
        return reference.gated_ragged_dot(given, residuals=residuals, **vars(options))
    return bind(GATED, given, residuals=residuals, **vars(options))


def closes_over_traced(options: Options, operands: MlpOperands) -> bool:
    """Whether the activation closes over traced values, so that no primitive can take it."""
    shape = operands.num_rows, operands.experts.hidden_columns
    return activations.closes_over_traced(options.activation, *shape)


def down(options: Options, operands: MlpOperands, hidden: jax.Array) -> jax.Array:
    """Returns y [m, D] = hidden wo + weights bo, with the terms that are given."""
    wo, bo = operands.experts.wo, operands.experts.bo
    assert wo is not None
    weights = None if bo is None else operands.weights
    given = DownOperands(hidden, wo, bo, weights, operands.groups)
    if plan.is_fused(MlpProblem(BIASED.name, given, options.of_products)):
        return bind(BIASED, given, **options.of_products)
    # Bind no fused primitive, so that the product has the derivatives of the ragged product.
    return reference.biased_ragged_dot(given, **options.of_products)


def _products(options) -> reference.Products:
    return reference.Products(**options.of_products)


def _tangent_transpose(dy, *leaves, tree, combines, **options):
    if type(dy) is ad.Zero:
        return [None] * len(leaves)
    given: TangentOperands = tree.unflatten(leaves)
    dots = named(given.dots)
    wanted = {name: x.aval for name, x in dots.items() if ad.is_undefined_primal(x)}
    rows = given.primals.rows.of(dy) if combines else Rows(dy)
    found = _cotangents(rows, given, Differentials(**wanted), Options(**options))
    cotangents = [
        getattr(found, name).astype(wanted[name].dtype) if name in wanted else None for name in dots
    ]
    return cotangents + [None] * (len(leaves) - len(dots))


def _cotangents(
    dy_rows: Rows, given: TangentOperands, wanted: Differentials, options: Options
) -> Differentials:
    """Computes the cotangents of the operands that `wanted` names, from the rows of dy.

    The fields of `wanted` are abstract arrays, or None if the cotangent is not wanted.
    """
    rows, experts, weights = given.primals.rows, given.primals.experts, given.primals.weights
    groups, wo = given.groups, experts.wo
    assert wo is not None
    down_weights_of = functools.partial(_down_weights, dy_rows, groups, wo.shape[0], options)
    sums_of = functools.partial(
        reference.sums_of_groups, num_groups=wo.shape[0], implementation=options.implementation
    )
    found = Differentials()
    if wanted.bo is not None:
        found = dataclasses.replace(found, bo=sums_of(token_rows.on_rows(dy_rows), weights, groups))
    if named(wanted).keys() <= {"bo", "wo"}:
        if wanted.wo is not None:
            hidden = _hidden_again(given, options)
            found = dataclasses.replace(found, wo=down_weights_of(hidden))
        return found

    operands = GradientOperands(dy_rows, wo, given.gate, given.up, weights, groups)
    *gradients, hidden, dweights = bind(GATED_TRANSPOSE, operands, **vars(options))
    if wanted.weights is not None:
        if experts.bo is not None:
            dy = token_rows.on_rows(dy_rows)
            dweights += reference.dots_with_biases(dy, experts.bo, groups)
        found = dataclasses.replace(found, weights=dweights.astype(wanted.weights.dtype))
    if wanted.b0 is not None:
        found = dataclasses.replace(found, b0=sums_of(gradients[0], None, groups))
    if wanted.b1 is not None:
        found = dataclasses.replace(found, b1=sums_of(gradients[1], None, groups))
    if wanted.wo is not None:
        found = dataclasses.replace(found, wo=down_weights_of(hidden))
    if experts.wi is not None:
        gradients = [jnp.concatenate(gradients, axis=1)]
    # Keep one [m, D] array at a time: make each after the last reader of the previous one. The
    # gradient of x comes first, since it may travel to other devices, which takes as long as
    # products of weights' gradients.
    gradients[0], found = barrier((gradients[0], found))
    if wanted.x is not None:
        if len(gradients) == 2:
            (d0, d1), (w0, w1) = gradients, experts.projections
            dx = bind(PAIRED, PairedOperands(d0, d1, w0, w1, groups), **options.of_products)
        else:
            (d0,), (w0,), indices = gradients, experts.projections, groups.indices
            dx = _products(options).rows(d0, w0, *indices, transpose_rhs=True)
        if rows.rows is not None:
            dx = token_rows.combine(dx, rows)
        found = dataclasses.replace(found, x=dx)
    matrices = wanted.wi, wanted.wi_0, wanted.wi_1
    if any(x is not None for x in matrices):
        # Without a barrier, XLA would reuse the copies of x's rows from the forward pass, and keep
        # these instead of x.
        x, gradients[0], found = barrier((rows.x, gradients[0], found))
        in_order = matrices[1:] if experts.wi is None else matrices[:1]
        asked = [d for d, aval in zip(gradients, in_order, strict=False) if aval is not None]
        results = iter(_weight_gradients(rows.of(x), asked, groups, wo.shape[0], options))
        wi, wi_0, wi_1 = (None if aval is None else next(results) for aval in matrices)
        found = dataclasses.replace(found, wi=wi, wi_0=wi_0, wi_1=wi_1)
    return found


def _weight_gradients(
    rows: Rows, gradients: list[jax.Array], groups: Groups, num_groups: int, options: Options
) -> list[jax.Array]:
    """Returns, for each group, x^T times each of the gradients [m, n]."""
    params = dict(options.of_products, num_groups=num_groups)
    if len(gradients) == 2:
        d0, d1 = gradients
        operands = PairedWeightsOperands(rows, d0, d1, groups)
        if plan.is_fused(MlpProblem(PAIRED_WEIGHTS.name, operands, params)):
            return bind(PAIRED_WEIGHTS, operands, **params)
    # Bind no fused primitive, so that products have the derivatives of ragged products.
    x = token_rows.on_rows(rows)
    product = functools.partial(_products(options).weights, num_groups=num_groups, is_limited=True)
    return [product(x, d, *groups.indices) for d in gradients]


def _down_weights(
    rows: Rows, groups: Groups, num_groups: int, options: Options, hidden: jax.Array
) -> jax.Array:
    """Returns hidden^T dy for each group."""
    params = dict(options.of_products, num_groups=num_groups)
    operands = DownWeightsOperands(rows, hidden, groups)
    problem = MlpProblem(DOWN_WEIGHTS.name, operands, params)
    if rows.rows is not None and plan.is_fused(problem):
        return bind(DOWN_WEIGHTS, operands, **params)
    product = functools.partial(_products(options).weights, num_groups=num_groups)
    return product(hidden, token_rows.on_rows(rows), *groups.indices)


def _hidden_again(given: TangentOperands, options: Options) -> jax.Array:
    experts = given.primals.experts
    owned = owned_rows(*given.groups.indices, experts.count, given.gate.shape[0])
    weights = reference.row_weights(given.primals.weights, owned, given.gate)
    return hidden_layer(options.activation, given.gate, given.up, weights)


TANGENT.def_transpose(_tangent_transpose)
