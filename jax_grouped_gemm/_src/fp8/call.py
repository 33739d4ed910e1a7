"""Calls of the scaled products and of the quantisers, one custom call each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import pad_to
from jax_grouped_gemm._src.fp8.formats import LHS_SCALINGS, RHS_SCALINGS, split_e5m2
from jax_grouped_gemm._src.fp8.plan import QuantizePlan, ScaledProblem
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.ragged.call import call_kernel, zeros

NONCONTRACTING_TARGET = "jax_grouped_gemm.scaled_ragged_noncontracting.v5"
GATHERED_NONCONTRACTING_TARGET = "jax_grouped_gemm.gathered_scaled_noncontracting.v1"
CONTRACTING_TARGET = "jax_grouped_gemm.scaled_ragged_contracting.v3"
PAIRED_CONTRACTING_TARGET = "jax_grouped_gemm.paired_scaled_contracting.v1"
MAXIMA = {name: f"jax_grouped_gemm.{name}.v1" for name in ("column_maxima", "matrix_maxima")}
CHANNELS_TARGET = "jax_grouped_gemm.quantize_channels.v1"
QUANTIZERS = {
    name: f"jax_grouped_gemm.{name}.v1"
    for name in (
        "quantize_rows",
        "quantize_tokens",
        "quantize_blocks",
        "quantize_joined",
        "quantize_ragged",
    )
}
GATHERED_TARGET = "jax_grouped_gemm.quantize_gathered.v2"


def _splits_lhs(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Has `product` multiply each of the two arrays that the plan's kernel takes for lhs, if so."""

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
    """Runs the kernel of `plan`, whose kernel is not `XLA`, on operands of `plan.problem`."""
    problem = plan.problem
    if plan.kernel_problem is None:
        return zeros(problem)
    addressable, kernel = plan.launched
    if problem.rhs != addressable.rhs:
        rhs, rhs_scale = rhs.mT, rhs_scale.mT
    if problem.rhs_scaling == "kx1":
        rhs_scale = pad_to(rhs_scale[..., 0], (problem.g, addressable.n))
    elif problem.rhs_scaling == "group":
        rhs_scale = rhs_scale[..., 0]
    return call_kernel(
        NONCONTRACTING_TARGET,
        plan,
        lhs if problem.view else pad_to(lhs, addressable.shape(addressable.lhs)),
        lhs_scale,
        pad_to(rhs, addressable.shape(addressable.rhs)),
        rhs_scale,
        group_sizes,
        group_offset,
        lhs_scaling=np.int32(LHS_SCALINGS.index(problem.lhs_scaling)),
        rhs_scaling=np.int32(RHS_SCALINGS.index(problem.rhs_scaling)),
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
    """Runs the kernel of `plan`, whose kernel is not `XLA`, on operands of `plan.problem`."""
    problem = plan.problem
    if plan.kernel_problem is None:
        return zeros(problem)
    addressable, _ = plan.launched
    if problem.lhs_scaling == "column" and problem.out_dtype == np.dtype(np.float32):
        # The kernel that scales lhs at the end transposes its result, which 16 bits allow alone.
        lhs_scale = jnp.broadcast_to(lhs_scale, (*lhs_scale.shape[:-2], problem.b, problem.k))
        rhs_scale = jnp.broadcast_to(rhs_scale, (*rhs_scale.shape[:-2], problem.b, problem.n))
    return call_kernel(
        CONTRACTING_TARGET,
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
    """The attribute that says which part of a flat array the operand is that may be a view."""
    return dict(slice=np.array(problem.view, np.int64)) if problem.view else {}


def paired_contracting(plan: Plan[ScaledProblem], *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`."""
    problem, kernel = plan.launched
    out = jax.ShapeDtypeStruct(problem.shape(problem.out), problem.out_dtype)
    sizes = {name: np.int32(size) for name, size in kernel.tile.sizes().items()}
    call = jax.ffi.ffi_call(PAIRED_CONTRACTING_TARGET, (out, out))
    return list(call(*operands, m=np.int32(problem.m), **sizes))


def maxima(plan: QuantizePlan, x: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, whose kernel is not `XLA`, on its primitive's operands."""

    def call(results):
        return jax.ffi.ffi_call(MAXIMA[plan.problem.op], results)(x, *others)

    return _those_asked_for(plan, call, x)


def quantize_channels(plan: QuantizePlan, *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernels of `plan`, whose kernel is not `XLA`."""
    *stacks, row_scale, column_scale = operands

    def call(results):
        scales = row_scale, column_scale
        return jax.ffi.ffi_call(CHANNELS_TARGET, results)(
            stacks[0], stacks[-1], *scales, joined=len(stacks) == 2
        )

    return _those_asked_for(plan, call, stacks[0])


def _those_asked_for(
    plan: QuantizePlan, call: Callable[..., Sequence[jax.Array]], x: jax.Array
) -> list[jax.Array]:
    """The results of `call`, which gets an empty one for what nobody asks for."""
    nothing = jax.ShapeDtypeStruct((0,), jnp.float32)
    results = [nothing if result is None else result for result in plan.results]
    if 0 in x.shape:
        # Then there are neither values nor anything that would have a scale.
        outs: Sequence[jax.Array] = [jnp.zeros(result.shape, result.dtype) for result in results]
    else:
        outs = call(results)
    return [out for out, wanted in zip(outs, plan.results, strict=True) if wanted is not None]


def quantize_gathered(
    plan: QuantizePlan, x: jax.Array, rows: jax.Array, scale: jax.Array, group_sizes: jax.Array
) -> list[jax.Array]:
    """Runs the kernels of `plan`, whose kernel is not `XLA`."""
    values, room = plan.results
    assert values is not None
    if 0 in x.shape or 0 in values.shape:
        return [jnp.zeros(values.shape, values.dtype)]
    # A kernel's buffers are never empty.
    rows, sizes = (y if y.size else jnp.zeros((1,), y.dtype) for y in (rows, group_sizes))
    results = values, room or jax.ShapeDtypeStruct((0,), jnp.uint8)
    call = jax.ffi.ffi_call(GATHERED_TARGET, results)
    return [call(x, rows, scale, sizes, power_of_two=plan.problem.power_of_two)[0]]


def quantize(plan: QuantizePlan, x: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Runs the quantiser of `plan`, whose kernel is not `XLA`, on its primitive's operands."""

    def call(results):
        # A kernel's buffers are never empty.
        filled = (y if y.size else jnp.zeros((1,), y.dtype) for y in others)
        return jax.ffi.ffi_call(QUANTIZERS[plan.problem.op], results)(
            x, *filled, power_of_two=plan.problem.power_of_two
        )

    return _those_asked_for(plan, call, x)
