"""Calls of the symmetric updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import pad_to
from jax_grouped_gemm._src.lists.call import launch
from jax_grouped_gemm._src.lists.op import by_name, present, problems_of
from jax_grouped_gemm._src.lists.rank_k.problem import RankKProblem, launch_order
from jax_grouped_gemm._src.plan import Plan

TARGET = "jax_grouped_gemm.rank_k.v2"
TARGET_F32 = "jax_grouped_gemm.rank_k_f32.v2"
TARGET_FP64 = "jax_grouped_gemm.rank_k_fp64.v2"


def rank_k(plan: Plan[RankKProblem], *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, whose kernel is not `XLA`, on operands of `plan.problem`.

    The operands are those of the primitive: alpha, a, b, beta and c of every stack.
    """
    problem = plan.problem
    outs = [jnp.zeros((s.g, s.n, s.n), problem.result_dtype) for s in problem.stacks]
    order = launch_order(problem)
    if not order:
        return outs
    kernel_problem, kernel = plan.launched
    is_fp64, is_rank_2k = kernel.schedule == "square", problem.op == "rank_2k"
    names = present(has_b=is_rank_2k, has_beta=problem.has_c, has_c=problem.has_c)
    problems = problems_of(by_name(operands, len(outs), names))
    stacks, dtype = kernel_problem.stacks, kernel_problem.result_dtype

    def padded(name):
        """One factor of every stack, in the order of the launch."""
        for i in order:
            shape = stacks[i].n, stacks[i].k
            yield pad_to(getattr(problems[i], name), shape[::-1] if problem.transpose else shape)

    factors = [*padded("a"), *(padded("b") if is_rank_2k else ())]
    c = []
    if problem.has_c:
        c = [pad_to(problems[i].c.astype(dtype), (stacks[i].n, stacks[i].n)) for i in order]
    # A number for a whole stack stays one: writing it out would take a kernel of its own.
    scales = [
        getattr(problems[i], name).astype(dtype if is_fp64 else jnp.float32)
        for name in (("alpha", "beta") if problem.has_c else ("alpha",))
        for i in order
    ]
    results = launch(
        TARGET_FP64 if is_fp64 else TARGET_F32 if plan.terms else TARGET,
        [*scales, *factors],
        c,
        [jax.ShapeDtypeStruct((stacks[i].g, stacks[i].n, stacks[i].n), dtype) for i in order],
        tile=kernel.tile,
        terms=plan.terms,
        workspace_bytes=plan.workspace_bytes,
        two_operands=is_rank_2k,
        transpose=problem.transpose,
        upper=problem.upper,
        symmetrize=problem.symmetrize,
        **({"hermitian": problem.hermitian} if is_fp64 else {}),
    )
    for i, out in zip(order, results, strict=True):
        n = problem.stacks[i].n
        outs[i] = out[:, :n, :n].astype(problem.result_dtype)
    return outs
