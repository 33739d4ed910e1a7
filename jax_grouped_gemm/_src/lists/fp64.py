"""The kernels on the FP64 tensor cores, and their predicted speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.lists.schedule import busy_steps, in_turn
from jax_grouped_gemm._src.plan import Schedule, TileConfig, TiledKernel, algorithm_reason

STEP_BYTES = 128  # bytes of an operand's row that a step of the mainloop multiplies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Square(TiledKernel):
    """A kernel of square tiles.

    Attributes:
      rate: the share of the tensor cores' rate that the kernel can reach. Small tiles read more
        bytes for each product than L2 delivers. The share is estimated from bytes, not measured.
      may_be_tf32: whether precisions below the highest allow TF32, which is faster.
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
        """Returns multiply-adds of one step of all blocks that are resident at the same time."""
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
"""The kernel table of all operations. Plans take the kernel that is predicted to finish first. The
tiles are those of csrc/fp64/tile_table.h."""


def num_steps(dtype: np.dtype, k: int) -> int:
    """Returns the number of mainloop steps of a product that contracts `k` elements."""
    return cdiv(k, STEP_BYTES // dtype.itemsize)


Runs = list[tuple[int, int]]
"""For each run of equal tiles, the steps of a tile and the number of tiles."""


def simulated(
    kernels: Sequence[Any], launches: Callable[[int], list[Runs]], dtype: np.dtype, target: Target
) -> tuple[Square, int, float, float]:
    """Returns the kernel to take, its blocks, the steps of the longest block, and the balance.

    Args:
      kernels: the kernels that can run the problem.
      launches: returns the runs of each launch for the side of a tile, longest tiles first.
      dtype: dtype of the factors.
      target: the device.
    """
    choices = []
    for kernel in kernels:
        places = kernel.places(target)
        runs = [sorted(part, key=lambda run: -run[0]) for part in launches(kernel.side)]
        steps = [np.repeat(*np.transpose(part)) for part in runs]
        # Blocks take tiles one after the other; every second round begins with the last block.
        busy = [busy_steps(in_turn(len(x), places, serpentine=True), x) for x in steps]
        longest = sum(int(x.max()) for x in busy)
        balance = sum(int(x.sum()) for x in busy) / places / longest
        blocks = max(min(places, sum(tiles for _, tiles in part)) for part in runs)
        time = longest * kernel.multiply_adds_per_step(dtype, target) / kernel.rate
        choices.append((time, (kernel, blocks, float(longest), float(balance))))
    return min(choices, key=lambda choice: choice[0])[1]
