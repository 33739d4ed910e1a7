"""Calls of the symmetric updates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import pad_to
from jax_grouped_gemm._src.lists.call import launch
from jax_grouped_gemm._src.lists.op import by_name, present, problems_of
from jax_grouped_gemm._src.lists.rank_k.problem import RankKProblem, launch_order
from jax_grouped_gemm._src.plan import Plan

TARGET = "jax_grouped_gemm.rank_k.v3"
TARGET_F32 = "jax_grouped_gemm.rank_k_f32.v3"
TARGET_FP64 = "jax_grouped_gemm.rank_k_fp64.v2"


def rank_k(plan: Plan[RankKProblem], *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, which is not `XLA`, on operands of `plan.problem`.

    The operands are those of the primitive: alpha, a, b, beta, c and diagonal of every stack.
    """
    problem = plan.problem
    outs = [jnp.zeros((s.g, s.n, s.n), problem.result_dtype) for s in problem.stacks]
    order = launch_order(problem)
    if not order:
        return outs
    kernel_problem, kernel = plan.launched
    is_fp64, has_b = kernel.schedule == "square", problem.num_factors == 2
    names = present(
        has_b=has_b,
        has_beta=problem.has_c,
        has_c=problem.has_c,
        has_diagonal=problem.has_diagonal,
    )
    problems = problems_of(by_name(operands, len(outs), names))
    stacks, dtype = kernel_problem.stacks, kernel_problem.result_dtype

    def padded(name):
        """Yields one factor of every stack, in the order of the launch."""
        for i in order:
            shape = stacks[i].n, stacks[i].k
            yield pad_to(getattr(problems[i], name), shape[::-1] if problem.transpose else shape)

    factors = [*padded("a"), *(padded("b") if has_b else ())]
    c = []
    if problem.has_c:
        c = [pad_to(problems[i].c.astype(dtype), (stacks[i].n, stacks[i].n)) for i in order]
    given = {"alpha": True, "beta": problem.has_c, "diagonal": problem.has_diagonal}
    # A number for a whole stack stays [1], because writing out [g] would take another kernel.
    scales = [
        getattr(problems[i], name).astype(dtype if is_fp64 else jnp.float32)
        for name in given
        if given[name]
        for i in order
    ]
    attributes: dict[str, Any] = {"hermitian": problem.hermitian}
    if not is_fp64:
        attributes = {
            "one_product": problem.op == "symm_product",
            "has_diagonal": problem.has_diagonal,
        }
        if not plan.terms:
            attributes["may_halve"] = not problem.whole_tiles
            attributes["kind"] = "fine" if kernel.schedule == "fine" else "cooperative"
    results = launch(
        TARGET_FP64 if is_fp64 else TARGET_F32 if plan.terms else TARGET,
        [*scales, *factors],
        c,
        [jax.ShapeDtypeStruct((stacks[i].g, stacks[i].n, stacks[i].n), dtype) for i in order],
        tile=kernel.tile,
        terms=plan.terms,
        workspace_bytes=plan.workspace_bytes,
        # If a result keeps the other triangle of c, the kernel does not write this triangle. Such a
        # result is therefore always written over c, even if XLA has to copy c first.
        in_place=[
            not (problem.symmetrize and problem.c_is_factor[i] and not is_fp64) for i in order
        ],
        two_operands=has_b,
        transpose=problem.transpose,
        upper=problem.upper,
        symmetrize=problem.symmetrize,
        **attributes,
    )
    for i, out in zip(order, results, strict=True):
        n = problem.stacks[i].n
        outs[i] = out[:, :n, :n].astype(problem.result_dtype)
    return outs
