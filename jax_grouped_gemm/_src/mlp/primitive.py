"""The primitives of an MLP, and its derivative.

Each primitive has the derivative and the vectorisation of the products that it is composed of. Only
`ragged_mlp` as a whole is differentiated otherwise: its tangent is one primitive, linear in the
tangents of all operands, which is transposed into three fused operations and the products of the
weights' gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jax_grouped_gemm._src import activations
from jax_grouped_gemm._src.activations import Activation, hidden_layer
from jax_grouped_gemm._src.arguments import (
    Implementation,
    canonical_precision,
    checked_implementation,
)
from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.mlp import call, composed, plan, reference
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.operands import (
    Differentials,
    DownOperands,
    GradientOperands,
    Groups,
    MlpOperands,
    PairedOperands,
    PairedWeightsOperands,
    Rows,
    TangentOperands,
    named,
)
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims
from jax_grouped_gemm._src.plan import OPTIONS, TileChoices, current_tiles
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.ragged.reference import owned_rows

LETTERS = dict(
    x="mD", dy="mD", hidden="mF", gate="mF", up="mF", d0="mF", d1="mF", weights="m",
    wi_0="gDF", wi_1="gDF", wi="gDU", wo="gFD", b0="gF", b1="gF", bo="gD",
    a0="mF", a1="mF", w0="gDF", w1="gDF", sizes="G", offset="o",
)  # fmt: skip
"""The dimensions of operands by name. In `wi`, gate and up lie beside each other: a part of its
columns is not the same part of both."""
OF_ROWS = dict(x="TD", x_dot="TD", rows="m", inverse="Tk", count="c")
"""Those of tokens, whose rows are told of all."""


def _dims(tree, to, whole) -> Dims:
    """Dimensions of operands of that structure."""
    names = _names(tree)
    letters = LETTERS | (OF_ROWS if "rows" in names else {})
    if "rows" in names:
        whole += "mTkc"
    if "wi" in names:
        whole += "FU"
    operands = (letters.get(name, letters[name.removesuffix("_dot")]) for name in names)
    return Dims.of(*operands, to=to, whole=f"Go{whole}")


def _names(tree) -> list[str]:
    return list(named(tree.unflatten(range(tree.num_leaves))))


def _with_one_bias(operands, params, split):
    """A device's operands: one term of a sum over hidden features has the bias of the result."""
    operands, params = slices.of_groups(operands, params, split)
    if split.splits("F"):
        by_name = zip(_names(params["tree"]), operands, strict=True)
        operands = [
            jnp.where(split.first("F") == 0, x, jnp.zeros_like(x)) if "bo" in name else x
            for name, x in by_name
        ]
    return operands, params


def _of_leaves(function):
    """`function` of typed operands as one of the operands of a primitive."""

    @functools.wraps(function)
    def of_leaves(*leaves, tree, **params):
        return function(tree.unflatten(leaves), **params)

    return of_leaves


def _gated_avals(*leaves, tree, residuals, **_):
    given: MlpOperands = tree.unflatten(leaves)
    shape = given.num_rows, given.experts.hidden_columns
    aval = GATED.unsharded_aval(leaves, shape, given.rows.x.dtype)
    return [aval] * (1 + residuals * (1 + given.experts.has_up))


GATED = Op(
    name="gated_ragged_dot",
    operand_ranks=None,
    targets=(call.GATED_TARGET, call.FEW_ROWS_TARGET),
    avals=_gated_avals,
    planner=plan.plan_gated,
    planned=OPTIONS,
    call=call.gated,
    reference=_of_leaves(reference.gated_ragged_dot),
    multiple_results=True,
    dims=lambda _, results, *, tree, **params: _dims(tree, ["mF"] * len(results), "Dg"),
    localizer=slices.of_groups,
)


def _biased_aval(*leaves, tree, **_):
    given: DownOperands = tree.unflatten(leaves)
    return BIASED.unsharded_aval(leaves, (given.num_rows, given.wo.shape[2]), given.wo.dtype)


BIASED = Op(
    name="biased_ragged_dot",
    operand_ranks=None,
    targets=(call.FEW_ROWS_TARGET,),
    avals=_biased_aval,
    planner=plan.plan_biased,
    planned=OPTIONS,
    call=call.biased,
    reference=_of_leaves(reference.biased_ragged_dot),
    dims=lambda *_, tree, **params: _dims(tree, "mD", "g"),
    localizer=_with_one_bias,
)


def _gated_transpose_avals(*leaves, tree, **_):
    given: GradientOperands = tree.unflatten(leaves)
    gate = given.gate
    like_gate = GATED_TRANSPOSE.unsharded_aval(leaves, gate.shape, gate.dtype)
    dtype = at_least_float32(gate.dtype)
    return [like_gate] * (2 + (given.up is not None)) + [
        GATED_TRANSPOSE.unsharded_aval(leaves, gate.shape[:1], dtype)
    ]


GATED_TRANSPOSE = Op(
    name="gated_ragged_dot_transpose",
    operand_ranks=None,
    targets=(call.GATED_TRANSPOSE_TARGET,),
    avals=_gated_transpose_avals,
    planner=plan.plan_gated_transpose,
    planned=OPTIONS,
    call=call.gated_transpose,
    reference=_of_leaves(reference.gated_ragged_dot_transpose),
    multiple_results=True,
    dims=lambda _, results, *, tree, **params: _dims(
        tree, ["mF"] * (len(results) - 1) + ["m"], "Dg"
    ),
    localizer=slices.of_groups,
)


def _paired_aval(*leaves, tree, **_):
    given: PairedOperands = tree.unflatten(leaves)
    return PAIRED.unsharded_aval(leaves, (given.a0.shape[0], given.w0.shape[1]), given.a0.dtype)


PAIRED = Op(
    name="paired_ragged_dot",
    operand_ranks=None,
    targets=(call.PAIRED_TARGET,),
    avals=_paired_aval,
    planner=plan.plan_paired,
    planned=OPTIONS,
    call=call.paired,
    reference=_of_leaves(reference.paired_ragged_dot),
    dims=lambda *_, tree, **params: _dims(tree, "mD", "g"),
    localizer=slices.of_groups,
)


def _paired_weights_avals(*leaves, tree, num_groups, **_):
    given: PairedWeightsOperands = tree.unflatten(leaves)
    shape = num_groups, given.rows.x.shape[1], given.d0.shape[1]
    return [PAIRED_WEIGHTS.unsharded_aval(leaves, shape, given.rows.x.dtype)] * 2


PAIRED_WEIGHTS = Op(
    name="paired_weight_gradients",
    operand_ranks=None,
    targets=(call.PAIRED_WEIGHTS_TARGET,),
    avals=_paired_weights_avals,
    planner=plan.plan_paired_weights,
    planned=OPTIONS,
    call=call.paired_weights,
    reference=_of_leaves(reference.paired_weight_gradients),
    multiple_results=True,
    dims=lambda *_, tree, **params: _dims(tree, ["gDF", "gDF"], ""),
    localizer=slices.of_groups,
)


def _tangent_aval(*leaves, tree, **_):
    given: TangentOperands = tree.unflatten(leaves)
    wo = given.primals.experts.wo
    assert wo is not None
    return TANGENT.unsharded_aval(leaves, (given.gate.shape[0], wo.shape[2]), wo.dtype)


TANGENT = Op(
    name="ragged_mlp_tangent",
    operand_ranks=None,
    targets=(),
    avals=_tangent_aval,
    planner=plan.plan_tangent,
    planned=OPTIONS,
    call=call.tangent,
    reference=_of_leaves(reference.ragged_mlp_tangent),
    dims=lambda *_, tree, **params: _dims(tree, "mD", "Dg"),
    localizer=_with_one_bias,
)


def _register_rules(op: Op) -> None:
    """Differentiates and vectorises `op` as the composition that is its reference."""

    def jvp(primals, tangents, **params):
        active = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

        def of_active(*operands: Any):
            given = dict(enumerate(primals)) | dict(zip(active, operands, strict=True))
            return op.reference(*given.values(), **params)

        return jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])

    def batch(operands, dims, **params):
        out = jax.vmap(functools.partial(op.reference, **params), dims)(*operands)
        return out, jax.tree.map(lambda _: 0, out)

    op.def_jvp(jvp)
    op.def_batching(batch)


for _op in (GATED, BIASED, GATED_TRANSPOSE, PAIRED, PAIRED_WEIGHTS, TANGENT):
    _register_rules(_op)


@dataclasses.dataclass(frozen=True)
class Options:
    """The parameters that the primitives have in common."""

    activation: Activation
    precision: Any
    implementation: Implementation
    tile_choices: TileChoices
    zeroes_unowned: bool = True
    max_sms: int | None = None

    @classmethod
    def of(
        cls,
        activation: Activation,
        precision: Any,
        implementation: Implementation,
        *,
        zeroes_unowned: bool = True,
        max_sms: int | None = None,
    ) -> Options:
        """Checked options, with the current choices of tiles.

        Without `zeroes_unowned`, rows that no local group owns are undefined, in results and
        gradients. `max_sms` limits the products of weights' gradients that come after the gradient
        of x, which may be on its way to other devices beside them.

        Raises:
          ValueError: `precision` or `implementation` is none.
        """
        precision = canonical_precision(precision)
        implementation = checked_implementation(implementation)
        tiles = current_tiles()
        return cls(activation, precision, implementation, tiles, zeroes_unowned, max_sms)

    @property
    def of_products(self) -> dict[str, Any]:
        """The options of operations without an activation."""
        return {name: x for name, x in vars(self).items() if name != "activation"}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def ragged_mlp(options: Options, operands: MlpOperands) -> jax.Array:
    """y [m, D] = hidden wo + weights bo, of operands of one dtype."""
    (hidden,) = gated_ragged_dot(options, operands, residuals=False)
    return down(options, operands, hidden)


@functools.partial(ragged_mlp.defjvp, symbolic_zeros=True)
def _ragged_mlp_jvp(options, primals, tangents):
    (operands,), (tangents,) = primals, tangents
    hidden, *projected = gated_ragged_dot(options, operands, residuals=True)
    gate = checkpoint_name(projected[0], composed.GATE)
    up = checkpoint_name(projected[1], composed.UP) if operands.experts.has_up else None
    y = down(options, operands, hidden)
    active = {
        name: tangent
        for name, tangent in named(tangents).items()
        if not isinstance(tangent, SymbolicZero)
    }
    if not active:
        return y, jnp.zeros_like(y)
    # The tangent is linear in the biases of gate and up.
    kept = operands.with_experts(b0=None, b1=None)
    given = TangentOperands(Differentials(**active), gate, up, kept)
    return y, bind(TANGENT, given, **vars(options))


def bind(op: Op, operands: Any, **params: Any) -> Any:
    """Binds a primitive to those of its operands that are given."""
    leaves, tree = jax.tree.flatten(operands)
    return op.bind(*leaves, tree=tree, **params)


def gated_ragged_dot(
    options: Options, operands: MlpOperands, *, residuals: bool
) -> list[jax.Array]:
    """Binds `GATED` to those of its operands that are given."""
    given = operands.with_experts(wo=None, bo=None)
    if closes_over_traced(options, given):
        return reference.gated_ragged_dot(given, residuals=residuals, **vars(options))
    return bind(GATED, given, residuals=residuals, **vars(options))


def closes_over_traced(options: Options, operands: MlpOperands) -> bool:
    """Whether no primitive may have the activation, only JAX's own operations."""
    shape = operands.num_rows, operands.experts.hidden_columns
    return activations.closes_over_traced(options.activation, *shape)


def down(options: Options, operands: MlpOperands, hidden: jax.Array) -> jax.Array:
    """y [m, D] = hidden wo + weights bo, of those operands that are given."""
    wo, bo = operands.experts.wo, operands.experts.bo
    assert wo is not None
    weights = None if bo is None else operands.weights
    given = DownOperands(hidden, wo, bo, weights, operands.groups)
    if plan.is_fused(BIASED.name, given, options.of_products):
        return bind(BIASED, given, **options.of_products)
    # Not as one primitive, so that derivatives of the product are those of the ragged product.
    return reference.biased_ragged_dot(given, **options.of_products)


def _products(options) -> reference.Products:
    return reference.Products(**options.of_products)


def _tangent_transpose(dy, *leaves, tree, **options):
    if type(dy) is ad.Zero:
        return [None] * len(leaves)
    given: TangentOperands = tree.unflatten(leaves)
    dots = named(given.dots)
    wanted = {name: x.aval for name, x in dots.items() if ad.is_undefined_primal(x)}
    found = _cotangents(dy, given, Differentials(**wanted), Options(**options))
    cotangents = [
        getattr(found, name).astype(wanted[name].dtype) if name in wanted else None for name in dots
    ]
    return cotangents + [None] * (len(leaves) - len(dots))


def _cotangents(
    dy: jax.Array, given: TangentOperands, wanted: Differentials, options: Options
) -> Differentials:
    """The cotangents of the operands that have an abstract array in `wanted`."""
    rows, experts, weights = given.primals.rows, given.primals.experts, given.primals.weights
    groups, wo = given.groups, experts.wo
    assert wo is not None
    weights_of = functools.partial(_products(options).weights, num_groups=wo.shape[0])
    sums_of = functools.partial(
        reference.sums_of_groups, num_groups=wo.shape[0], implementation=options.implementation
    )
    found = Differentials()
    if wanted.bo is not None:
        found = dataclasses.replace(found, bo=sums_of(dy, weights, groups))
    if named(wanted).keys() <= {"bo", "wo"}:
        if wanted.wo is not None:
            hidden = _hidden_again(given, options)
            found = dataclasses.replace(found, wo=weights_of(hidden, dy, *groups.indices))
        return found

    operands = GradientOperands(dy, wo, given.gate, given.up, weights, groups)
    *gradients, hidden, dweights = bind(GATED_TRANSPOSE, operands, **vars(options))
    if wanted.weights is not None:
        if experts.bo is not None:
            dweights += reference.dots_with_biases(dy, experts.bo, groups)
        found = dataclasses.replace(found, weights=dweights.astype(wanted.weights.dtype))
    if wanted.b0 is not None:
        found = dataclasses.replace(found, b0=sums_of(gradients[0], None, groups))
    if wanted.b1 is not None:
        found = dataclasses.replace(found, b1=sums_of(gradients[1], None, groups))
    if wanted.wo is not None:
        found = dataclasses.replace(found, wo=weights_of(hidden, dy, *groups.indices))
    if experts.wi is not None:
        gradients = [jnp.concatenate(gradients, axis=1)]
    # One [m, D] array at a time: each is made when what reads the one before it is done. That of x
    # comes first, since it may have to travel to other devices, which takes as long as products of
    # weights' gradients.
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
        # Without a barrier XLA would find that rows of x were copied before, and keep them instead
        # of x.
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
    """x^T times each of the gradients [m, n], of each group."""
    params = dict(options.of_products, num_groups=num_groups)
    if len(gradients) == 2:
        d0, d1 = gradients
        operands = PairedWeightsOperands(rows, d0, d1, groups)
        if plan.is_fused(PAIRED_WEIGHTS.name, operands, params):
            return bind(PAIRED_WEIGHTS, operands, **params)
    # Not as one primitive, so that derivatives of the products are those of the ragged products.
    x = token_rows.on_rows(rows)
    product = functools.partial(_products(options).weights, num_groups=num_groups, is_limited=True)
    return [product(x, d, *groups.indices) for d in gradients]


def _hidden_again(given: TangentOperands, options: Options) -> jax.Array:
    experts = given.primals.experts
    owned = owned_rows(*given.groups.indices, experts.count, given.gate.shape[0])
    weights = reference.row_weights(given.primals.weights, owned, given.gate)
    return hidden_layer(options.activation, given.gate, given.up, weights)


TANGENT.def_transpose(_tangent_transpose)
