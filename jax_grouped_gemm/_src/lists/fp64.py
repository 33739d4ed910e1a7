"""What the kernels on the FP64 tensor cores take, and how fast they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.plan import TileConfig

DTYPES = (jnp.float64, jnp.complex64, jnp.complex128)
STEP_BYTES = 128  # of a row of an operand, that a step of the mainloop multiplies


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled tile, `tile` x `tile`.

    Attributes:
      tile: rows and columns of the tile.
      blocks: thread blocks that a multiprocessor holds at a time.
      rate: the share of the tensor cores' rate that it can reach: small tiles read more bytes for
        each product than L2 delivers. An estimate from bytes, not a measurement.
    """

    tile: int
    blocks: int
    rate: float = 1.0

    def places(self, target: Target) -> int:
        """How many thread blocks the device holds at a time."""
        return target.multiprocessors * self.blocks

    @property
    def config(self) -> TileConfig:
        """The configuration under which the extension has this kernel."""
        return TileConfig(self.tile, self.tile, 1)


# The tiles in csrc/fp64/tile_table.h, the same for all operations.
KERNELS = {
    np.dtype(jnp.float64): (Kernel(128, 1), Kernel(64, 2, rate=0.65)),
    np.dtype(jnp.complex64): (Kernel(64, 2),),
    np.dtype(jnp.complex128): (Kernel(64, 2),),
}


class ListProblem(Protocol):
    """What the problems of products and of updates have in common."""

    @property
    def dtype(self) -> np.dtype:
        """Element type of the factors."""

    @property
    def result_dtype(self) -> np.dtype:
        """Element type of the results."""


def unsupported_reason(problem: ListProblem, params: Mapping[str, Any]) -> str:
    """Why the kernels cannot run a problem of their types, empty if they can."""
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


def num_steps(dtype: np.dtype, k: int) -> int:
    """How many steps the mainloop takes for a product that contracts `k` elements."""
    return cdiv(k, tile_k(dtype))


def tile_k(dtype: np.dtype) -> int:
    """How many elements of the contracted dimension one step multiplies."""
    return STEP_BYTES // np.dtype(dtype).itemsize


def busy_steps(places: int, steps: Sequence[int], counts: Sequence[int]) -> np.ndarray:
    """How many steps each of `places` thread blocks has, if `counts[i]` tiles have `steps[i]` each.

    The tiles, which are in the order given, go to the blocks in turn, every other round in reverse.
    """
    tiles = np.repeat(steps, counts)
    dealt = np.zeros((cdiv(len(tiles), places), places), np.int64)
    dealt.ravel()[: len(tiles)] = tiles
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return dealt.sum(axis=0)
