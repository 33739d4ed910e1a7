"""The kernels of the operations of an MLP, and when each of them pays."""

from __future__ import annotations

import functools
from typing import Any

from jax_grouped_gemm._src.arrays import is_static, round_up
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.mlp.operands import (
    DownOperands,
    DownWeightsOperands,
    GradientOperands,
    MlpOperands,
    PairedWeightsOperands,
)
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.plan import DEFAULT_TILE, TileConfig, TiledKernel, always

FEW_ROWS_MOST = 8
FEW_ROWS_TILE = TileConfig(tile_m=32, tile_n=128, cluster=1)
"""Mean rows a group up to which the kernel that reads weights once pays, and this kernel's tile."""

# Tiles of the gradient of hidden. The two consumers take turns with them.
WIDE_GRADIENT, NARROW_GRADIENT = TileConfig(128, 192, 2), TileConfig(128, 128, 2)
# The cost of a column of a narrow tile, in columns of a wide tile. Narrow tiles read operands more
# often. Measured: 1.13 to 1.33 in the kernel alone (docs/notes/moe.md).
NARROW_COLUMN = 1.2


def _few_rows_pay(problem: MlpProblem[MlpOperands | DownOperands], target: Any) -> bool:
    rows, groups = problem.operands.num_rows, problem.operands.groups.sizes.shape[0]
    return is_static(rows, groups) and rows <= FEW_ROWS_MOST * groups


def _narrow_pays(problem: MlpProblem[GradientOperands], target: Target) -> bool:
    """Whether a narrow tile wastes less at the last columns."""
    columns = problem.operands.gate.shape[1]
    wide, narrow = (round_up(columns, tile.tile_n) for tile in (WIDE_GRADIENT, NARROW_GRADIENT))
    return wide > NARROW_COLUMN * narrow


def _fits_weights(
    problem: MlpProblem[PairedWeightsOperands | DownWeightsOperands],
    target: Target,
    *,
    more_than: int,
    most: int,
) -> bool:
    """Whether a tile of `most` columns wastes the fewest columns, and no tile is asked for."""
    return problem.params["tile_choices"].wgrad is None and (
        more_than < problem.operands.columns <= most
    )


def _only_rows_in_place(
    problem: MlpProblem[PairedWeightsOperands | DownWeightsOperands],
) -> str:
    return "it only reads rows in place" if problem.operands.rows.rows is None else ""


_of_mlp = functools.partial(TiledKernel, lhs=("bfloat16",), in_order=always)

FORWARD_KERNELS = (
    _of_mlp(tile=DEFAULT_TILE, record=("h200_moe_quack.json", "qwen3_30b/moe_forward")),
    _of_mlp(
        tile=FEW_ROWS_TILE,
        schedule="few_rows",
        record=("h200_moe_decode.json", "qwen3_30b_16/moe_forward"),
        pays=_few_rows_pay,
    ),
)
"""The table for hidden layers and for products that add biases."""

GRADIENT_KERNELS = (
    _of_mlp(
        tile=WIDE_GRADIENT,
        schedule="pingpong",
        record=("h200_moe_quack.json", "qwen3_30b/moe_step"),
    ),
    _of_mlp(
        tile=NARROW_GRADIENT,
        schedule="pingpong",
        record=("h200_moe_quack.json", "sonic_7b/moe_step"),
        pays=_narrow_pays,
    ),
)
"""The table for gradients of hidden layers."""

PAIRED_KERNELS = (_of_mlp(tile=DEFAULT_TILE, record=("h200_moe_quack.json", "qwen3_30b/moe_step")),)
"""The table for two products whose sum is one result."""

WEIGHTS_KERNELS = (
    *PAIRED_KERNELS,
    _of_mlp(
        tile=TileConfig(128, 192, 2),
        record=("h200_moe_fine_2.json", "granular/moe_step"),
        refuses=_only_rows_in_place,
        pays=functools.partial(_fits_weights, more_than=128, most=192),
    ),
)
"""The table for the gradients of the weights of gate and up."""

DOWN_WEIGHTS_KERNELS = (
    *WEIGHTS_KERNELS,
    _of_mlp(
        tile=TileConfig(128, 128, 2),
        record=("h200_moe_fine_2.json", "nano/moe_step"),
        refuses=_only_rows_in_place,
        pays=functools.partial(_fits_weights, more_than=0, most=128),
    ),
)
"""The table for the gradient of wo."""
