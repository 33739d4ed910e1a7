"""The operands of the kernels on the FP64 tensor cores, and how fast these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.plan import Schedule, TileConfig, TiledKernel, algorithm_reason

STEP_BYTES = 128  # of a row of an operand, that a step of the mainloop multiplies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Square(TiledKernel):
    """A kernel of tiles of as many rows as columns.

    Attributes:
      rate: the share of the tensor cores' rate that it can reach: small tiles read more bytes for
        each product than L2 delivers. An estimate from bytes, not a measurement.
      may_be_tf32: whether other precisions than the highest allow TF32, which is faster.
    """

    schedule: Schedule = "square"
    alignment: int = 1
    rate: float = 1.0
    may_be_tf32: bool = False

    def precision_reason(self, precision: Any, implementation: Any) -> str:
        is_fp64 = precision == lax.DotAlgorithmPreset.F64_F64_F64
        if not is_fp64 and (reason := algorithm_reason(precision)):
            return reason
        if self.may_be_tf32 and precision != lax.Precision.HIGHEST and implementation != "cuda":
            return (
                f"{self.lhs[0]} at precision={precision} may use TF32, which has a higher rate "
                "than the FP64 tensor cores; precision=HIGHEST takes the kernel"
            )
        return ""

    @property
    def side(self) -> int:
        """Rows and columns of the tile."""
        return self.tile.tile_m

    def multiply_adds_per_step(self, dtype: np.dtype, target: Target) -> int:
        """Multiply-adds of a step of all blocks that the device holds at a time."""
        return self.places(target) * self.side**2 * (STEP_BYTES // dtype.itemsize)


LARGE, SMALL = TileConfig(128, 128, 1), TileConfig(64, 64, 1)

SQUARES = (
    Square(tile=LARGE, lhs=("float64",), record=("h200_rank_k.json", "16x1024x1024/syr2k_f64")),
    Square(tile=SMALL, lhs=("float64",), blocks=2, rate=0.65),
    Square(tile=SMALL, lhs=("complex64",), blocks=2, may_be_tf32=True),
    Square(
        tile=SMALL,
        lhs=("complex128",),
        record=("h200_rank_k.json", "16x1024x1024/her2k_c128"),
        blocks=2,
    ),
)
"""The table, the same for all operations: what is predicted to be done first is taken. The tiles
are those of csrc/fp64/tile_table.h."""


def num_steps(dtype: np.dtype, k: int) -> int:
    """How many steps the mainloop takes for a product that contracts `k` elements."""
    return cdiv(k, STEP_BYTES // dtype.itemsize)


Runs = list[tuple[int, int]]
"""Steps of the tiles of a run, which are alike, and how many tiles it has."""


def simulated(
    kernels: Sequence[Any], launches: Callable[[int], list[Runs]], dtype: np.dtype, target: Target
) -> tuple[Square, int, float, float]:
    """The kernel to take, its blocks, the steps of the longest block, and the balance.

    Args:
      kernels: those that run the problem.
      launches: gives the runs of each launch, from the side of a tile. The longest tiles are first.
      dtype: of the factors.
      target: the device.
    """
    choices = []
    for kernel in kernels:
        places = kernel.places(target)
        runs = [sorted(part, key=lambda run: -run[0]) for part in launches(kernel.side)]
        busy = [busy_steps(places, *zip(*part, strict=True)) for part in runs]
        longest = sum(int(x.max()) for x in busy)
        balance = sum(int(x.sum()) for x in busy) / places / longest
        blocks = max(min(places, sum(tiles for _, tiles in part)) for part in runs)
        time = longest * kernel.multiply_adds_per_step(dtype, target) / kernel.rate
        choices.append((time, (kernel, blocks, float(longest), float(balance))))
    return min(choices, key=lambda choice: choice[0])[1]


def busy_steps(places: int, steps: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """How many steps each of `places` thread blocks has, if `counts[i]` tiles have `steps[i]` each.

    The tiles, which are in the order given, go to the blocks in turn, every other round in reverse.
    """
    tiles = np.repeat(steps, counts)
    dealt = np.zeros((cdiv(len(tiles), places), places), np.int64)
    dealt.ravel()[: len(tiles)] = tiles
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return dealt.sum(axis=0)
