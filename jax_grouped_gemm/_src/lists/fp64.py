"""The operands of the kernels on the FP64 tensor cores, and how fast these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.plan import Schedule, TileConfig, TiledKernel

DTYPES = (jnp.float64, jnp.complex64, jnp.complex128)
STEP_BYTES = 128  # of a row of an operand, that a step of the mainloop multiplies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Square(TiledKernel):
    """A kernel of tiles of as many rows as columns.

    Attributes:
      rate: the share of the tensor cores' rate that it can reach: small tiles read more bytes for
        each product than L2 delivers. An estimate from bytes, not a measurement.
    """

    schedule: Schedule = "square"
    rate: float = 1.0

    @property
    def side(self) -> int:
        """Rows and columns of the tile."""
        return self.tile.tile_m


LARGE, SMALL = TileConfig(128, 128, 1), TileConfig(64, 64, 1)

KERNELS = {
    np.dtype(jnp.float64): (
        Square(tile=LARGE, record=("h200_rank_k.json", "16x1024x1024/syr2k_f64")),
        Square(tile=SMALL, record=None, blocks=2, rate=0.65),
    ),
    np.dtype(jnp.complex64): (Square(tile=SMALL, record=None, blocks=2),),
    np.dtype(jnp.complex128): (
        Square(tile=SMALL, record=("h200_rank_k.json", "16x1024x1024/her2k_c128"), blocks=2),
    ),
}
"""The tables, the same for all operations: what is predicted to be done first is taken. The tiles
are those of csrc/fp64/tile_table.h."""


class ListProblem(Protocol):
    """The fields that problems of products and of updates share."""

    @property
    def dtype(self) -> np.dtype:
        """Element type of the factors."""

    @property
    def result_dtype(self) -> np.dtype:
        """Element type of the results."""

    def sizes(self) -> dict[str, int]:
        """The sizes that kernels count, by name."""


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
