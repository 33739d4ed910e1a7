"""Decides whether the product's kernel splits float32 operands itself, or passes split them first.

A pass over an operand takes the same time however few rows there are, and each pass is a kernel
launch. If groups have few rows, or matrices few rows or columns, these costs dominate, and tiles of
128x256 are mostly empty. The kernel that splits operands itself has tiles of 64x128 and needs no
passes. But it splits weights again for every 64 rows, and needs three products of bfloat16 parts
where the other kernel needs one product of float16 parts.
"""

from __future__ import annotations

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.plan import DEFAULT_TILE, TileConfig
from jax_grouped_gemm._src.ragged.problem import RaggedProblem, result_tiles, steps

SWAPPED_FLOAT32_TILE = TileConfig(tile_m=64, tile_n=128, cluster=1)

SPLIT_MOST_ROWS = 64
"""Mean number of rows of a group up to which splitting in the kernel is always faster. Reading
weights then takes longer than multiplying them, and passes over weights take even longer."""

# For groups of more rows, these numbers are fitted to h200_never_slower.json, at the default
# precision (docs/notes/float32.md). They are the time of a call, of a wave of tiles, and of each
# step of a wave, and the share of the memory's bandwidth that the kernel reaches.
SECONDS, WAVE_SECONDS, STEP_SECONDS, SHARE = 4e-6, 1.2e-6, 1.04e-6, 0.61
# These are the same numbers for a product after passes, whose time also grows with the groups.
PASSES_SECONDS, GROUP_SECONDS = 14.5e-6, 0.4e-6
PASSED_WAVE_SECONDS, PASSED_STEP_SECONDS, PASSED_SHARE = 1e-6, 0.61e-6, 0.42
# Predictions are inexact, so splitting in the kernel must take less than this share of the time.
MARGIN = 0.95


def pays(problem: RaggedProblem, target: Target) -> bool:
    """Returns whether to split in the kernel, for float32 products that keep the rows."""
    if problem.m <= SPLIT_MOST_ROWS * problem.num_groups:
        return True
    return seconds(problem, target) < MARGIN * seconds_with_passes(problem, target)


def seconds(problem: RaggedProblem, target: Target) -> float:
    """Returns the predicted time of the kernel that splits operands itself."""
    products = float32.products_in_kernel(problem.terms) / float32.products_in_kernel(1)
    wave = steps(problem) * (STEP_SECONDS * products) + WAVE_SECONDS
    multiplying = _waves(problem, SWAPPED_FLOAT32_TILE, target) * wave
    moved = problem.operand_bytes + problem.result_bytes
    return SECONDS + max(multiplying, moved / (SHARE * target.rates.bandwidth))


def seconds_with_passes(problem: RaggedProblem, target: Target) -> float:
    """Returns the predicted time of passes that split and of the product after them."""
    operand_bytes, split_bytes = float32.bytes_of_split(problem.operand_bytes, problem.terms)
    wave = steps(problem) * (PASSED_STEP_SECONDS * problem.terms) + PASSED_WAVE_SECONDS
    multiplying = _waves(problem, DEFAULT_TILE, target) * wave
    moving = (operand_bytes + problem.result_bytes) / (PASSED_SHARE * target.rates.bandwidth)
    groups, _, _ = result_tiles(problem)
    starting = PASSES_SECONDS + GROUP_SECONDS * groups
    return starting + split_bytes / target.rates.bandwidth + max(multiplying, moving)


def _waves(problem: RaggedProblem, tile: TileConfig, target: Target) -> int:
    """Returns the number of waves, if the last tile of each group is half full on average."""
    groups, rows, columns = result_tiles(problem)
    tiles = groups * max(rows / tile.tile_m + 0.5, 1) * cdiv(columns, tile.tile_n)
    return -int(-tiles // target.multiprocessors)
