"""Plans lists of products and lists of symmetric updates, which have different kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.fallback import faster_reason
from jax_grouped_gemm._src.lists.grouped_gemm.problem import GroupedGemmProblem
from jax_grouped_gemm._src.lists.rank_k.problem import RankKProblem
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    NOTHING,
    XLA,
    TiledKernel,
    able,
    format_reason,
    passed_over,
    predict_problem,
    refusals,
    symbolic_sizes,
)
from jax_grouped_gemm._src.sizes import too_large


@dataclasses.dataclass(frozen=True)
class Launched:
    """The launches that compute a problem.

    Attributes:
      kernel, grid, workspace_bytes, utilization: see `Plan`.
      rate: share of the tensor cores' rate that the kernel can reach.
      fields: other fields of the plan.
    """

    kernel: TiledKernel
    grid: int
    utilization: float
    workspace_bytes: int = 0
    rate: float = 1.0
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


P = TypeVar("P", GroupedGemmProblem, RankKProblem)


def plan_list(
    make: Callable[..., Any],
    problem: P,
    table: Sequence[TiledKernel],
    avals: Sequence[Any],
    params: Mapping[str, Any],
    target: Target,
    launch: Callable[[P, P, Sequence[TiledKernel], Target], Launched],
) -> Any:
    """Plans a list: with a kernel, or with XLA where no kernel runs or XLA is faster.

    Args:
      make: the type of the plan.
      problem: the problem of the primitive.
      table: the kernels of the operation.
      avals, params: operands and parameters of the primitive.
      target: the device.
      launch: called as `launch(problem, addressable, kernels, target)` with the problem, padded so
        that kernels can address its rows, and the kernels that can run it.
    """
    implementation = params["implementation"]
    taking = [kernel for kernel in table if kernel.takes(*problem.formats)]
    reason = AS_ASKED if implementation == "xla" else too_large(problem.sizes())
    if reason := reason or format_reason(table, problem):
        return make(problem, XLA, reason)
    reason = taking[0].precision_reason(params["precision"], implementation)
    if reason := reason or symbolic_sizes(avals):
        return make(problem, XLA, reason)
    if problem.nothing:
        return make(problem, NOTHING, problem.nothing)
    # Kernels write the type of their operands, or float32.
    is_same, terms = problem.result_dtype == problem.dtype, problem.terms
    written = problem.result_dtype if is_same else np.dtype(np.float32)
    # TMA addresses the float16 parts of float32 operands.
    dtype, aligned = float32.PART_DTYPE if terms else problem.dtype, taking[0].alignment
    multiples = max(aligned // dtype.itemsize, 1), max(aligned // written.itemsize, 1)
    addressable = problem.padded(multiples, written)
    reasons = refusals(table, addressable)
    if all(reasons.values()):
        return make(problem, XLA, reasons[taking[0]])
    found = launch(problem, addressable, able(reasons), target)
    taken = [launch.kernel for launch in found.fields.get("launches", [found])]
    prediction = predict_problem(problem, found.kernel, found.utilization * found.rate, target)
    of_xla, tile = problem.xla_work(), found.kernel.tile
    if reason := faster_reason(of_xla, prediction, tile, target, implementation):
        return make(problem, XLA, reason)
    return make(
        problem=problem,
        kernel=found.kernel,
        reason=problem.copy_reason(addressable) if aligned > 1 else "",
        kernel_problem=addressable,
        grid=found.grid,
        workspace_bytes=found.workspace_bytes,
        terms=terms,
        utilization=found.utilization,
        prediction=prediction,
        passed_over=passed_over(reasons, *taken),
        notes=(float32.described(terms),) if terms else (),
        **found.fields,
    )
