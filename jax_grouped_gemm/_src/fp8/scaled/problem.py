"""The problem of a plan: one product of FP8 operands with scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_grouped_gemm._src.fp8.formats import BLOCK, Scaling, Shape
from jax_grouped_gemm._src.ragged.problem import RaggedProblem


@dataclasses.dataclass(frozen=True)
class ScaledProblem(RaggedProblem):
    """Static description of one product of FP8 operands with scales.

    Attributes:
      scales: which elements of lhs, and which elements of rhs, share a scale.
      b: blocks of 128 rows of a contracting product, each of one group; 0 otherwise.
      r: rows of such a block; 0 otherwise.
      fast_accumulation: whether tensor cores alone may add up products.
      view: where lhs, or rhs in a contracting product, is in a flat array; see `ScaledView`.
    """

    scales: tuple[Scaling, Scaling]
    b: int = 0
    r: int = 0
    fast_accumulation: bool = False
    view: Shape = ()

    def counts(self) -> dict[str, Any]:
        rows = {"the number of rows of all blocks of 128": self.b * BLOCK} if self.b else {}
        return super().counts() | rows

    def __str__(self) -> str:
        return f"{super().__str__()}, scaled by {self.scales[0]} and {self.scales[1]}"


def without_scales(avals: Sequence[Any]) -> Sequence[Any]:
    lhs, _, rhs, _, group_sizes, group_offset = avals
    return lhs, rhs, group_sizes, group_offset
