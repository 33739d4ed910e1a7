"""Calls of the ragged products, of plain and of scaled operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._ffi import TARGETS
from jax_grouped_gemm.kernel_calls.padding import pad_to
from jax_grouped_gemm.plan import Plan
from jax_grouped_gemm.plan_fp8 import LHS_SCALINGS, RHS_SCALINGS
from jax_grouped_gemm.ragged_problem import RaggedProblem


def ragged(
    plan: Plan,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, whose path is not "reference", on operands of `plan.problem`."""
    problem = plan.problem
    if plan.kernel_problem is None:
        return _zeros(problem)
    return _call(
        plan,
        *_addressable(plan, lhs, rhs),
        group_sizes,
        group_offset,
        **_majors(problem),
        stream_k=plan.tile.stream_k,
        terms=np.int32(plan.terms),
    )


def accumulate(
    plan: Plan,
    accumulator: jax.Array,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """`accumulator` plus what `ragged` returns, where the accumulator is if the kernel adds."""
    if plan.kernel_problem is None:
        return accumulator
    if not plan.adds_in_place:
        return accumulator + ragged(plan, lhs, rhs, group_sizes, group_offset)
    return _call(
        plan,
        accumulator,
        *_addressable(plan, lhs, rhs),
        group_sizes,
        group_offset,
        # XLA copies the accumulator first if it is needed later.
        input_output_aliases={0: 0},
        **_majors(plan.problem),
    )


def scaled_noncontracting(
    plan: Plan,
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, whose path is not "reference", on operands of `plan.problem`."""
    problem, addressable = plan.problem, plan.kernel_problem
    if addressable is None:
        return _zeros(problem)
    if problem.rhs != addressable.rhs:
        rhs, rhs_scale = rhs.mT, rhs_scale.mT
    if problem.rhs_scaling == "kx1":
        rhs_scale = pad_to(rhs_scale[..., 0], (problem.g, addressable.n))
    elif problem.rhs_scaling == "group":
        rhs_scale = rhs_scale[..., 0]
    return _call(
        plan,
        pad_to(lhs, addressable.shape(addressable.lhs)),
        lhs_scale,
        pad_to(rhs, addressable.shape(addressable.rhs)),
        rhs_scale,
        group_sizes,
        group_offset,
        lhs_scaling=np.int32(LHS_SCALINGS.index(problem.lhs_scaling)),
        rhs_scaling=np.int32(RHS_SCALINGS.index(problem.rhs_scaling)),
        stream_k=plan.tile.stream_k,
    )


def scaled_contracting(
    plan: Plan,
    lhs: jax.Array,
    lhs_scale: jax.Array,
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Runs the kernel of `plan`, whose path is not "reference", on operands of `plan.problem`."""
    problem, addressable = plan.problem, plan.kernel_problem
    if addressable is None:
        return _zeros(problem)
    return _call(
        plan,
        lhs,
        lhs_scale,
        pad_to(rhs, addressable.shape(addressable.rhs)),
        pad_to(rhs_scale, (rhs_scale.shape[-2], addressable.n)),
        group_sizes,
        group_offset,
        m=np.int32(problem.m),
    )


def _addressable(plan: Plan, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Operands whose rows TMA can address."""
    form = plan.kernel_problem
    return pad_to(lhs, form.shape(form.lhs)), pad_to(rhs, form.shape(form.rhs))


def _majors(problem: RaggedProblem) -> dict[str, bool]:
    """The attributes that say how operands lie in memory."""
    return {
        "transpose_lhs": problem.lhs == "km",
        "transpose_rhs": problem.rhs.endswith(("nk", "nm")),
    }


def _call(
    plan: Plan,
    *operands: jax.Array,
    input_output_aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> jax.Array:
    """One call of the kernel; its result, cut and converted to what the problem asks for."""
    problem, addressable = plan.problem, plan.kernel_problem
    result_shape = (*addressable.batch, *addressable.shape(addressable.out))
    results = (
        jax.ShapeDtypeStruct(result_shape, addressable.out_dtype),
        jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8),
    )
    tile = {name: np.int32(size) for name, size in plan.tile.sizes().items()}
    call = jax.ffi.ffi_call(
        TARGETS[addressable.op], results, input_output_aliases=input_output_aliases
    )
    out, _ = call(*operands, **attributes, **tile)
    valid = tuple(slice(size) for size in problem.shape(problem.out))
    return out[..., *valid].astype(problem.out_dtype)


def _zeros(problem: RaggedProblem) -> jax.Array:
    return jnp.zeros((*problem.batch, *problem.shape(problem.out)), problem.out_dtype)
