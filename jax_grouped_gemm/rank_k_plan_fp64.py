"""Which kernel runs a rank-k or rank-2k update on the FP64 tensor cores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm.plan import NUM_SMS, Plan, TileConfig

if TYPE_CHECKING:
    from jax_grouped_gemm.rank_k_plan import RankKProblem, Stack

DTYPES = (jnp.float64, jnp.complex64, jnp.complex128)
STEP_BYTES = 128  # of a row of an operand, that a step of the mainloop multiplies


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled tile, `tile` x `tile`.

    Attributes:
      tile: its rows and columns.
      blocks: thread blocks that a multiprocessor holds at a time.
      rate: the share of the tensor cores' rate that it can reach: small tiles read more bytes for
        each product than L2 delivers. An estimate from bytes, not a measurement.
    """

    tile: int
    blocks: int
    rate: float = 1.0

    @property
    def config(self) -> TileConfig:
        """As the extension names it."""
        return TileConfig(self.tile, self.tile, 1)


# The tiles in csrc/fp64/tile_table.h.
KERNELS = {
    np.dtype(jnp.float64): (Kernel(128, 1), Kernel(64, 2, rate=0.65)),
    np.dtype(jnp.complex64): (Kernel(64, 2),),
    np.dtype(jnp.complex128): (Kernel(64, 2),),
}


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
        grid=min(NUM_SMS * kernels[best].blocks, sum(_steps(kernel_problem, kernels[best])[1])),
        efficiency=efficiencies[best],
    )


def unsupported_reason(problem: RankKProblem, params: Mapping[str, Any]) -> str:
    """Why the kernels cannot run `problem`, empty if they can."""
    if problem.result_dtype != problem.dtype:
        return (
            f"no kernel for {problem.dtype} -> {problem.result_dtype}: the kernels of float64, "
            "complex64 and complex128 return what they take"
        )
    precision = params["precision"]
    if (
        isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset))
        and precision != lax.DotAlgorithmPreset.F64_F64_F64
    ):
        return f"the kernels do not implement precision={precision}"
    if (
        problem.dtype == jnp.complex64
        and precision != lax.Precision.HIGHEST
        and params["implementation"] != "cuda"
    ):
        return (
            f"complex64 at precision={precision} may use TF32, which has a higher rate than the "
            "FP64 tensor cores; precision=HIGHEST takes the kernel"
        )
    return ""


def _steps(problem: RankKProblem, kernel: Kernel) -> tuple[list[int], list[int]]:
    """The steps of the tiles in each run of tiles, longest first, and how many tiles it has.

    As `csrc/scheduler/triangular_runs.h` lists them.
    """
    runs = []
    for stack in problem.stacks:
        if 0 in (stack.g, stack.n):
            continue
        rows = math.ceil(stack.n / kernel.tile)
        steps = math.ceil(max(stack.k, 1) / (STEP_BYTES // problem.dtype.itemsize))
        runs.append((_num_products(problem) * steps, stack.g * (rows * (rows - 1) // 2)))
        runs.append((steps, stack.g * rows))
    runs.sort(key=lambda run: -run[0])
    return [steps for steps, _ in runs], [tiles for _, tiles in runs]


def _efficiency(problem: RankKProblem, kernel: Kernel) -> float:
    """The share of the tensor cores' work that is useful while the longest block is busy."""
    blocks = NUM_SMS * kernel.blocks
    steps = np.repeat(*_steps(problem, kernel))
    rounds = math.ceil(len(steps) / blocks)
    dealt = np.zeros((rounds, blocks), np.int64)
    dealt.ravel()[: len(steps)] = steps
    dealt[1::2] = dealt[1::2, ::-1].copy()
    longest = dealt.sum(axis=0).max()
    per_step = kernel.tile**2 * (STEP_BYTES // problem.dtype.itemsize)
    useful = sum(map(_useful, problem.stacks)) * _num_products(problem)
    return float(useful / (longest * blocks * per_step))


def _useful(stack: Stack) -> float:
    """Multiply-adds of one product in the triangle of each result."""
    return stack.g * stack.n * (stack.n + 1) / 2 * stack.k


def _num_products(problem: RankKProblem) -> int:
    return 2 if problem.op == "rank_2k" else 1
