"""Which kernel runs a rank-k or rank-2k update on the FP64 tensor cores."""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target, predict
from jax_grouped_gemm._src.lists.fp64 import KERNELS, Square, busy_steps, num_steps, tile_k
from jax_grouped_gemm._src.lists.rank_k.problem import RankKProblem
from jax_grouped_gemm._src.plan import Plan


def plan_fp64(problem: RankKProblem, target: Target) -> Plan[RankKProblem]:
    """Plans `problem`, which has results and no `unsupported_reason`."""
    stacks = tuple(dataclasses.replace(s, k=max(s.k, 1)) for s in problem.stacks)
    kernel_problem = dataclasses.replace(problem, stacks=stacks)
    kernels = KERNELS[np.dtype(problem.dtype)]
    shares = [_utilization(problem, kernel, target) for kernel in kernels]
    best = max(range(len(kernels)), key=lambda i: shares[i] * kernels[i].rate)
    kernel, utilization = kernels[best], shares[best]
    return Plan(
        problem=problem,
        kernel=kernel,
        kernel_problem=kernel_problem,
        grid=min(kernel.places(target), sum(_steps(kernel_problem, kernel)[1])),
        utilization=utilization,
        prediction=predict(
            problem.dtype,
            multiply_adds=problem.useful,
            utilization=utilization * kernel.rate,
            num_bytes=problem.operand_bytes + problem.result_bytes,
            target=target,
        ),
    )


def _steps(problem: RankKProblem, kernel: Square) -> tuple[list[int], list[int]]:
    """The steps of the tiles in each run of tiles, longest first, and how many tiles it has.

    As `csrc/scheduler/triangular_runs.h` lists them.
    """
    runs = []
    for stack in problem.stacks:
        if 0 in (stack.g, stack.n):
            continue
        rows = cdiv(stack.n, kernel.side)
        steps = num_steps(problem.dtype, max(stack.k, 1))
        runs.append((problem.num_products * steps, stack.g * (rows * (rows - 1) // 2)))
        runs.append((steps, stack.g * rows))
    runs.sort(key=lambda run: -run[0])
    return [steps for steps, _ in runs], [tiles for _, tiles in runs]


def _utilization(problem: RankKProblem, kernel: Square, target: Target) -> float:
    """The share of the tensor cores' work that is useful while the longest block is busy."""
    places = kernel.places(target)
    longest = busy_steps(places, *_steps(problem, kernel)).max()
    return float(problem.useful / (longest * places * kernel.side**2 * tile_k(problem.dtype)))
