"""The tables of kernels that ragged products choose from; csrc/ragged/tiles.h has the same tiles.

The first entry that runs a problem is the default. A plan takes the first other entry that runs
the problem and pays, if there is one. `use_tiles` may select any entry that runs the problem. The
last entry is XLA's product, which a plan takes if it is faster than the entry chosen so far.
"""

from __future__ import annotations

import dataclasses
import functools

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.plan import (
    DEFAULT_TILE,
    FLOATS,
    FLOATS_16,
    Kernel,
    Table,
    TileConfig,
    TiledKernel,
    always,
)
from jax_grouped_gemm._src.ragged import split_in_kernel
from jax_grouped_gemm._src.ragged.problem import (
    RaggedProblem,
    count_tiles,
    count_waves,
    rows_stay,
    steps,
    stream_k_waves,
)
from jax_grouped_gemm._src.ragged.split_in_kernel import SWAPPED_FLOAT32_TILE
from jax_grouped_gemm._src.ragged.whole import xla_work

STREAM_K_TILE = dataclasses.replace(DEFAULT_TILE, stream_k=True)
NARROW_TILE = TileConfig(tile_m=128, tile_n=128, cluster=2)
NARROW_STREAM_K_TILE = dataclasses.replace(NARROW_TILE, stream_k=True)
PINGPONG_TILE = TileConfig(tile_m=128, tile_n=192, cluster=2)

# Cutting the last wave saves 6 % of the time of 8.2 waves of 224 steps. Outside these limits it
# saves nothing, or costs up to 1 % (2 % in FP8).
STREAM_K_LEAST_ROWS = 256
STREAM_K_LEAST_STEPS = 64
STREAM_K_MOST_WAVES = 16
# For at most two waves, with any number of rows, cutting must save at least this number of steps.
# If it saves 25 or more, it takes .48 to .97 of the time; if 21 or fewer, up to 1.25 times as long
# (docs/notes/ragged.md).
STREAM_K_FEW_WAVES = 2
STREAM_K_SAVED_STEPS = 25
# This is the limit for narrow tiles. If cutting saves 21 steps, it takes .85 to .94 of the time; if
# 18 or fewer, 1.06 to 1.5 times as long.
NARROW_SAVED_STEPS = 20

# Up to this number of waves, narrow tiles are faster even if they need twice as many waves. They
# take .72 to .96 of the time for weight gradients, and .80 to 1.03 for other products of at most
# `NARROW_STEPS` steps. With four waves they take 1.07 times as long (docs/notes/ragged.md).
NARROW_WAVES, NARROW_STEPS = 3, 4

# Ping-pong was measured to pay between these mean numbers of rows of a group.
PINGPONG_LEAST_ROWS = 384
PINGPONG_MOST_ROWS = 2048


def _narrow_pays(problem: RaggedProblem, target: Target) -> bool:
    """Returns whether narrow tiles, whose waves are shorter, take few enough waves to be faster."""
    clusters = target.clusters(DEFAULT_TILE.cluster)
    wide, narrow = (count_waves(problem, tile, clusters) for tile in (DEFAULT_TILE, NARROW_TILE))
    are_short = problem.contracts_rows or steps(problem) <= NARROW_STEPS
    return narrow <= (max(wide, NARROW_WAVES) if are_short else wide)


def stream_k_pays(problem: RaggedProblem, target: Target, least_steps: int) -> bool:
    """Returns whether cutting the last wave pays, if there are many waves."""
    waves = count_tiles(problem, STREAM_K_TILE) / target.multiprocessors
    return (
        cdiv(problem.m, problem.num_groups) >= STREAM_K_LEAST_ROWS
        and steps(problem) >= least_steps
        and waves <= STREAM_K_MOST_WAVES
    )


def _cutting_pays(problem: RaggedProblem, target: Target, tile: TileConfig, least: int) -> bool:
    """Returns whether cutting the last wave pays. With few waves it must save `least` steps."""
    clusters = target.clusters(tile.cluster)
    units = cdiv(count_tiles(problem, tile), tile.cluster)
    saved = cdiv(units, clusters) - stream_k_waves(units, steps(problem), clusters)
    if units <= STREAM_K_FEW_WAVES * clusters and saved * steps(problem) >= least:
        return True
    return stream_k_pays(problem, target, STREAM_K_LEAST_STEPS)


def _only_for_gradients(problem: RaggedProblem) -> str:
    # In kernels that accumulate, stages hold the accumulator until both consumers have read it.
    takes_turns = problem.contracts_rows and not problem.accumulates
    return "" if takes_turns else "only for weight gradients that are not added up"


def _not_for_gradients(problem: RaggedProblem) -> str:
    return "" if rows_stay(problem) else "not for weight gradients"


def _taking_turns_pays(problem: RaggedProblem, target: Target) -> bool:
    if problem.n <= NARROW_TILE.tile_n:  # a third of a tile is empty: 1.03 to 1.4 times as slow
        return False
    least, most = (x * problem.num_groups for x in (PINGPONG_LEAST_ROWS, PINGPONG_MOST_ROWS))
    return least <= problem.m <= most


ALL_ROWS = Kernel("xla_all_rows", work=xla_work)
"""XLA's product of all rows with every group's matrix; see `whole`."""

_of_16_bits = functools.partial(TiledKernel, lhs=FLOATS_16, out=FLOATS)

SIXTEEN_BITS = (
    _of_16_bits(
        tile=DEFAULT_TILE, record=("h200_main.json", "qwen3_up/forward/random"), in_order=always
    ),
    _of_16_bits(
        tile=PINGPONG_TILE,
        schedule="pingpong",
        out=("float32",),
        record=("h200_main.json", "qwen3_up/wgrad_f32/random"),
        refuses=_only_for_gradients,
        pays=_taking_turns_pays,
    ),
    _of_16_bits(
        tile=NARROW_STREAM_K_TILE,
        schedule="stream_k",
        record=("h200_adapters.json", "rank64_down/forward/random"),
        refuses=_not_for_gradients,
        pays=lambda problem, target: (
            _narrow_pays(problem, target)
            and _cutting_pays(problem, target, NARROW_STREAM_K_TILE, NARROW_SAVED_STEPS)
        ),
    ),
    _of_16_bits(
        tile=NARROW_TILE,
        record=("h200_adapters.json", "rank128_down/forward/random"),
        pays=_narrow_pays,
        in_order=always,
    ),
    _of_16_bits(
        tile=STREAM_K_TILE,
        schedule="stream_k",
        record=("h200_main.json", "mixtral_down/forward/random"),
        refuses=_not_for_gradients,
        pays=functools.partial(_cutting_pays, tile=STREAM_K_TILE, least=STREAM_K_SAVED_STEPS),
    ),
)
"""The table for two operands of bfloat16 or float16."""


def _float32_table(name: str) -> tuple[TiledKernel, ...]:
    of_32_bits = functools.partial(TiledKernel, lhs=("float32",), out=FLOATS)
    return (
        of_32_bits(tile=DEFAULT_TILE, record=(name, "qwen3_up/forward/random")),
        of_32_bits(
            tile=SWAPPED_FLOAT32_TILE,
            schedule="swapped",
            splits=True,
            record=(name, "decode_up/forward/random"),
            refuses=_not_for_gradients,
            pays=split_in_kernel.pays,
            # The first kernel is not batch invariant, because all rows of a group share a scale.
            in_order=always,
        ),
    )


FLOAT32 = _float32_table("h200_float32_default.json")
FLOAT32_EXACT = _float32_table("h200_float32_highest.json")
"""The tables for two operands of float32, at the default and at the highest precision."""
KERNELS, EXACT_KERNELS = (
    Table((*SIXTEEN_BITS, *of_32_bits), ALL_ROWS) for of_32_bits in (FLOAT32, FLOAT32_EXACT)
)
