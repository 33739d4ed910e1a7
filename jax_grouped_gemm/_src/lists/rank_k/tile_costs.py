"""Predicts which tile computes many small updates sooner, from measured cycles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.lists.rank_k.problem import RankKProblem, Stack
from jax_grouped_gemm._src.lists.schedule import TILE_K

SIDE = 128

# Both tiles were measured with many results in a call, each with a number of rows in this range.
FEWEST_ROWS, MOST_ROWS = 512, 1024
# Fine tiles are taken only if they need less than this share of the cycles of wide tiles.
MARGIN = 0.97


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cycles of a unit of work: for each step of its mainloop, and for the rest."""

    step: int
    rest: int

    def of(self, steps: int) -> int:
        return self.step * steps + self.rest


# Fitted to 384 matrices of [n, 2048], n from 512 to 1024, on an H100. In each step, wide tiles on
# the diagonal load 1.5 times as much as wide tiles that share a rhs.
WIDE, WIDE_DIAGONAL, NARROW = Cost(1125, 9000), Cost(1690, 9000), Cost(845, 9000)
FINE, FINE_DIAGONAL = Cost(550, 8400), Cost(830, 8400)
# Extra cycles of a unit that adds C, from 384 matrices of 768 x 768 in either tile.
WIDE_C, FINE_C = 8000, 1000
# For products of two factors: the measured extra cycles of a wide unit, and the estimated cost of a
# fine unit on the diagonal, which loads both factors of both sides in a step.
WIDE_PRODUCT, FINE_DIAGONAL_PRODUCT = 14000, Cost(1100, 8400)


def wide_tiles(stack: Stack, upper: bool) -> tuple[int, int, int]:
    """Returns how many tiles a matrix has: off the diagonal, wide on it, and narrow on it.
    `csrc/scheduler/triangular.h` lists them in the same way."""
    rows = cdiv(stack.n, SIDE)
    upper_tiles, lower_tiles = (rows + 1) // 2, rows // 2
    on_diagonal = (upper_tiles, lower_tiles) if upper else (lower_tiles, upper_tiles)
    return upper_tiles * (upper_tiles - 1) // 2, *on_diagonal


def num_fine_units(stack: Stack) -> int:
    """Returns the number of fine units, as `csrc/scheduler/triangular_fine.h` counts them."""
    return stack.g * sum(_fine_units(stack))


def _fine_units(stack: Stack) -> tuple[int, int]:
    """Returns the numbers of a matrix's fine units: on the diagonal, and all others."""
    rows = cdiv(stack.n, SIDE)
    return (rows + 1) // 2, (rows * (rows - 1) // 2 - rows // 2) // 2


def fine_is_sooner(problem: RankKProblem, stacks: Sequence[Stack], clusters: int) -> bool:
    """Whether fine tiles, which waste less on the diagonal, finish many small results sooner.

    Args:
      problem: the updates.
      stacks: the stacks that have results.
      clusters: number of clusters that run at the same time.
    """
    rows = [s.n for s in stacks]
    if problem.op == "rank_2k" or min(rows) < FEWEST_ROWS or max(rows) > MOST_ROWS:
        return False
    wide = sum(_wide_cycles(stack, problem) for stack in stacks)
    fine = sum(_fine_cycles(stack, problem) for stack in stacks)
    # Each block has one tile, so the last round is as long as any other round.
    rounds = sum(map(num_fine_units, stacks)) / clusters
    return fine * math.ceil(rounds) / rounds < MARGIN * wide


def _wide_cycles(stack: Stack, problem: RankKProblem) -> float:
    """Returns the cycles of all clusters together, for one stack."""
    steps = cdiv(stack.k, TILE_K)
    others, wide, narrow = wide_tiles(stack, problem.upper)
    c = WIDE_C if problem.has_c else WIDE_PRODUCT if problem.op == "symm_product" else 0
    of_a_matrix = (
        others * (WIDE.of(steps) + c)
        + wide / 2 * (WIDE_DIAGONAL.of(steps) + c)
        + narrow / 2 * (NARROW.of(steps) + c)
    )
    return stack.g * of_a_matrix


def _fine_cycles(stack: Stack, problem: RankKProblem) -> float:
    steps, (diagonal, others) = cdiv(stack.k, TILE_K), _fine_units(stack)
    on_diagonal = FINE_DIAGONAL_PRODUCT if problem.op == "symm_product" else FINE_DIAGONAL
    c = FINE_C if problem.has_c else 0
    return stack.g * (diagonal * (on_diagonal.of(steps) + c) + others * (FINE.of(steps) + c))
