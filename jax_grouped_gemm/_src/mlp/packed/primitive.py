"""The MLP of experts whose matrices are packed, by kernels that read packed matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.mlp import layer, plan
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import MlpOperands, named
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.mlp.primitive import LETTERS, OF_ROWS, Options, bind
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, own_letters
from jax_grouped_gemm._src.quantized import call
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.plan import dequantized_reason as why_dequantized
from jax_grouped_gemm._src.quantized.weights import with_arrays
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.tile_choices import OPTIONS, TileChoices

_NO_CHOICES = TileChoices()


def mlp(function: str, options: Options, operands: MlpOperands) -> jax.Array:
    """Computes `layer.mlp` with quantised matrices packed or dequantised, whichever is faster.

    Args:
      function: the public function, for messages.
      options: parameters of the primitive.
      operands: operands; any matrix may be quantised.
    """
    reason = "" if not operands.experts.quantized else dequantized_reason(operands, options)
    if not reason and layer.closes_over_traced(options, operands):
        reason = "activation closes over traced values"
    if operands.experts.quantized and not reason:
        return bind(PACKED_MLP, operands, **vars(options))
    return _dequantized(function, options, operands, reason)


def dequantized_reason(operands: MlpOperands, options: Options) -> str:
    """Why weights are dequantised before they are multiplied, empty if kernels read them packed."""
    experts = operands.experts
    if len(experts.quantized) < len(experts.matrices):
        return "not all matrices are quantised"
    if experts.wi is not None:
        return "gate and up are one matrix"
    if Epilogue.of(options.activation) is None:
        return f"no kernel has the activation {options.activation}"
    asked = options.precision, options.implementation
    return why_dequantized(operands.packed_products, operands, *asked)


def _dequantized(function: str, options: Options, operands: MlpOperands, reason: str) -> jax.Array:
    def of_arrays(experts: Any) -> jax.Array:
        given = MlpOperands(operands.rows, experts, operands.weights, operands.groups)
        return layer.mlp(options, given.promoted())

    return with_arrays(function, of_arrays, operands.experts, x=operands.rows.x, reason=reason)


def _aval(*leaves: Any, tree: Any, **_: Any) -> Any:
    given: MlpOperands = tree.unflatten(leaves)
    experts = given.experts
    columns = experts.hidden_columns if experts.wo is None else experts.wo.shape[2]
    return PACKED_MLP.unsharded_aval(leaves, (given.num_rows, columns), given.rows.x.dtype)


def _call(of_mlp: MlpPlan, *leaves: jax.Array) -> jax.Array:
    given: MlpOperands = of_mlp.problem.given(leaves)
    of_hidden, *of_down = of_mlp.packed
    experts, weights, params = given.experts, given.weights, of_mlp.problem.params
    weights = None if weights is None else weights.astype(jnp.float32)
    arrays = {name: matrices.arrays for name, matrices in experts.quantized.items()}
    activation = Epilogue.of(params["activation"])
    assert activation is not None  # the plan has a kernel
    indices, options = given.groups.indices, dict(zeroes_unowned=params["zeroes_unowned"])
    optional = dict(rows=given.rows.rows, b0=experts.b0, b1=experts.b1, weights=weights)
    hidden = call.dot(
        of_hidden,
        given.rows.x,
        arrays["wi_0"],
        indices,
        optional,
        up=arrays.get("wi_1"),
        activation=dict(activation.attributes(), function=np.int32(activation.function)),
        **options,
    )
    if not of_down:
        return hidden
    of_bias = dict(bo=experts.bo, weights=None if experts.bo is None else weights)
    return call.dot(of_down[0], hidden, arrays["wo"], indices, of_bias, **options)


def _reference(
    *leaves: jax.Array,
    tree: Any,
    activation: Any,
    precision: Any,
    implementation: Any = None,
    tile_choices: TileChoices = _NO_CHOICES,
    **options: Any,
) -> jax.Array:
    of_primitives = Options(activation, precision, implementation, tile_choices, **options)
    return _dequantized("ragged_mlp", of_primitives, tree.unflatten(leaves), "")


def _dims(operands: Any, *_: Any, tree: Any, **params: Any) -> Dims:
    """Names dimensions: only rows are split, without tokens. Packed matrices are gathered."""
    given = named(tree.unflatten(range(tree.num_leaves)))
    whole, specs = [*"KDFGTok"], []
    letters = LETTERS | (OF_ROWS if "rows" in given else {})
    if "rows" in given:
        whole += "m"
    for name, place in given.items():
        for i in jax.tree.leaves(place):
            of_matrix = isinstance(place, QuantizedArray)
            spec = own_letters(i, operands[i]) if of_matrix else [*letters[name]]
            whole += [letter for letter in spec if letter != "m"]
            specs.append(spec)
    return Dims.of(*specs, to="mD", whole=whole)


PACKED_MLP = Op(
    name="packed_mlp",
    per_row=True,
    operand_ranks=None,
    targets=(call.STREAMED, call.DECODED),
    avals=_aval,
    planner=plan.planner("packed_mlp", plan.plan_packed),
    planned=OPTIONS,
    call=_call,
    reference=_reference,
    dims=_dims,
    localizer=slices.of_groups,
)
PACKED_MLP.follow_reference()
