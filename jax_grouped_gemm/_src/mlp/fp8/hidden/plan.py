"""Plans of the elementwise steps of an MLP in FP8: a kernel each, or XLA's passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer
from jax_grouped_gemm._src.mlp.fp8.hidden.problem import HiddenProblem
from jax_grouped_gemm._src.mlp.problem import DTYPE
from jax_grouped_gemm._src.plan import AS_ASKED, COMPOSED, XLA, Kernel, Plan, symbolic_sizes
from jax_grouped_gemm._src.sizes import too_large_operands

HiddenPlan = Plan[HiddenProblem]


def _plan(op: str, avals: Sequence[Any], params: Mapping[str, Any], unfused: str) -> HiddenPlan:
    problem = HiddenProblem(op, params["layer"], params.get("joined", False))
    if params["implementation"] == "xla":
        return Plan(problem, XLA, AS_ASKED)
    if reason := too_large_operands(avals):
        return Plan(problem, XLA, reason)
    if unfused:
        return Plan(problem, COMPOSED, unfused)
    return Plan(problem, Kernel(op), kernel_problem=problem)


def _unfused_reason(layer: HiddenLayer, avals: Sequence[Any]) -> str:
    projections = avals[0]
    if not layer.has_up:
        return "the kernels multiply gate and up, and there is no up"
    epilogue = Epilogue.of(layer.activation)
    if epilogue is None or not epilogue.is_sigmoid:
        return f"no kernel has the activation {layer.activation}"
    dtypes = {x.dtype for x in (projections, *avals[1:-1])}
    if dtypes != {DTYPE}:
        found = " and ".join(sorted(map(str, dtypes)))
        return f"the kernels take operands of {DTYPE}, got {found}"
    if reason := symbolic_sizes(avals):
        return reason
    return "there is nothing to compute" if any(0 in x.shape for x in avals) else ""


def plan_hidden(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> HiddenPlan:
    """Plans a `quantize_hidden`."""
    return _plan("quantize_hidden", avals, params, _unfused_reason(params["layer"], avals))


def plan_gradients(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> HiddenPlan:
    """Plans a `quantize_gradients`."""
    return _plan("quantize_gradients", avals, params, _unfused_reason(params["layer"], avals))


def plan_ragged_gradients(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> HiddenPlan:
    """Plans a `quantize_ragged_gradients`."""
    reason = unfused_ragged_reason(params["layer"], avals)
    return _plan("quantize_ragged_gradients", avals, params, reason)


def unfused_ragged_reason(layer: HiddenLayer, avals: Sequence[Any]) -> str:
    """Why no kernel computes a `quantize_ragged_gradients`, empty if one does."""
    _, dh, _, group_sizes = avals
    if reason := _unfused_reason(layer, avals[:3]):
        return reason
    if reason := symbolic_sizes(avals):
        return reason
    if 0 in group_sizes.shape:
        return "there are no groups"
    return f"the kernel has columns in eights, got {dh.shape[1]}" if dh.shape[1] % 8 else ""
