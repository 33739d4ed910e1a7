"""When XLA's products of all rows with every group's matrix are faster than the kernels.

A kernel has tiles of 128 rows, and float32 operands are split in passes before it. With a few
groups of a few rows most of a tile is nothing, where cuBLAS has smaller tiles and cuts the
contracted dimension; multiplying every row by the matrices of all groups then costs less than it
saves.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src import xla
from jax_grouped_gemm._src.device import (
    BANDWIDTH,
    FLOAT32,
    H200,
    SIXTEEN_BITS,
    TF32,
    Prediction,
    Target,
)
from jax_grouped_gemm._src.float32 import FULL_TERMS
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.ragged.reference import local_group_bounds
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE

# What a call takes beside what is predicted: XLA's product, and what has each row of several groups
# take its own, or masks both operands of a weight gradient; the bounds of more groups than XLA adds
# up in each mask; ours, that of a weight gradient, and those of one of float32, which has some for
# each group. From small problems on an H200 (docs/notes/ragged.md).
XLA_SECONDS, SELECTING_SECONDS, SELECTING_GROUP_SECONDS = 3.5e-6, 0.5e-6, 0.05e-6
MOST_FUSED_GROUPS, BOUNDS_SECONDS = 4, 1e-6
KERNEL_SECONDS, WGRAD_SECONDS = 5.5e-6, 6.6e-6
FLOAT32_WGRAD_SECONDS, FLOAT32_GROUP_SECONDS = 17e-6, 0.25e-6
SPLITTING_SECONDS = 12e-6
# Of a kernel whose last wave is cut: sums pass through memory. With this much, no product of
# h200_never_slower.json leaves XLA that was faster there.
CUT_SECONDS = 22e-6
# The same in narrow tiles, and of weight gradients in them.
NARROW_CUT_SECONDS, NARROW_WGRAD_SECONDS = 14e-6, 5.8e-6
# Hopper's TF32 instructions take operands that are contiguous along what is contracted. Rows that
# are contracted are not, and cuBLAS's kernels for them multiply at this rate.
TF32_OF_ROWS = 70e12
# Predictions are not that exact: XLA has to be faster by more than this.
MARGIN = 0.85


def faster_reason(plan: Plan[RaggedProblem], target: Target) -> str:
    """Why XLA should compute the problem of a plan with a kernel, empty if the kernel should."""
    problem, prediction = plan.problem, plan.prediction
    if prediction is None or problem.accumulates or problem.batch:
        return ""
    whole = _seconds(problem, plan.terms, target)
    kernel = prediction.seconds + _kernel_overhead(plan, prediction)
    if whole > MARGIN * kernel:
        return ""
    return (
        f"XLA's products of all rows are predicted to take {whole * 1e6:.3g} us, "
        f"the kernel {kernel * 1e6:.3g} us"
    )


def _kernel_overhead(plan: Plan[RaggedProblem], prediction: Prediction) -> float:
    is_narrow = plan.tile is not None and plan.tile.tile_n == NARROW_TILE.tile_n and not plan.terms
    if plan.problem.contracts_rows:
        if plan.terms:
            return FLOAT32_WGRAD_SECONDS + FLOAT32_GROUP_SECONDS * plan.problem.g
        return NARROW_WGRAD_SECONDS if is_narrow else WGRAD_SECONDS
    if plan.tile is not None and plan.tile.stream_k:
        return NARROW_CUT_SECONDS if is_narrow else CUT_SECONDS
    return SPLITTING_SECONDS if prediction.split_seconds else KERNEL_SECONDS


def _seconds(problem: RaggedProblem, terms: int, target: Target) -> float:
    g, m, k, n = problem.shape("gmkn")
    multiplying = g * m * k * n / _rate(problem, terms, target)
    lhs, rhs, out = (math.prod(problem.shape(names)) * x.itemsize for names, x in problem.arrays)
    moving = (lhs + rhs + out) / BANDWIDTH
    # What is temporary is written and read.
    copying = 2 * problem.bytes_by_group / BANDWIDTH
    launching = XLA_SECONDS
    if problem.contracts_rows:
        launching += SELECTING_SECONDS + (BOUNDS_SECONDS if g > MOST_FUSED_GROUPS else 0)
        return max(multiplying, moving) + copying + launching
    if g > 1:
        launching += SELECTING_SECONDS + SELECTING_GROUP_SECONDS * g
        if xla.fills_device(g, m, n, target):
            # cuBLAS's product, with copies of the rows before it and a selection after it.
            return max(multiplying, moving) + copying + launching
    cutting = 0.0
    if not terms:
        cutting = xla.cutting_seconds(g, m, n, k, lhs + rhs, target)
    return max(multiplying, moving + copying) + launching + cutting


def _rate(problem: RaggedProblem, terms: int, target: Target) -> float:
    """Multiply-adds a second."""
    rate = SIXTEEN_BITS
    if terms:
        rate = TF32_OF_ROWS if problem.contracts_rows else TF32
        rate = FLOAT32 if terms == FULL_TERMS else rate
    return rate * target.multiprocessors / H200.multiprocessors


def product(
    plan: Plan[RaggedProblem],
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """What the reference computes, by one batched product and masks.

    A NaN or Inf in another group's matrix or rows reaches no result: what does not belong to a
    group is left out by selection, before or after the product.
    """
    problem = plan.problem
    g, m = problem.shape("gm")
    starts, ends = local_group_bounds(group_sizes, group_offset, g, m)
    rows = lax.broadcasted_iota(jnp.int32, (g, m), 1)
    owned = (rows >= starts[:, None]) & (rows < ends[:, None])

    def dot(lhs, rhs, lhs_axis, rhs_axis):
        return lax.dot_general(
            lhs,
            rhs,
            (((lhs_axis,), (rhs_axis,)), ((0,), (0,))),
            precision=lax.Precision.HIGHEST if plan.terms == FULL_TERMS else None,
            preferred_element_type=problem.out_dtype,
        )

    lhs = jnp.broadcast_to(lhs, (g, *lhs.shape))
    row_axis = 1 + problem.lhs.index("m")
    if not problem.contracts_rows:
        products = dot(lhs, rhs, 1 + problem.lhs.index("k"), problem.rhs.index("k"))
        # A row has one group at most.
        return _select(owned, products, 1).sum(axis=0)
    rhs = jnp.broadcast_to(rhs, (g, *rhs.shape))
    rhs_axis = 1 + problem.rhs.index("m")
    # Both factors are masked: a zero in one does not silence a NaN in the other.
    return dot(_select(owned, lhs, row_axis), _select(owned, rhs, rhs_axis), row_axis, rhs_axis)


def _select(owned: jax.Array, x: jax.Array, row_axis: int) -> jax.Array:
    """The rows that each group owns of x [g, ...], zeros elsewhere."""
    return lax.select(lax.broadcast_in_dim(owned, x.shape, (0, row_axis)), x, jnp.zeros_like(x))
