"""Calls of the scaled products, one custom call each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import pad_to
from jax_grouped_gemm._src.fp8.formats import (
    COLUMN_MAJOR,
    COLUMNS,
    GROUP,
    MATRIX_BLOCKS,
    ROW_BLOCKS,
    ROWS,
    TENSOR,
    TRANSPOSED_COLUMNS,
    split_e5m2,
)
from jax_grouped_gemm._src.fp8.scaled.problem import ScaledProblem
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.ragged.call import call_kernel, zeros

SCALED_NONCONTRACTING_TARGET = "jax_grouped_gemm.scaled_ragged_noncontracting.v5"

GATHERED_NONCONTRACTING_TARGET = "jax_grouped_gemm.gathered_scaled_noncontracting.v1"

SCALED_CONTRACTING_TARGET = "jax_grouped_gemm.scaled_ragged_contracting.v3"

PAIRED_CONTRACTING_TARGET = "jax_grouped_gemm.paired_scaled_contracting.v1"

LHS_SCALINGS = ROW_BLOCKS, ROWS, TENSOR, COLUMN_MAJOR
RHS_SCALINGS = MATRIX_BLOCKS, COLUMNS, GROUP
"""Scalings of operands. The index of a scaling here is its number in the kernels."""


def _splits_lhs(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function that runs `product`, once for each part of lhs if the plan splits lhs."""

    @functools.wraps(product)
    def call(plan, lhs, lhs_scale, *others):
        form = plan.kernel_problem
        if form is None or form.lhs_dtype == plan.problem.lhs_dtype:
            return product(plan, lhs, lhs_scale, *others)
        dtypes = dict(lhs_dtype=form.lhs_dtype, out_dtype=form.out_dtype)
        part = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, **dtypes))
        first, second = (
            product(part, x, lhs_scale * factor, *others) for x, factor in split_e5m2(lhs)
        )
        return (first + second).astype(plan.problem.out_dtype)

    return call


@_splits_lhs
def scaled_noncontracting(
    plan: Plan[ScaledProblem],
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, which is not `XLA`, on operands of `plan.problem`."""
    problem = plan.problem
    if plan.kernel_problem is None:
        return zeros(problem)
    addressable, kernel = plan.launched
    if problem.rhs != addressable.rhs:
        rhs, rhs_scale = rhs.mT, rhs_scale.mT
    if problem.scales[1] == COLUMNS:
        rhs_scale = pad_to(rhs_scale[..., 0], (problem.g, addressable.n))
    elif problem.scales[1] == GROUP:
        rhs_scale = rhs_scale[..., 0]
    return call_kernel(
        SCALED_NONCONTRACTING_TARGET,
        plan,
        lhs if problem.view else pad_to(lhs, addressable.shape(addressable.lhs)),
        lhs_scale,
        pad_to(rhs, addressable.shape(addressable.rhs)),
        rhs_scale,
        group_sizes,
        group_offset,
        lhs_scaling=np.int32(LHS_SCALINGS.index(problem.scales[0])),
        rhs_scaling=np.int32(RHS_SCALINGS.index(problem.scales[1])),
        kind=kernel.schedule,
        fast_accumulation=problem.fast_accumulation,
        **_view(problem),
    )


def gathered_noncontracting(plan: Plan[ScaledProblem], *operands: jax.Array) -> jax.Array:
    """Runs the kernel of `plan`."""
    return call_kernel(GATHERED_NONCONTRACTING_TARGET, plan, *operands)


@_splits_lhs
def scaled_contracting(
    plan: Plan[ScaledProblem],
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, which is not `XLA`, on operands of `plan.problem`."""
    problem = plan.problem
    if plan.kernel_problem is None:
        return zeros(problem)
    addressable, _ = plan.launched
    if problem.scales[0] == TRANSPOSED_COLUMNS and problem.out_dtype == np.dtype(np.float32):
        # The kernel for one scale a column stores its result transposed, in 16 bits only. For
        # float32 results, take the kernel for scales of blocks instead.
        lhs_scale = jnp.broadcast_to(lhs_scale, (*lhs_scale.shape[:-2], problem.b, problem.k))
        rhs_scale = jnp.broadcast_to(rhs_scale, (*rhs_scale.shape[:-2], problem.b, problem.n))
    return call_kernel(
        SCALED_CONTRACTING_TARGET,
        plan,
        lhs,
        lhs_scale,
        rhs if problem.view else pad_to(rhs, addressable.shape(addressable.rhs)),
        pad_to(rhs_scale, (rhs_scale.shape[-2], addressable.n)),
        group_sizes,
        group_offset,
        m=np.int32(problem.m),
        **_view(problem),
    )


def _view(problem: ScaledProblem) -> dict[str, Any]:
    """Returns the attribute that says which part of a flat array an operand is."""
    return dict(slice=np.array(problem.view, np.int64)) if problem.view else {}


def paired_contracting(plan: Plan[ScaledProblem], *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`."""
    problem, kernel = plan.launched
    out = jax.ShapeDtypeStruct(problem.shape(problem.out), problem.out_dtype)
    sizes = {name: np.int32(size) for name, size in kernel.tile.sizes().items()}
    call = jax.ffi.ffi_call(PAIRED_CONTRACTING_TARGET, (out, out))
    return list(call(*operands, m=np.int32(problem.m), **sizes))
