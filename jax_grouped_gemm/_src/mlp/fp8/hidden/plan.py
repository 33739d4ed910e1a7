"""Plans of the elementwise steps of an MLP in FP8: a kernel each, or XLA's passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    COMPOSED,
    XLA,
    Kernel,
    Plan,
    operand_reason,
    symbolic_sizes,
)
from jax_grouped_gemm._src.sizes import too_large_operands


@dataclasses.dataclass(frozen=True)
class HiddenProblem:
    """Static description of one elementwise step: the name of its operation, its layer, and
    whether its results are `JoinedGradients`."""

    op: str
    layer: HiddenLayer
    joined: bool

    def __str__(self) -> str:
        return f"{self.op} {self.layer}"


HiddenPlan = Plan[HiddenProblem]

STEP_KERNELS = {
    name: Kernel(name, lhs=("bfloat16",))
    for name in ("quantize_hidden", "quantize_gradients", "quantize_ragged_gradients")
}


def plan_step(
    op: str, avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> HiddenPlan:
    """Plans the step `op` from its operands' avals and its parameters."""
    problem = HiddenProblem(op, params["layer"], params.get("joined", False))
    is_asked = params["implementation"] == "xla"
    if reason := AS_ASKED if is_asked else too_large_operands(avals):
        return Plan(problem, XLA, reason)
    if reason := unfused_reason(op, problem.layer, avals):
        return Plan(problem, COMPOSED, reason)
    return Plan(problem, STEP_KERNELS[op], kernel_problem=problem)


def unfused_reason(op: str, layer: HiddenLayer, avals: Sequence[Any]) -> str:
    """Returns why no kernel computes the operation, an empty string if one does."""
    arrays = [x for x in avals if x.ndim > 1]
    if not layer.has_up:
        return "the kernels multiply gate and up, and there is no up"
    epilogue = Epilogue.of(layer.activation)
    if epilogue is None or not epilogue.is_sigmoid:
        return f"no kernel has the activation {layer.activation}"
    dtypes = " and ".join(sorted({x.dtype.name for x in arrays}))
    if reason := operand_reason(STEP_KERNELS[op], dtypes) or symbolic_sizes(avals):
        return reason
    if any(0 in x.shape for x in arrays):
        return "there is nothing to compute"
    if op != "quantize_ragged_gradients":
        return ""
    columns = arrays[1].shape[1]
    return f"the kernel needs a multiple of 8 columns, got {columns}" if columns % 8 else ""
