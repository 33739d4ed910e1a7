"""Calls of the products of lists, one custom call for each launch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.lists import stacks as _stacks
from jax_grouped_gemm._src.lists.grouped_gemm.plan import Entry, GroupedGemmPlan, Launch
from jax_grouped_gemm._src.lists.grouped_gemm.reference import scaled_c
from jax_grouped_gemm._src.lists.scaling import accumulator_dtype
from jax_grouped_gemm._src.padding import pad_to

TARGET = "jax_grouped_gemm.grouped_gemm.v1"
TARGET_F32 = "jax_grouped_gemm.grouped_gemm_f32.v1"
TARGET_FP64 = "jax_grouped_gemm.grouped_gemm_fp64.v1"


def grouped_gemm(plan: GroupedGemmPlan, *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernels of `plan`, whose path is not "reference", on operands of `plan.problem`.

    The operands are those of the primitive: alpha, lhs, rhs, beta and c of every problem.
    """
    problem = plan.problem
    present = (problem.has_alpha, True, True, problem.has_beta, problem.has_c)
    alpha, lhs, rhs, beta, c = _stacks.split(operands, len(problem.entries), present)
    outs = [None] * len(problem.entries)
    for i in set(range(len(outs))) - set(plan.order):
        outs[i] = _without_product(plan, i, beta[i], c[i])
    launch_kernel = _launch_fp64 if plan.path == "direct" else _launch
    for launch in plan.launches:
        results = launch_kernel(
            plan, launch, *([operand[i] for i in launch.problems] for operand in (alpha, beta)),
            [pad_to(lhs[i], _stored_lhs(plan.kernel_problem.entries[i])) for i in launch.problems],
            [pad_to(rhs[i], _stored_rhs(plan.kernel_problem.entries[i])) for i in launch.problems],
            [c[i] for i in launch.problems],
        )  # fmt: skip
        for i, result in zip(launch.problems, results, strict=True):
            entry = problem.entries[i]
            outs[i] = result[:, : entry.m, : entry.n].astype(problem.result_dtype)
    return outs


def _stored_lhs(entry: Entry) -> tuple[int, int]:
    return (entry.k, entry.m) if entry.transpose_lhs else (entry.m, entry.k)


def _stored_rhs(entry: Entry) -> tuple[int, int]:
    return (entry.n, entry.k) if entry.transpose_rhs else (entry.k, entry.n)


def _without_product(plan, i, beta, c):
    """A result that is empty, or beta C because nothing is contracted."""
    problem, entry = plan.problem, plan.problem.entries[i]
    if c is None:
        return jnp.zeros((entry.g, entry.m, entry.n), problem.result_dtype)
    beta = problem.beta if beta is None else beta
    wide = scaled_c(beta, c, accumulator_dtype(problem.result_dtype))
    return wide.astype(problem.result_dtype)


def _launch(plan: GroupedGemmPlan, launch: Launch, alpha, beta, lhs, rhs, c) -> list[jax.Array]:
    problem = plan.problem
    dtype = plan.kernel_problem.result_dtype
    entries = [plan.kernel_problem.entries[i] for i in launch.problems]
    operands = []
    for present, scales in ((problem.has_alpha, alpha), (problem.has_beta, beta)):
        if present:
            operands.append(jnp.concatenate([scale.astype(jnp.float32) for scale in scales]))
    if launch.schedule is not None:
        operands.append(jnp.asarray(launch.schedule))
    operands += lhs + rhs
    first_c = len(operands)
    if problem.has_c:
        operands += [
            pad_to(x.astype(dtype), (entry.m, entry.n)) for x, entry in zip(c, entries, strict=True)
        ]
    workspace = [jax.ShapeDtypeStruct((launch.parts_bytes,), jnp.uint8)] if plan.terms else []
    first_out = len(workspace)
    call = jax.ffi.ffi_call(
        TARGET_F32 if plan.terms else TARGET,
        workspace + [jax.ShapeDtypeStruct((entry.g, entry.m, entry.n), dtype) for entry in entries],
        # The kernel updates c in place; XLA copies it first if it is needed later.
        input_output_aliases=(
            {first_c + i: first_out + i for i in range(len(entries))} if problem.has_c else {}
        ),
    )
    results = call(
        *operands,
        has_alphas=problem.has_alpha,
        has_betas=problem.has_beta,
        has_schedule=launch.schedule is not None,
        has_c=problem.has_c,
        alpha=np.float32(problem.alpha),
        beta=np.float32(problem.beta),
        transpose_lhs=launch.transpose_lhs,
        transpose_rhs=launch.transpose_rhs,
        **({"terms": np.int32(plan.terms)} if plan.terms else {}),
        **{name: np.int32(value) for name, value in launch.tile.sizes().items()},
    )
    return results[first_out:]


def _launch_fp64(plan: GroupedGemmPlan, launch: Launch, alpha, beta, lhs, rhs, c):
    problem = plan.problem
    dtype = problem.result_dtype

    def scale(present, scales, number):
        """One for each matrix, or one for all, which is a constant of the program."""
        if present:
            return jnp.concatenate([scale.astype(dtype) for scale in scales])
        return jnp.asarray(np.full(1, number, dtype))

    entries = [problem.entries[i] for i in launch.problems]
    operands = [
        scale(problem.has_alpha, alpha, problem.alpha),
        scale(problem.has_beta, beta, problem.beta),
        *lhs,
        *rhs,
    ]
    first_c = len(operands)
    if problem.has_c:
        operands += [x.astype(dtype) for x in c]
    call = jax.ffi.ffi_call(
        TARGET_FP64,
        [jax.ShapeDtypeStruct((entry.g, entry.m, entry.n), dtype) for entry in entries],
        # The kernel updates c in place; XLA copies it first if it is needed later.
        input_output_aliases=(
            {first_c + i: i for i in range(len(entries))} if problem.has_c else {}
        ),
    )
    return call(
        *operands,
        has_c=problem.has_c,
        transpose_lhs=launch.transpose_lhs,
        transpose_rhs=launch.transpose_rhs,
        **{name: np.int32(value) for name, value in launch.tile.sizes().items()},
    )
