"""The primitives of an MLP.

Each primitive has the derivative and the vectorisation of its separate products.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.activations import Activation
from jax_grouped_gemm._src.arguments import (
    Implementation,
    canonical_precision,
    checked_implementation,
)
from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.mlp import call, plan, reference
from jax_grouped_gemm._src.mlp.operands import (
    DownOperands,
    DownWeightsOperands,
    GradientOperands,
    MlpOperands,
    PairedOperands,
    PairedWeightsOperands,
    TangentOperands,
    named,
)
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.tile_choices import OPTIONS, TileChoices, current_tiles

LETTERS = dict(
    x="mD", dy="mD", hidden="mF", gate="mF", up="mF", d0="mF", d1="mF", weights="m",
    wi_0="gDF", wi_1="gDF", wi="gDU", wo="gFD", b0="gF", b1="gF", bo="gD",
    a0="mF", a1="mF", w0="gDF", w1="gDF", sizes="G", offset="o",
)  # fmt: skip
"""The dimensions of operands by name. The columns of `wi` have another letter than F: `wi` has gate
and up side by side, so a slice of its columns is not the same slice of gate and of up."""

OF_ROWS = dict(x="TD", x_dot="TD", rows="m", inverse="Tk", count="c")
"""Dimensions of tokens, which `rows`, `inverse` and `count` map to rows."""


def _dims(tree, to, whole) -> Dims:
    """Names the dimensions of operands with the structure `tree`."""
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


def with_one_bias(operands, params, split):
    """Returns a device's operands. If hidden features are split, only one device keeps the bias of
    wo, because results are summed over devices."""
    operands, params = slices.of_groups(operands, params, split)
    if split.splits("F"):
        by_name = zip(_names(params["tree"]), operands, strict=True)
        operands = [
            jnp.where(split.first("F") == 0, x, jnp.zeros_like(x)) if "bo" in name else x
            for name, x in by_name
        ]
    return operands, params


def _of_leaves(function):
    """Turns a function of typed operands into a function of a primitive's operands."""

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
    per_row=True,
    operand_ranks=None,
    targets=(call.GATED_TARGET, call.FEW_ROWS_TARGET),
    avals=_gated_avals,
    planner=plan.planner("gated_ragged_dot"),
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
    per_row=True,
    operand_ranks=None,
    targets=(call.FEW_ROWS_TARGET,),
    avals=_biased_aval,
    planner=plan.planner("biased_ragged_dot"),
    planned=OPTIONS,
    call=call.biased,
    reference=_of_leaves(reference.biased_ragged_dot),
    dims=lambda *_, tree, **params: _dims(tree, "mD", "g"),
    localizer=with_one_bias,
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
    per_row=True,
    operand_ranks=None,
    targets=(call.GATED_TRANSPOSE_TARGET,),
    avals=_gated_transpose_avals,
    planner=plan.planner("gated_ragged_dot_transpose"),
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
    per_row=True,
    operand_ranks=None,
    targets=(call.PAIRED_TARGET,),
    avals=_paired_aval,
    planner=plan.planner("paired_ragged_dot"),
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
    planner=plan.planner("paired_weight_gradients"),
    planned=OPTIONS,
    call=call.paired_weights,
    reference=_of_leaves(reference.paired_weight_gradients),
    multiple_results=True,
    dims=lambda *_, tree, **params: _dims(tree, ["gDF", "gDF"], ""),
    localizer=slices.of_groups,
)


def _down_weights_aval(*leaves, tree, num_groups, **_):
    given: DownWeightsOperands = tree.unflatten(leaves)
    shape = num_groups, given.hidden.shape[1], given.rows.x.shape[1]
    return DOWN_WEIGHTS.unsharded_aval(leaves, shape, given.rows.x.dtype)


DOWN_WEIGHTS = Op(
    name="down_weight_gradient",
    operand_ranks=None,
    targets=(call.DOWN_WEIGHTS_TARGET,),
    avals=_down_weights_aval,
    planner=plan.planner("down_weight_gradient"),
    planned=OPTIONS,
    call=call.down_weights,
    reference=_of_leaves(reference.down_weight_gradient),
    dims=lambda *_, tree, **params: _dims(tree, "gFD", ""),
    localizer=slices.of_groups,
)


def _tangent_aval(*leaves, tree, combines, **_):
    given: TangentOperands = tree.unflatten(leaves)
    wo, rows = given.primals.experts.wo, given.primals.rows
    assert wo is not None
    count = rows.x.shape[0] if combines else given.gate.shape[0]
    return TANGENT.unsharded_aval(leaves, (count, wo.shape[2]), wo.dtype)


TANGENT = Op(
    name="ragged_mlp_tangent",
    per_row=True,
    operand_ranks=None,
    targets=(),
    avals=_tangent_aval,
    planner=plan.planner("ragged_mlp_tangent"),
    planned=OPTIONS,
    composed=_of_leaves(reference.ragged_mlp_tangent),
    reference=_of_leaves(reference.ragged_mlp_tangent),
    dims=lambda *_, tree, combines, **params: _dims(tree, "TD" if combines else "mD", "Dg"),
    localizer=with_one_bias,
)


for _op in (GATED, BIASED, GATED_TRANSPOSE, PAIRED, PAIRED_WEIGHTS, DOWN_WEIGHTS, TANGENT):
    _op.follow_reference()


@dataclasses.dataclass(frozen=True)
class Options:
    """The parameters that the primitives have in common. References lack parameters of kernels."""

    activation: Activation
    precision: Any
    implementation: Implementation = None
    tile_choices: TileChoices = TileChoices()
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
        """Returns checked options, with the current choices of tiles.

        Without `zeroes_unowned`, rows that no local group owns are undefined, in results and
        gradients. `max_sms` limits the products of weights' gradients that run while the gradient
        of x may travel to other devices.

        Raises:
          ValueError: `precision` or `implementation` is invalid.
        """
        precision = canonical_precision(precision)
        implementation = checked_implementation(implementation)
        tiles = current_tiles()
        return cls(activation, precision, implementation, tiles, zeroes_unowned, max_sms)

    @property
    def of_products(self) -> dict[str, Any]:
        """The options of operations without an activation."""
        return {name: x for name, x in vars(self).items() if name != "activation"}


def bind(op: Op, operands: Any, **params: Any) -> Any:
    """Binds a primitive to the operands that are given."""
    leaves, tree = jax.tree.flatten(operands)
    return op.bind(*leaves, tree=tree, **params)
