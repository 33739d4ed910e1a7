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
from jax_grouped_gemm._src.mlp.problem import has_up, hidden_columns
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims
from jax_grouped_gemm._src.plan import OPTIONS, TileChoices, current_tiles
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.ragged.reference import owned_rows

INDICES = ("group_sizes", "group_offset")
ROWS = ("rows", "inverse", "count")
GATED_OPERANDS = ("x", *ROWS, "wi", "wi_0", "wi_1", "b0", "b1", "weights", *INDICES)
DOWN_OPERANDS = ("wo", "bo", "weights", *INDICES)


LETTERS = dict(
    x="mD", dy="mD", hidden="mF", gate="mF", up="mF", d0="mF", d1="mF", weights="m",
    wi_0="gDF", wi_1="gDF", wi="gDU", wo="gFD", b0="gF", b1="gF", bo="gD",
    group_sizes="G", group_offset="o",
)  # fmt: skip
"""The dimensions of operands by name. In `wi`, gate and up lie beside each other: a part of its
columns is not the same part of both."""
OF_ROWS = dict(x="TD", x_dot="TD", rows="m", inverse="Tk", count="c")
"""Those of tokens, whose rows are told of all."""


def _dims(names, to, whole) -> Dims:
    """Dimensions of operands of those names."""
    letters = LETTERS | (OF_ROWS if "rows" in names else {})
    if "rows" in names:
        whole += "mTkc"
    if "wi" in names:
        whole += "FU"
    operands = (letters.get(name, letters[name.removesuffix("_dot")]) for name in names)
    return Dims.of(*operands, to=to, whole=f"Go{whole}")


def _with_one_bias(operands, params, split):
    """A device's operands: one term of a sum over hidden features has the bias of the result."""
    operands, params = slices.of_groups(operands, params, split)
    if split.splits("F"):
        named = zip(params["names"], operands, strict=True)
        operands = [
            jnp.where(split.first("F") == 0, x, jnp.zeros_like(x)) if "bo" in name else x
            for name, x in named
        ]
    return operands, params


def _gated_avals(*operands, names, residuals, **_):
    given = dict(zip(names, operands, strict=True))
    x = given["x"]
    rows = given["rows"] if "rows" in given else x
    shape = rows.shape[0], hidden_columns(given)
    aval = GATED.unsharded_aval(operands, shape, x.dtype)
    return [aval] * (1 + residuals * (1 + has_up(given)))


GATED = Op(
    name="gated_ragged_dot",
    operand_ranks=None,
    targets=(call.GATED, call.FEW_ROWS),
    avals=_gated_avals,
    planner=plan.plan_gated,
    planned=OPTIONS,
    call=call.gated,
    reference=reference.gated_ragged_dot,
    multiple_results=True,
    dims=lambda _, results, *, names, **params: _dims(names, ["mF"] * len(results), "Dg"),
    localizer=slices.of_groups,
)


def _biased_aval(*operands, names, **_):
    hidden, wo = operands[names.index("hidden")], operands[names.index("wo")]
    shape = hidden.shape[0], wo.shape[2]
    return BIASED.unsharded_aval(operands, shape, wo.dtype)


BIASED = Op(
    name="biased_ragged_dot",
    operand_ranks=None,
    targets=(call.FEW_ROWS,),
    avals=_biased_aval,
    planner=plan.plan_biased,
    planned=OPTIONS,
    call=call.biased,
    reference=reference.biased_ragged_dot,
    dims=lambda *_, names, **params: _dims(names, "mD", "g"),
    localizer=_with_one_bias,
)


def _gated_transpose_avals(*operands, names, **_):
    gate = operands[names.index("gate")]
    like_gate = GATED_TRANSPOSE.unsharded_aval(operands, gate.shape, gate.dtype)
    dtype = at_least_float32(gate.dtype)
    return [like_gate] * (2 + ("up" in names)) + [
        GATED_TRANSPOSE.unsharded_aval(operands, gate.shape[:1], dtype)
    ]


def _gated_transpose_dims(_, results, *, names, **params) -> Dims:
    return _dims(names, ["mF"] * (len(results) - 1) + ["m"], "Dg")


GATED_TRANSPOSE = Op(
    name="gated_ragged_dot_transpose",
    operand_ranks=None,
    targets=(call.GATED_TRANSPOSE,),
    avals=_gated_transpose_avals,
    planner=plan.plan_gated_transpose,
    planned=OPTIONS,
    call=call.gated_transpose,
    reference=reference.gated_ragged_dot_transpose,
    multiple_results=True,
    dims=_gated_transpose_dims,
    localizer=slices.of_groups,
)


def _paired_aval(*operands, **params):
    a0, _, w0, *_ = operands
    return PAIRED.unsharded_aval(operands, (a0.shape[0], w0.shape[1]), a0.dtype)


PAIRED = Op(
    name="paired_ragged_dot",
    operand_ranks=None,
    targets=(call.PAIRED,),
    avals=_paired_aval,
    planner=plan.plan_paired,
    planned=OPTIONS,
    call=call.paired,
    reference=reference.paired_ragged_dot,
    dims=lambda *_, **params: Dims.of("mF", "mF", "gDF", "gDF", "G", "o", to="mD", whole="gGo"),
    localizer=slices.of_groups,
)


def _paired_weights_avals(*operands, names, num_groups, **_):
    x, d0 = (operands[names.index(name)] for name in ("x", "d0"))
    shape = num_groups, x.shape[1], d0.shape[1]
    return [PAIRED_WEIGHTS.unsharded_aval(operands, shape, x.dtype)] * 2


PAIRED_WEIGHTS = Op(
    name="paired_weight_gradients",
    operand_ranks=None,
    targets=(call.PAIRED_WEIGHTS,),
    avals=_paired_weights_avals,
    planner=plan.plan_paired_weights,
    planned=OPTIONS,
    call=call.paired_weights,
    reference=reference.paired_weight_gradients,
    multiple_results=True,
    dims=lambda *_, names, **params: _dims(names, ["gDF", "gDF"], ""),
    localizer=slices.of_groups,
)


def _tangent_aval(*operands, names, **_):
    gate, wo = operands[names.index("gate")], operands[names.index("wo")]
    return TANGENT.unsharded_aval(operands, (gate.shape[0], wo.shape[2]), wo.dtype)


TANGENT = Op(
    name="ragged_mlp_tangent",
    operand_ranks=None,
    targets=(),
    avals=_tangent_aval,
    planner=plan.plan_tangent,
    planned=OPTIONS,
    call=call.tangent,
    reference=reference.ragged_mlp_tangent,
    dims=lambda *_, names, **params: _dims(names, "mD", "Dg"),
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
def ragged_mlp(options: Options, operands: dict[str, jax.Array]) -> jax.Array:
    """y [m, D] = hidden wo + weights bo, of operands of one dtype.

    Args:
      options: the parameters of the primitives.
      operands: x, rows, inverse, count, wi_0, wi_1, wi, wo, b0, b1, bo, weights, group_sizes and
        group_offset, as `reference.ragged_mlp_tangent` has them, without those that are not given.
    """
    (hidden,) = gated_ragged_dot(options, operands, residuals=False)
    return down(options, operands, hidden)


@functools.partial(ragged_mlp.defjvp, symbolic_zeros=True)
def _ragged_mlp_jvp(options, primals, tangents):
    (operands,), (tangents,) = primals, tangents
    hidden, *projected = gated_ragged_dot(options, operands, residuals=True)
    # The tangent is linear in the biases of gate and up.
    kept = {name: x for name, x in operands.items() if name not in ("b0", "b1")}
    names = ("gate", composed.GATE), ("up", composed.UP)
    for (operand, name), x in zip(names, projected, strict=False):
        kept[operand] = checkpoint_name(x, name)
    y = down(options, operands, hidden)
    active = {
        f"{name}_dot": tangent
        for name, tangent in tangents.items()
        if not isinstance(tangent, SymbolicZero)
    }
    if not active:
        return y, jnp.zeros_like(y)
    return y, _bind(TANGENT, active | kept, options)


def _bind(op: Op, operands: dict[str, jax.Array], options: Options, **params: Any) -> Any:
    return op.bind(*operands.values(), names=tuple(operands), **vars(options), **params)


def gated_ragged_dot(
    options: Options, operands: dict[str, jax.Array], *, residuals: bool
) -> list[jax.Array]:
    """Binds `GATED` to those of its operands that are given."""
    given = {name: operands[name] for name in GATED_OPERANDS if name in operands}
    if closes_over_traced(options, given):
        params = dict(vars(options), residuals=residuals)
        return reference.gated_ragged_dot(*given.values(), names=tuple(given), **params)
    return _bind(GATED, given, options, residuals=residuals)


def closes_over_traced(options: Options, operands: dict[str, jax.Array]) -> bool:
    """Whether no primitive may have the activation, only JAX's own operations."""
    num_rows = operands.get("rows", operands["x"]).shape[0]
    return activations.closes_over_traced(options.activation, num_rows, hidden_columns(operands))


def down(options: Options, operands: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
    """y [m, D] = hidden wo + weights bo, of those operands that are given."""
    given = {"hidden": hidden} | {
        name: operands[name] for name in DOWN_OPERANDS if name in operands
    }
    if "bo" not in given:
        given.pop("weights", None)
    params = dict(options.of_products, names=tuple(given))
    planned = plan.plan_biased([jax.typeof(x) for x in given.values()], params)
    if planned.kernel_problem is not None:
        return BIASED.bind(*given.values(), **params)
    # Not as one primitive, so that derivatives of the product are those of the ragged product.
    return reference.biased_ragged_dot(*given.values(), **params)


def _products(options) -> reference.Products:
    return reference.Products(**options.of_products)


def _tangent_transpose(dy, *operands, names, **options):
    given = dict(zip(names, operands, strict=True))
    wanted = {name[:-4] for name in names if ad.is_undefined_primal(given[name])}
    if type(dy) is ad.Zero:
        return [None] * len(names)
    given = {name: x for name, x in given.items() if not ad.is_undefined_primal(x)}
    cotangents = _cotangents(dy, given, wanted, Options(**options))
    avals = dict(zip(names, operands, strict=True))
    return [
        cotangents[name[:-4]].astype(avals[name].aval.dtype) if name.endswith("_dot") else None
        for name in names
    ]


def _cotangents(dy, given, wanted, options) -> dict[str, jax.Array]:
    """The cotangents of the operands of the names in `wanted`."""
    wo = given["wo"]
    indices = tuple(given[name] for name in INDICES)
    weights_of = functools.partial(_products(options).weights, num_groups=wo.shape[0])
    sums_of = functools.partial(
        reference.sums_of_groups, num_groups=wo.shape[0], implementation=options.implementation
    )
    cotangents = {}
    if "bo" in wanted:
        cotangents["bo"] = sums_of(dy, given.get("weights"), *indices)
    if wanted <= {"bo", "wo"}:
        if "wo" in wanted:
            cotangents["wo"] = weights_of(_hidden_again(given, options), dy, *indices)
        return cotangents

    names = ("wo", "gate", "up", "weights", *INDICES)
    operands = {"dy": dy} | {name: given[name] for name in names if name in given}
    *gradients, hidden, dweights = _bind(GATED_TRANSPOSE, operands, options)
    if "weights" in wanted:
        if "bo" in given:
            dweights += reference.dots_with_biases(dy, given["bo"], *indices)
        cotangents["weights"] = dweights.astype(given["weights"].dtype)
    for name, gradient in zip(("b0", "b1"), gradients, strict=False):
        if name in wanted:
            cotangents[name] = sums_of(gradient, None, *indices)
    if "wo" in wanted:
        cotangents["wo"] = weights_of(hidden, dy, *indices)
    matrices = ("wi",) if "wi" in given else ("wi_0", "wi_1")[: len(gradients)]
    if "wi" in given:
        gradients = [jnp.concatenate(gradients, axis=1)]
    # One [m, D] array at a time: each is made when what reads the one before it is done. That of x
    # comes first, since it may have to travel to other devices, which takes as long as products of
    # weights' gradients.
    gradients[0], cotangents = barrier((gradients[0], cotangents))
    if "x" in wanted:
        factors = *gradients, *(given[name] for name in matrices)
        if len(matrices) == 2:
            dx = PAIRED.bind(*factors, *indices, **options.of_products)
        else:
            dx = _products(options).rows(*factors, *indices, transpose_rhs=True)
        if "rows" in given:
            rows = (given.get(name) for name in ROWS)
            dx = token_rows.combine(dx, *rows, num_tokens=given["x"].shape[0])
        cotangents["x"] = dx
    if wanted.intersection(matrices):
        # Without a barrier XLA would find that rows of x were copied before, and keep them instead
        # of x.
        x, gradients[0], cotangents = barrier((given["x"], gradients[0], cotangents))
        given["x"] = x
        of_matrices = dict(zip(matrices, gradients, strict=True))
        of_matrices = {name: x for name, x in of_matrices.items() if name in wanted}
        cotangents |= _weight_gradients(given, of_matrices, options)
    return cotangents


def _weight_gradients(given, gradients, options) -> dict[str, jax.Array]:
    """x^T times each of the gradients [m, n], of each group."""
    params = dict(options.of_products, num_groups=given["wo"].shape[0])
    indices = {name: given[name] for name in INDICES}
    x = {name: given[name] for name in ("x", *ROWS) if name in given}
    if len(gradients) == 2:
        operands = x | dict(zip(("d0", "d1"), gradients.values(), strict=True)) | indices
        names = tuple(operands)
        avals = [jax.typeof(x) for x in operands.values()]
        if plan.is_one_launch(avals, dict(params, names=names)):
            both = PAIRED_WEIGHTS.bind(*operands.values(), names=names, **params)
            return dict(zip(gradients, both, strict=True))
    # Not as one primitive, so that derivatives of the products are those of the ragged products.
    rows = token_rows.on_rows(x["x"], x)
    product = functools.partial(
        _products(options).weights, num_groups=params["num_groups"], is_limited=True
    )
    return {name: product(rows, d, *indices.values()) for name, d in gradients.items()}


def _hidden_again(given, options):
    gate, up = given["gate"], given.get("up")
    sizes, offset = (given[name] for name in INDICES)
    owned = owned_rows(sizes, offset, given["wo"].shape[0], gate.shape[0])
    weights = reference.row_weights(given.get("weights"), owned, gate)
    return hidden_layer(options.activation, gate, up, weights)


TANGENT.def_transpose(_tangent_transpose)
