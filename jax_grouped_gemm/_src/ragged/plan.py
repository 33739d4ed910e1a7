"""Plans of the ragged products."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jax import lax

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import is_static, round_up
from jax_grouped_gemm._src.device import H200, Prediction, Target, predict
from jax_grouped_gemm._src.fallback import faster_reason
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    KERNEL_OPERAND_DTYPES,
    KERNEL_RESULT_DTYPES,
    Choice,
    Plan,
    TileConfig,
    choose,
    runnable,
)
from jax_grouped_gemm._src.ragged import whole
from jax_grouped_gemm._src.ragged.problem import (
    ACCUMULATE,
    RATIOS,
    RaggedProblem,
    addressable_problem,
    can_be_skewed,
    copy_reason,
    count_tiles,
    rows_stay,
    tile_utilization,
    workspace_bytes,
)
from jax_grouped_gemm._src.ragged.tiles import FLOAT32, FLOAT32_EXACT, SIXTEEN_BITS
from jax_grouped_gemm._src.sizes import too_large


def table_for(problem: RaggedProblem, precision: Any) -> tuple[Choice, ...]:
    """The configurations for operands that are not FP8."""
    if not problem.is_float32:
        return SIXTEEN_BITS
    return FLOAT32_EXACT if float32.num_terms(precision) == float32.FULL_TERMS else FLOAT32


RaggedPlan = Plan[RaggedProblem]

SYMBOLIC_ROWS_OF_GROUP = 128
"""What a plan takes for the average rows of a group where their number is symbolic."""

R = TypeVar("R", bound=RaggedProblem)


def plan_noncontracting(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> RaggedPlan:
    """Plans a `ragged_noncontracting` from its operands' abstract values and its parameters."""
    return _plan(RaggedProblem.noncontracting(avals, params), params, target)


def plan_contracting(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> RaggedPlan:
    """Plans a `ragged_contracting` from its operands' abstract values and its parameters."""
    return _plan(RaggedProblem.contracting(avals, params), params, target)


def plan_accumulate(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> RaggedPlan:
    """Plans a `ragged_accumulate` from its operands' abstract values and its parameters."""
    accumulator, *operands = avals
    options = {
        **params,
        "num_groups": accumulator.shape[-3],
        "preferred_element_type": accumulator.dtype,
    }
    problem = RaggedProblem.contracting(operands, options)
    problem = dataclasses.replace(problem, op=ACCUMULATE)
    plan = _plan(problem, params, target)
    if plan.kernel_problem is None:
        return plan
    how = (
        "added in place by the kernel"
        if plan.kernel_problem.accumulates
        else "written to memory and added by XLA: the kernels add products of 16-bit "
        "operands to rows that need no padding"
    )
    return dataclasses.replace(plan, notes=(how, *plan.notes))


def _plan(problem: RaggedProblem, params: Mapping[str, Any], target: Target) -> RaggedPlan:
    plan = plan_product(
        problem,
        params,
        target,
        table=table_for(problem, params["precision"]),
        form=_kernel_form(problem),
        unsupported=_unsupported_reason(problem, params),
    )
    if plan.prediction is None or plan.tile is None or plan.chosen_by == "override":
        return plan
    reason = faster_reason(
        whole.xla_work(problem, plan.terms),
        plan.prediction,
        plan.tile,
        target,
        params["implementation"],
    )
    if not reason:
        return plan
    return Plan(problem, "whole", reason, terms=plan.terms, product=plan.product)


def _unsupported_reason(problem: RaggedProblem, params: Mapping[str, Any]) -> str:
    """Why no kernel for operands of one dtype can run `problem`, empty if one can."""
    dtypes = f"{problem.lhs_dtype} x {problem.rhs_dtype} -> {problem.out_dtype}"
    if (
        problem.lhs_dtype != problem.rhs_dtype
        or problem.lhs_dtype not in KERNEL_OPERAND_DTYPES
        or problem.out_dtype not in KERNEL_RESULT_DTYPES
    ):
        return (
            f"no kernel for {dtypes}: the kernels take two bfloat16, float16 or float32 operands "
            "and return bfloat16, float16 or float32"
        )
    if isinstance(params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"the kernels do not implement precision={params['precision']}"
    return ""


def _kernel_form(problem: RaggedProblem) -> RaggedProblem:
    """`problem` with the layouts and the result's dtype that the kernels have.

    No operand has contiguous rows, and the result has the operands' dtype or float32. Kernels that
    accumulate add products of 16-bit operands, to results that TMA can address as they are.
    """
    rhs = "mn" if problem.contracts_rows else problem.rhs
    form = dataclasses.replace(problem, lhs="mk", rhs=rhs)
    if problem.out_dtype != problem.lhs_dtype:
        form = dataclasses.replace(form, out_dtype=np.dtype(np.float32))
    if problem.accumulates:
        is_padded = addressable_problem(form).shape(form.out) != form.shape(form.out)
        if is_padded or form.is_float32:
            form = dataclasses.replace(form, op="ragged_contracting")
    return form


def plan_product(
    problem: R,
    params: Mapping[str, Any],
    target: Target,
    *,
    table: Sequence[Choice],
    form: R,
    unsupported: str,
) -> Plan[R]:
    """Plans a ragged product of any operands.

    Args:
      problem: what is computed.
      params: of the primitive.
      target: the device to plan for.
      table: the configurations of the kernels.
      form: `problem` with the layouts and the result's dtype that the kernels have.
      unsupported: why no kernel can run it, empty if one can.

    Raises:
      ValueError: the parameter `tile` is no configuration that runs `problem`.
    """
    product = params.get("product")
    override = params.get("tile")
    compiled = runnable(table, form)
    unsupported = unsupported or _size_reason(problem)
    if override is not None and not unsupported:
        _check_compiled(override, compiled, problem)
    if params["implementation"] == "reference":
        return Plan(problem, "reference", AS_ASKED, product=product)
    if unsupported:
        return Plan(problem, "reference", unsupported, product=product)
    if 0 in (*problem.batch, problem.num_groups, *problem.shape("mkng")):
        return Plan(problem, "zeros", "there is nothing to multiply", product=product)
    exact = problem
    if not is_static(exact.m):
        rows = SYMBOLIC_ROWS_OF_GROUP * exact.num_groups
        problem, form = (dataclasses.replace(x, m=rows) for x in (problem, form))
    addressable = addressable_problem(form)
    compiled = runnable(table, addressable)
    if override is None:
        # A size that is not known yet may be any, which the default is never far too slow for.
        choice = choose(compiled, addressable, target) if problem is exact else compiled[0]
    else:
        choice = next(choice for choice in compiled if choice.tile == override)
    tile, places = choice.tile, choice.places(target)
    terms = float32.num_terms(params["precision"]) if problem.is_float32 else 0
    useful = math.prod(problem.shape("mkn")) / math.prod(addressable.shape("mkn"))
    utilization = tile_utilization(addressable, tile, places) * useful
    reason = copy_reason(problem, addressable)
    kernel_problem = addressable
    if problem is not exact:
        kernel_problem = dataclasses.replace(addressable, m=exact.m)
    return Plan(
        problem=exact,
        path="copied" if reason else "tma",
        reason=reason,
        kernel_problem=kernel_problem,
        tile=tile,
        grid=_grid(addressable, tile, places),
        workspace_bytes=workspace_bytes(kernel_problem, tile, terms, target),
        terms=terms,
        utilization=utilization,
        prediction=_prediction(problem, tile, terms, utilization, target),
        chosen_by="default" if override is None else "override",
        candidates=tuple(choice.tile for choice in compiled),
        product=product,
        notes=(float32.described(terms, few_rows=tile.transposed),) if terms else (),
    )


def _size_reason(problem: RaggedProblem) -> str:
    """Returns which sizes of `problem` no kernel takes, or an empty string."""
    sizes = {name: getattr(problem, name) for name in "mkng"}
    sizes |= dict(zip(["the batch"], problem.batch, strict=False))
    if reason := too_large(sizes | problem.counts()):
        return reason
    symbolic = {name: size for name, size in sizes.items() if not is_static(size)}
    # Rows that stay where they are need nothing of the plan but a workspace of a symbolic size.
    if not symbolic or (rows_stay(problem) and list(symbolic) == ["m"]):
        return ""
    found = ", ".join(f"{name} = {size}" for name, size in symbolic.items())
    return (
        "only m of a product [m, k] x [g, k, n] may be symbolic for a kernel; k, n, g, the batch, "
        f"and m of a weight gradient must be static, got {found}"
    )


def _check_compiled(tile: TileConfig, compiled: Sequence[Choice], problem: RaggedProblem) -> None:
    tiles = [choice.tile for choice in compiled]
    if tile not in tiles:
        raise ValueError(
            f"use_tiles has the tile {tile} for {problem}, which is not compiled. Compiled are: "
            + "; ".join(map(str, tiles))
        )


def _grid(problem: RaggedProblem, tile: TileConfig, places: int) -> int:
    if can_be_skewed(problem, tile):
        return places
    num_tiles = count_tiles(problem, tile)
    if tile.stream_k:
        most_ranges, _ = RATIOS[0]
        num_tiles *= most_ranges
    return min(round_up(num_tiles, tile.cluster), places)


def _prediction(
    problem: RaggedProblem, tile: TileConfig, terms: int, utilization: float, target: Target
) -> Prediction:
    """For groups of equal size, those outside the window included."""
    lhs_bytes, rhs_bytes, result_bytes = problem.array_bytes()
    if problem.accumulates:
        result_bytes *= 2
    products, operand_bytes, split_bytes = 1, lhs_bytes + rhs_bytes, 0.0
    if terms and tile.transposed:
        products = float32.few_rows_products(terms)
    elif terms:
        products = terms
        operand_bytes, split_bytes = float32.bytes_of_split(operand_bytes, terms)
    return predict(
        problem.lhs_dtype,
        multiply_adds=problem.multiply_adds,
        utilization=utilization,
        num_bytes=operand_bytes + result_bytes,
        target=target,
        products=products,
        split_bytes=split_bytes,
    )
