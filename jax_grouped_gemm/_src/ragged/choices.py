"""Which compiled configuration a ragged product takes: the rules, and what justifies them.

For each kind of operands there is one table. Its first entry is the default; of the others, those
are taken that run the problem and pay. `use_tiles` takes any that run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jax_grouped_gemm._src.arithmetic import cdiv
from jax_grouped_gemm._src.ragged import schedules
from jax_grouped_gemm._src.ragged.problem import ACCUMULATE, RaggedProblem
from jax_grouped_gemm._src.target import Target
from jax_grouped_gemm._src.tile_config import DEFAULT_TILE, TileConfig

STREAM_K_TILE = dataclasses.replace(DEFAULT_TILE, stream_k=True)
PINGPONG_TILE = TileConfig(tile_m=128, tile_n=192, cluster=2)
FLOAT32_FEW_ROWS_TILE = TileConfig(tile_m=64, tile_n=128, cluster=1)

# Cutting the last wave gives 6 % of 8.2 waves of 224 steps and nothing of 30 waves, and costs 1 %
# where groups or steps are few. Elsewhere it gives nothing, or loses up to 1 % (2 % in FP8).
STREAM_K_LEAST_ROWS = 256
STREAM_K_LEAST_STEPS = 64
STREAM_K_MOST_WAVES = 16

# Mean rows of a group, between which it was measured to pay that consumers take turns.
PINGPONG_LEAST_ROWS = 384
PINGPONG_MOST_ROWS = 2048

FLOAT32_FEW_ROWS = 64
"""Rows a group, on average, up to which float32 operands are split on their way to the tensor
cores: reading the weights takes longer than multiplying them, and passes over them longer still."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One compiled configuration.

    Attributes:
      tile: the configuration.
      record: the file in benchmarks/results and the case in it that were measured with this choice.
      runs: whether it can run a problem, as the kernels get it.
      pays: whether it is faster than the default, for a problem that it can run.
      blocks: thread blocks that share a multiprocessor.
    """

    tile: TileConfig
    record: tuple[str, str]
    runs: Callable[[RaggedProblem], bool] = lambda problem: True
    pays: Callable[[RaggedProblem, Target], bool] = lambda problem, target: False
    blocks: int = 1

    def places(self, target: Target) -> int:
        """Thread blocks that the device runs at a time."""
        cluster = self.tile.cluster
        return max(target.multiprocessors // cluster, 1) * cluster * self.blocks


def runnable(table: Sequence[Choice], problem: RaggedProblem) -> list[Choice]:
    """The entries of a table that can run `problem`, the default first."""
    return [choice for choice in table if choice.runs(problem)]


def choose(choices: Sequence[Choice], problem: RaggedProblem, target: Target) -> Choice:
    """What to take of the entries that can run `problem`."""
    default, *others = choices
    return next((choice for choice in others if choice.pays(problem, target)), default)


def rows_stay(problem: RaggedProblem) -> bool:
    """Whether lhs [m, k] is multiplied by weights."""
    return (problem.lhs, problem.out) == ("mk", "mn")


def has_few_rows(problem: RaggedProblem, most: int) -> bool:
    """Whether groups have `most` rows at most, on average."""
    return problem.m <= most * problem.num_groups


def stream_k_pays(problem: RaggedProblem, target: Target, least_steps: int) -> bool:
    """Whether to cut the last wave, from the mean size of a group, steps and waves of tiles."""
    waves = schedules.num_tiles(problem, STREAM_K_TILE) / target.multiprocessors
    return (
        cdiv(problem.m, problem.num_groups) >= STREAM_K_LEAST_ROWS
        and schedules.steps(problem) >= least_steps
        and waves <= STREAM_K_MOST_WAVES
    )


def _can_take_turns(problem: RaggedProblem) -> bool:
    # The stages of kernels that accumulate hold what is added to, until both consumers have read
    # it.
    layouts = problem.lhs, problem.rhs, problem.out
    return (
        layouts == ("mk", "mn", "gkn")
        and problem.out_dtype == np.float32
        and problem.op != ACCUMULATE
    )


def _taking_turns_pays(problem: RaggedProblem, target: Target) -> bool:
    least, most = (x * problem.num_groups for x in (PINGPONG_LEAST_ROWS, PINGPONG_MOST_ROWS))
    return least <= problem.m <= most


SIXTEEN_BITS = (
    Choice(DEFAULT_TILE, record=("h200_main.json", "qwen3_up/forward/random")),
    Choice(
        STREAM_K_TILE,
        record=("h200_main.json", "mixtral_down/forward/random"),
        runs=rows_stay,
        pays=lambda problem, target: stream_k_pays(problem, target, STREAM_K_LEAST_STEPS),
    ),
    Choice(
        PINGPONG_TILE,
        record=("h200_main.json", "qwen3_up/wgrad_f32/random"),
        runs=_can_take_turns,
        pays=_taking_turns_pays,
    ),
)
"""The table for two operands of bfloat16 or float16."""

FLOAT32 = (
    Choice(DEFAULT_TILE, record=("h200_float32_highest.json", "qwen3_up/forward/random")),
    Choice(
        FLOAT32_FEW_ROWS_TILE,
        record=("h200_float32_highest.json", "decode_up/forward/random"),
        runs=rows_stay,
        pays=lambda problem, target: has_few_rows(problem, FLOAT32_FEW_ROWS),
    ),
)
"""The table for two operands of float32."""


def table_for(problem: RaggedProblem) -> tuple[Choice, ...]:
    """The configurations for operands that are not FP8."""
    return FLOAT32 if problem.is_float32 else SIXTEEN_BITS
