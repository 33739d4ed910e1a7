"""Plans layers of few tokens, whose kernels sort tokens by expert."""

from __future__ import annotations

import dataclasses
import functools

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.mlp.operands import DecodeOperands
from jax_grouped_gemm._src.mlp.packed.api import dequantized_reason
from jax_grouped_gemm._src.mlp.plan import MlpPlan, plan_mlp, plan_packed
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.plan import AS_ASKED, COMPOSED, TMA_ALIGNMENT_BYTES

MOST_PAIRS = 128
MOST_EXPERTS = 512
"""The most pairs of a token and an expert that kernels sort, and the most experts."""

SORTS = "the kernels sort tokens by expert"
SORTING_SCHEDULES = "few_rows", "streamed"


def too_many_reason(pairs: int, experts: int) -> str:
    """Returns why no kernel sorts so many pairs by so many experts, empty if one does."""
    if pairs <= MOST_PAIRS and experts <= MOST_EXPERTS:
        return ""
    return f"more than {MOST_PAIRS} pairs, or more than {MOST_EXPERTS} experts"


def plan_decode(problem: MlpProblem[DecodeOperands], target: Target) -> MlpPlan:
    """Plans a layer of few tokens. If no kernel can sort, other operations sort rows first."""
    given, params = problem.operands, problem.params
    implementation, experts = params["implementation"], given.experts
    sizes = *given.chosen.shape, params["num_experts"]
    composed = functools.partial(MlpPlan, problem, COMPOSED, target=target)
    if implementation == "xla":
        return composed(AS_ASKED)
    if is_invariant(implementation) and (experts.quantized or experts.bo is not None):
        # These kernels cut sums, or add the bias of down before a result is rounded.
        return composed("batch invariance has other kernels")
    if not is_static(*sizes) or 0 in sizes:
        return composed("sizes are unknown, or zero")
    if reason := too_many_reason(given.chosen.size, sizes[-1]):
        return composed(reason)
    of_rows = given.of_rows(sizes[-1])
    if experts.quantized:
        if reason := dequantized_reason(of_rows, params):
            return composed(reason)
        formats = {(x.format.name, x.format.group_size) for x in experts.quantized.values()}
        if len(formats) > 1:
            return composed("the matrices have different formats")
    plan_of = plan_packed if experts.quantized else plan_mlp
    found = plan_of(MlpProblem("gated_ragged_dot", of_rows, {**params, "residuals": False}), target)
    if found.reason:
        return composed(found.reason)
    # Joined gate and up have twice as long rows as the hidden layer, so check the hidden layer too.
    row_bytes = experts.hidden_columns * given.x.dtype.itemsize
    if experts.wi is not None and row_bytes % TMA_ALIGNMENT_BYTES:
        return composed("rows of the hidden layer are not a multiple of 16 bytes")
    if any(of.launched[1].schedule not in SORTING_SCHEDULES for of in found.packed or [found]):
        return composed("groups of this many rows have another kernel")
    notes = SORTS, *found.notes
    return dataclasses.replace(found, problem=problem, kernel_problem=problem, notes=notes)
