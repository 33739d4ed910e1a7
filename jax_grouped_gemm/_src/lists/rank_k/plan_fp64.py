"""Which kernel runs a rank-k or rank-2k update on the FP64 tensor cores."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from jax_grouped_gemm._src.lists.fp64 import KERNELS, Kernel, busy_steps, num_steps, tile_k
from jax_grouped_gemm._src.plan import Plan

if TYPE_CHECKING:
    from jax_grouped_gemm._src.lists.rank_k.plan import RankKProblem, Stack


def plan(problem: RankKProblem) -> Plan:
    """Plans `problem`, which has results and no `unsupported_reason`."""
    stacks = tuple(dataclasses.replace(s, k=max(s.k, 1)) for s in problem.stacks)
    kernel_problem = dataclasses.replace(problem, stacks=stacks)
    kernels = KERNELS[np.dtype(problem.dtype)]
    efficiencies = [_efficiency(problem, kernel) for kernel in kernels]
    best = max(range(len(kernels)), key=lambda i: efficiencies[i] * kernels[i].rate)
    return Plan(
        problem=problem,
        path="direct",
        reason="",
        kernel_problem=kernel_problem,
        tile=kernels[best].config,
        grid=min(kernels[best].places, sum(_steps(kernel_problem, kernels[best])[1])),
        efficiency=efficiencies[best],
    )


def _steps(problem: RankKProblem, kernel: Kernel) -> tuple[list[int], list[int]]:
    """The steps of the tiles in each run of tiles, longest first, and how many tiles it has.

    As `csrc/scheduler/triangular_runs.h` lists them.
    """
    runs = []
    for stack in problem.stacks:
        if 0 in (stack.g, stack.n):
            continue
        rows = math.ceil(stack.n / kernel.tile)
        steps = num_steps(problem.dtype, max(stack.k, 1))
        runs.append((_num_products(problem) * steps, stack.g * (rows * (rows - 1) // 2)))
        runs.append((steps, stack.g * rows))
    runs.sort(key=lambda run: -run[0])
    return [steps for steps, _ in runs], [tiles for _, tiles in runs]


def _efficiency(problem: RankKProblem, kernel: Kernel) -> float:
    """The share of the tensor cores' work that is useful while the longest block is busy."""
    longest = busy_steps(kernel, *_steps(problem, kernel)).max()
    per_step = kernel.tile**2 * tile_k(problem.dtype)
    useful = sum(map(_useful, problem.stacks)) * _num_products(problem)
    return float(useful / (longest * kernel.places * per_step))


def _useful(stack: Stack) -> float:
    """Multiply-adds of one product in the triangle of each result."""
    return stack.g * stack.n * (stack.n + 1) / 2 * stack.k


def _num_products(problem: RankKProblem) -> int:
    return 2 if problem.op == "rank_2k" else 1
