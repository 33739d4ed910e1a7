"""Plans optimiser steps: the kernel runs a step, or the reference does for a given reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.optimizer.problem import Layout, UpdateProblem
from jax_grouped_gemm._src.plan import AS_ASKED, XLA, Kernel, Plan, symbolic_sizes
from jax_grouped_gemm._src.sizes import too_large_operands

UpdatePlan = Plan[UpdateProblem]

MOMENTS = {"adamw_quantized": 2, "apply_and_quantize": 0}
"""Number of moments that each step takes, between the gradient or update and the weights."""
KERNELS = {name: Kernel(name) for name in MOMENTS}
"""The kernel of each step."""


def plan_update(
    op: str, avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> UpdatePlan:
    """Returns the plan of the step `op` for operands `avals` and parameters `params`."""
    (_, *given), moments = avals, MOMENTS[op]
    changes, master, forms = given[: 1 + moments], given[1 + moments], given[2 + moments :]
    layout: Layout = params["layout"]
    dtype = np.dtype(next(x.dtype for x in forms if x.dtype.itemsize == 1))
    dtypes = tuple(np.dtype(x.dtype) for x in changes)
    problem = UpdateProblem(op, layout.flat(master), dtypes, dtype, layout, params["power_of_two"])
    reason = _reason(problem, master, params)
    return Plan(problem, XLA if reason else KERNELS[op], reason)


def _reason(problem: UpdateProblem, master: Any, params: Mapping[str, Any]) -> str:
    if params["implementation"] == "xla":
        return AS_ASKED
    if reason := symbolic_sizes([master]):
        return reason
    if 0 in problem.shape:
        return "there is nothing to update"
    flat = jax.ShapeDtypeStruct(problem.shape, np.dtype(np.float32))
    return too_large_operands([flat, *problem.layout.forms(master, problem.dtype)])
