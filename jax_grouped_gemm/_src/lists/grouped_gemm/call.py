"""Calls of the products of lists, one custom call for each launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import at_least_float32, pad_to
from jax_grouped_gemm._src.lists.call import launch as call_kernel
from jax_grouped_gemm._src.lists.grouped_gemm.plan import GroupedGemmPlan, Launch
from jax_grouped_gemm._src.lists.grouped_gemm.problem import GroupedGemmProblem
from jax_grouped_gemm._src.lists.op import Problem, by_name, present, problems_of
from jax_grouped_gemm._src.lists.scaling import scaled_c

TARGET = "jax_grouped_gemm.grouped_gemm.v1"
TARGET_F32 = "jax_grouped_gemm.grouped_gemm_f32.v1"
TARGET_FP64 = "jax_grouped_gemm.grouped_gemm_fp64.v1"


def grouped_gemm(plan: GroupedGemmPlan, *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernels of `plan`, which are not `XLA`, on operands of `plan.problem`.

    Operands are those of the primitive: alpha, a, b, beta and c of every problem.
    """
    problem = plan.problem
    names = present(
        has_alpha=problem.has_alpha,
        has_beta=problem.has_beta,
        has_c=problem.has_c,
        has_diagonal=False,
    )
    problems = problems_of(by_name(operands, len(problem.entries), names))
    outs = {
        i: _without_product(problem, i, x) for i, x in enumerate(problems) if i not in plan.order
    }
    for launch in plan.launches:
        results = _launch(plan, launch, [problems[i] for i in launch.problems])
        for i, result in zip(launch.problems, results, strict=True):
            entry = problem.entries[i]
            outs[i] = result[:, : entry.m, : entry.n].astype(problem.result_dtype)
    return [outs[i] for i in range(len(problems))]


def _without_product(whole: GroupedGemmProblem, i: int, problem: Problem) -> jax.Array:
    """Returns a result that is empty, or beta C because nothing is contracted."""
    entry = whole.entries[i]
    if problem.c is None:
        return jnp.zeros((entry.g, entry.m, entry.n), whole.result_dtype)
    beta = whole.beta if problem.beta is None else problem.beta
    return scaled_c(beta, problem.c, at_least_float32(whole.result_dtype)).astype(
        whole.result_dtype
    )


def _launch(
    plan: GroupedGemmPlan, launch: Launch, problems: Sequence[Problem]
) -> Sequence[jax.Array]:
    whole, is_fp64 = plan.problem, launch.kernel.schedule == "square"
    kernel_problem, _ = plan.launched
    entries = [kernel_problem.entries[i] for i in launch.problems]
    dtype = kernel_problem.result_dtype
    padded = list(zip(problems, entries, strict=True))
    a = [pad_to(x.a, _stored(e.m, e.k, launch.transpose_lhs)) for x, e in padded]
    b = [pad_to(x.b, _stored(e.k, e.n, launch.transpose_rhs)) for x, e in padded]
    scales, attributes = (_scales_fp64 if is_fp64 else _scales)(whole, problems)
    if not is_fp64:
        attributes["has_schedule"] = launch.schedule is not None
    schedule = [] if launch.schedule is None else [jnp.asarray(launch.schedule)]
    return call_kernel(
        TARGET_FP64 if is_fp64 else TARGET_F32 if plan.terms else TARGET,
        [*scales, *schedule, *a, *b],
        [pad_to(x.c.astype(dtype), (e.m, e.n)) for x, e in padded] if whole.has_c else [],
        [jax.ShapeDtypeStruct((e.g, e.m, e.n), dtype) for e in entries],
        tile=launch.tile,
        terms=plan.terms,
        workspace_bytes=launch.parts_bytes,
        transpose_lhs=launch.transpose_lhs,
        transpose_rhs=launch.transpose_rhs,
        **attributes,
    )


def _stored(rows: int, columns: int, transposed: bool) -> tuple[int, int]:
    return (columns, rows) if transposed else (rows, columns)


def _scales(
    whole: GroupedGemmProblem, problems: Sequence[Problem]
) -> tuple[list[jax.Array], dict[str, Any]]:
    """Returns operands that have a scale for each matrix, and attributes with scales for all."""
    attributes = {
        "has_alphas": whole.has_alpha,
        "has_betas": whole.has_beta,
        "alpha": np.float32(whole.alpha.real),
        "beta": np.float32(whole.beta.real),
    }
    return [_joined(x, problems, jnp.float32) for x in _given_scales(whole)], attributes


def _scales_fp64(
    whole: GroupedGemmProblem, problems: Sequence[Problem]
) -> tuple[list[jax.Array], dict[str, Any]]:
    """Returns alpha and beta as operands: a scale for each matrix, or one constant for all."""
    dtype = whole.result_dtype
    given = _given_scales(whole)
    scales = [
        _joined(name, problems, dtype)
        if name in given
        else jnp.asarray(np.full(1, getattr(whole, name), dtype))
        for name in ("alpha", "beta")
    ]
    return scales, {}


def _given_scales(whole: GroupedGemmProblem) -> list[str]:
    """Returns the names of the scales that are operands."""
    flags = {"alpha": whole.has_alpha, "beta": whole.has_beta}
    return [name for name, is_given in flags.items() if is_given]


def _joined(name: str, problems: Sequence[Problem], dtype: np.dtype) -> jax.Array:
    return jnp.concatenate([getattr(problem, name).astype(dtype) for problem in problems])
