"""Plans layers of few tokens, whose kernels sort tokens by expert."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.mlp import plan
from jax_grouped_gemm._src.mlp.operands import (
    DecodeOperands,
    DownOperands,
    Groups,
    MlpOperands,
    Rows,
)
from jax_grouped_gemm._src.mlp.packed.primitive import dequantized_reason
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.plan import AS_ASKED, COMPOSED, XLA

MOST_PAIRS = 128
MOST_EXPERTS = 512
"""The most pairs of a token and an expert that kernels sort, and the most experts."""

SORTS = "the kernels sort tokens by expert"
TOO_MANY = f"more than {MOST_PAIRS} pairs of tokens and experts, or than {MOST_EXPERTS} experts"
TOO_LONG = "groups of so many rows have another kernel"


def plan_decode(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> MlpPlan:
    """Plans a `decode_mlp`."""
    return plan_of(plan.problem_of("decode_mlp", avals, params), target)


def plan_of(problem: MlpProblem[DecodeOperands], target: Target) -> MlpPlan:
    """Plans a layer of few tokens. Without a kernel that sorts, rows are sorted before."""
    given, params = problem.operands, problem.params
    composed = functools.partial(MlpPlan, problem, target=target)
    if params["implementation"] == "xla":
        return composed(XLA, AS_ASKED)
    if is_invariant(params["implementation"]):
        return composed(COMPOSED, "batch invariance has other kernels")
    sizes = *given.chosen.shape, params["num_experts"]
    if not is_static(*sizes) or 0 in sizes:
        return composed(COMPOSED, "sizes are unknown, or zero")
    if given.chosen.size > MOST_PAIRS or params["num_experts"] > MOST_EXPERTS:
        return composed(COMPOSED, TOO_MANY)
    operands = _sorted(given, params["num_experts"])
    of_sorted = MlpProblem("gated_ragged_dot", operands, dict(params, residuals=False))
    if operands.experts.quantized:
        names = (field.name for field in dataclasses.fields(Options))
        options = Options(**{name: params[name] for name in names})
        if reason := dequantized_reason(operands, options):
            return composed(COMPOSED, reason)
        found = plan.packed_plan(of_sorted, target)
        if any(of.launched[1].schedule != "streamed" for of in found.packed):
            return composed(COMPOSED, TOO_LONG)
    else:
        if reason := _unsuitable(of_sorted):
            return composed(COMPOSED, reason)
        found = MlpPlan(
            of_sorted,
            plan.FORWARD_KERNELS[-1],
            epilogue=plan.epilogue_of(operands.experts, operands.weights, params["activation"]),
            gather="in place",
            target=target,
        )
    notes = SORTS, *found.notes
    return dataclasses.replace(found, problem=problem, kernel_problem=problem, notes=notes)


def _sorted(given: DecodeOperands, num_experts: int) -> MlpOperands:
    """Returns the abstract operands of the MLP of sorted rows."""

    def struct(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens, choices = given.chosen.shape
    rows = Rows(given.x, struct(tokens * choices), struct(tokens, choices))
    weights = struct(tokens * choices, dtype=given.scores.dtype)
    return MlpOperands(rows, given.experts, weights, Groups(struct(num_experts), struct(1)))


def _unsuitable(problem: MlpProblem[MlpOperands]) -> str:
    """Why not both products have the kernel for few rows, empty if they do."""
    operands = problem.operands
    experts = operands.experts
    if experts.wo is None:
        return "there is no down projection"
    shape = operands.num_rows, experts.hidden_columns
    hidden: Any = jax.ShapeDtypeStruct(shape, operands.dtype)
    down = DownOperands(hidden, experts.wo, experts.bo, operands.weights, operands.groups)
    of_hidden = dataclasses.replace(problem, operands=operands.with_experts(wo=None, bo=None))
    for product in of_hidden, MlpProblem("biased_ragged_dot", down, problem.params):
        if reason := plan.unfused_reason(product):
            return reason
        if not plan.has_few_rows(product):
            return TOO_LONG
    return ""
