"""The primitive of an FP8 layer of few tokens.

JAX differentiates and vectorises the layer of sorted rows in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.fallback import with_policy
from jax_grouped_gemm._src.mlp.decode.primitive import sorted_operands
from jax_grouped_gemm._src.mlp.fp8.decode import call
from jax_grouped_gemm._src.mlp.fp8.decode.operands import Fp8DecodeOperands
from jax_grouped_gemm._src.mlp.fp8.decode.plan import Fp8DecodeProblem, plan_decode
from jax_grouped_gemm._src.mlp.fp8.layer import fp8_mlp
from jax_grouped_gemm._src.mlp.fp8.products import Layer
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.mlp.primitive import bind
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import is_split_explicitly
from jax_grouped_gemm._src.plan import COMPOSED


def is_taken(operands: Fp8DecodeOperands, num_experts: int, layer: Layer) -> bool:
    """Whether kernels of the layer sort tokens. The answer follows from shapes alone, because a
    program is traced before its device is known. Operands that are split along explicit axes are
    left to the operations on sorted rows, which can split more dimensions."""
    leaves = [jax.typeof(x) for x in jax.tree.leaves(operands)]
    params = _params(num_experts, layer)
    plan = plan_decode(Fp8DecodeProblem(NAME, operands, with_policy(params, per_row=True)), H200)
    return plan.kernel != COMPOSED and not is_split_explicitly(leaves)


def mlp(operands: Fp8DecodeOperands, num_experts: int, layer: Layer) -> jax.Array:
    """Returns y [T, D]: for each token, the sum over its experts."""
    return bind(DECODE, operands, **_params(num_experts, layer))


def sorted_mlp(operands: Fp8DecodeOperands, num_experts: int, layer: Layer) -> jax.Array:
    """Returns y [T, D], by operations of rows that are sorted by expert."""
    rows = sorted_operands(operands.given, num_experts, layer.implementation)
    return fp8_mlp(layer, rows.aligned(), operands.quantized)


def _params(num_experts: int, layer: Layer) -> dict[str, Any]:
    return dict(num_experts=num_experts, layer=layer, implementation=layer.implementation)


def _reference(
    *leaves: jax.Array, tree: Any, num_experts: int, layer: Layer, implementation: Any = None
) -> jax.Array:
    layer = dataclasses.replace(layer, implementation=implementation)
    return sorted_mlp(tree.unflatten(leaves), num_experts, layer)


def _aval(*leaves: Any, tree: Any, layer: Layer, **_: Any) -> Any:
    shape = tree.unflatten(leaves).given.x.shape
    return DECODE.unsharded_aval(leaves, shape, layer.dtypes.out)


def _plan(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> MlpPlan:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return plan_decode(Fp8DecodeProblem(NAME, params["tree"].unflatten(shapes), params), target)


NAME = "decode_fp8_mlp"

DECODE = Op(
    name=NAME,
    per_row=True,
    operand_ranks=None,
    targets=(call.TARGET,),
    avals=_aval,
    planner=_plan,
    call=call.decode,
    reference=_reference,
)
DECODE.follow_reference()
