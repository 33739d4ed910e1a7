"""Which compiled configuration a product of FP8 operands takes: the rules, and what justifies them.

The tables are as those of `_src.ragged.choices`.
"""

from __future__ import annotations

from jax_grouped_gemm._src.ragged.choices import (
    STREAM_K_TILE,
    Choice,
    has_few_rows,
    stream_k_pays,
)
from jax_grouped_gemm._src.tile_config import DEFAULT_TILE, TileConfig

TRANSPOSED_TILE = TileConfig(tile_m=32, tile_n=128, cluster=1)

FP8_FEW_ROWS = 16
"""Rows a group, on average, up to which the transposed tile is the faster one."""

FP8_STREAM_K_LEAST_STEPS = 96
"""Measured at 112 steps and 8.2 waves alone, where 7 % in steps were 4.5 % in time."""

NONCONTRACTING = (
    Choice(DEFAULT_TILE, record=("h200_fp8.json", "qwen3_up/fp8_forward/random")),
    Choice(
        TRANSPOSED_TILE,
        record=("h200_fp8.json", "decode_small/fp8_forward/random"),
        pays=lambda problem, target: has_few_rows(problem, FP8_FEW_ROWS),
        blocks=3,
    ),
    Choice(
        STREAM_K_TILE,
        record=("h200_fp8.json", "mixtral_down/fp8_forward/random"),
        pays=lambda problem, target: stream_k_pays(problem, target, FP8_STREAM_K_LEAST_STEPS),
    ),
)

CONTRACTING = (Choice(DEFAULT_TILE, record=("h200_fp8.json", "mixtral_up/fp8_wgrad/random")),)
