"""Calls of the symmetric updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.lists.rank_k.plan import Plan, launch_order
from jax_grouped_gemm._src.padding import pad_to

TARGET = "jax_grouped_gemm.rank_k.v2"
TARGET_F32 = "jax_grouped_gemm.rank_k_f32.v2"
TARGET_FP64 = "jax_grouped_gemm.rank_k_fp64.v2"


def rank_k(plan: Plan, *operands: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, whose path is not "reference", on operands of `plan.problem`.

    The operands are those of the primitive: alpha, a, b, beta and c of every stack.
    """
    problem = plan.problem
    num_stacks = len(problem.stacks)
    outs = [jnp.zeros((s.g, s.n, s.n), problem.result_dtype) for s in problem.stacks]
    order = launch_order(problem)
    if not order:
        return outs
    by_operand = [operands[i : i + num_stacks] for i in range(0, len(operands), num_stacks)]
    alpha, *matrices = by_operand
    scales = [alpha]
    if problem.has_c:
        *matrices, beta, c = matrices
        scales.append(beta)
        matrices.append(c)
    padded = [plan.kernel_problem.stacks[i] for i in order]
    dtype = plan.kernel_problem.result_dtype

    def pad(i, x, stack, is_c):
        if is_c:
            return pad_to(x.astype(dtype), (stack.n, stack.n))
        return pad_to(x, (stack.k, stack.n) if problem.transpose else (stack.n, stack.k))

    inputs = [
        pad(i, operand[i], stack, is_c=problem.has_c and operand is matrices[-1])
        for operand in matrices
        for i, stack in zip(order, padded, strict=True)
    ]
    is_fp64, is_float32 = plan.path == "direct", plan.terms > 0
    # As they are: to write one number out for each matrix would take a kernel of its own.
    scale_dtype = dtype if is_fp64 else jnp.float32
    scales = [scale[i].astype(scale_dtype) for scale in scales for i in order]
    first_c = len(scales) + len(inputs) - len(order)
    target = TARGET_FP64 if is_fp64 else TARGET_F32 if is_float32 else TARGET
    workspace = [jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8)] if is_float32 else []
    first_out = len(workspace)
    call = jax.ffi.ffi_call(
        target,
        workspace + [jax.ShapeDtypeStruct((s.g, s.n, s.n), dtype) for s in padded],
        # The kernel updates c in place; XLA copies it first if it is needed later.
        input_output_aliases=(
            {first_c + i: first_out + i for i in range(len(order))} if problem.has_c else {}
        ),
    )
    results = call(
        *scales,
        *inputs,
        two_operands=problem.op == "rank_2k",
        has_c=problem.has_c,
        transpose=problem.transpose,
        upper=problem.upper,
        symmetrize=problem.symmetrize,
        **({"hermitian": problem.hermitian} if is_fp64 else {}),
        **({"terms": np.int32(plan.terms)} if is_float32 else {}),
        **{name: np.int32(value) for name, value in plan.tile.sizes().items()},
    )
    for i, out in zip(order, results[first_out:], strict=True):
        n = problem.stacks[i].n
        outs[i] = out[:, :n, :n].astype(problem.result_dtype)
    return outs
