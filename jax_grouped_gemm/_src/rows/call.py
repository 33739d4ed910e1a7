"""Custom calls of the operations on rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.plan import NOTHING
from jax_grouped_gemm._src.rows.plan import RowsPlan

SORT_TARGET = "jax_grouped_gemm.sort_by_expert.v1"
GATHER_TARGET = "jax_grouped_gemm.gather_rows.v1"
DISPATCH_TARGET = "jax_grouped_gemm.dispatch_rows.v1"
COMBINE_TARGET = "jax_grouped_gemm.combine_rows.v1"
DOTS_TARGET = "jax_grouped_gemm.row_dots.v1"


def sort(plan: RowsPlan, experts: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, which must not be `XLA`, on the primitive's operand."""
    if plan.kernel == NOTHING:
        return [jnp.zeros(result.shape, result.dtype) for result in plan.problem.results]
    *batch, num_experts = plan.problem.results[2].shape
    workspace = jax.ShapeDtypeStruct((*batch, plan.grid, num_experts + 1), jnp.int32)
    return list(jax.ffi.ffi_call(SORT_TARGET, [*plan.problem.results, workspace])(experts)[:3])


def gather(
    plan: RowsPlan,
    x: jax.Array,
    pair_of_row: jax.Array,
    row_of_pair: jax.Array,
    weights: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, which must not be `XLA`, on the primitive's operands."""
    options = dict(divisor=np.int32(plan.problem.divisor), weighted=_is_given(weights))
    by_token = plan.kernel.name == "by_token"
    operands = (x, pair_of_row, row_of_pair) if by_token else (x, pair_of_row)
    return _call(
        DISPATCH_TARGET if by_token else GATHER_TARGET, plan, operands, (weights, count), options
    )


def combine(
    plan: RowsPlan,
    y: jax.Array,
    pair_of_row: jax.Array,
    row_of_pair: jax.Array,
    weights: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, which must not be `XLA`, on the primitive's operands."""
    options = dict(weighted=_is_given(weights))
    return _call(COMBINE_TARGET, plan, (y, row_of_pair), (weights, count), options)


def dots(
    plan: RowsPlan,
    x: jax.Array,
    y: jax.Array,
    pair_of_row: jax.Array,
    row_of_pair: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, which must not be `XLA`, on the primitive's operands."""
    return _call(DOTS_TARGET, plan, (x, y, row_of_pair), (count,), {})


def _call(target, plan, operands, optional, options) -> jax.Array:
    (result,) = plan.problem.results
    if plan.kernel == NOTHING:
        return jnp.zeros(result.shape, result.dtype)
    return jax.ffi.ffi_call(target, result)(*operands, *filter(_is_given, optional), **options)


def _is_given(operand: jax.Array) -> bool:
    return operand.shape[-1] > 0
