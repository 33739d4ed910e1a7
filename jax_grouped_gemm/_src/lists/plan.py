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
    Plan,
    Table,
    TiledKernel,
    able,
    format_reason,
    passed_over,
    refusals,
    symbolic_sizes,
)
from jax_grouped_gemm._src.sizes import too_large

PRODUCTS = dataclasses.replace(XLA, work=lambda problem: problem.xla_work())
"""The row of XLA's products, in the tables of both operations."""

P = TypeVar("P", GroupedGemmProblem, RankKProblem)
ListPlan = TypeVar("ListPlan", bound=Plan[Any])


def plan_list(
    make: Callable[..., ListPlan],
    problem: P,
    table: Table,
    avals: Sequence[Any],
    params: Mapping[str, Any],
    target: Target,
    launch: Callable[[P, P, Sequence[TiledKernel], Target], ListPlan],
) -> ListPlan:
    """Plans a list: with a kernel, or with XLA where no kernel runs or XLA is faster.

    Args:
      make: the type of the plan.
      problem: the problem of the primitive.
      table: the table of the operation.
      avals, params: operands and parameters of the primitive.
      target: the device.
      launch: called as `launch(problem, addressable, kernels, target)` with the problem, padded so
        that kernels can address its rows, and the kernels that can run it. Returns a plan without
        the fields that both operations have in common.
    """
    implementation, (compiled, xla) = params["implementation"], table
    taking = [kernel for kernel in compiled if kernel.takes(*problem.formats)]
    if reason := (
        AS_ASKED * (implementation == "xla")
        or too_large(problem.sizes())
        or format_reason(compiled, problem)
        or taking[0].precision_reason(params["precision"], implementation)
        or symbolic_sizes(avals)
    ):
        return make(problem, xla, reason)
    if problem.nothing:
        return make(problem, NOTHING, problem.nothing)
    # Kernels write the type of their operands, or float32.
    is_same, terms = problem.result_dtype == problem.dtype, problem.terms
    written = problem.result_dtype if is_same else np.dtype(np.float32)
    # TMA addresses the float16 parts of float32 operands.
    dtype, aligned = float32.PART_DTYPE if terms else problem.dtype, taking[0].alignment
    multiples = max(aligned // dtype.itemsize, 1), max(aligned // written.itemsize, 1)
    addressable = problem.padded(multiples, written)
    reasons = refusals(compiled, addressable)
    if all(reasons.values()):
        return make(problem, xla, reasons[taking[0]])
    found = launch(problem, addressable, able(reasons), target)
    if reason := faster_reason(xla, found, target, implementation):
        return make(problem, xla, reason)
    return dataclasses.replace(
        found,
        reason=problem.copy_reason(addressable) if aligned > 1 else "",
        terms=terms,
        passed_over=passed_over(reasons, *(x.kernel for x in getattr(found, "launches", [found]))),
        notes=(float32.described(terms),) if terms else (),
    )
