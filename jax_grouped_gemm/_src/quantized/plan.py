"""How quantised weights are multiplied: today they are dequantised once a call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.plan import XLA, Plan
from jax_grouped_gemm._src.quantized.format import Format, Matrix


@dataclasses.dataclass(frozen=True)
class DequantizeProblem:
    """Weights that are dequantised before they are multiplied.

    Attributes:
      format: of the weights.
      matrix: k and n of each.
      count: how many matrices.
      dtype: in which they are multiplied.
      packed_bytes: of the weights as they are stored.
    """

    format: Format
    matrix: Matrix
    count: int
    dtype: np.dtype
    packed_bytes: int

    @property
    def op(self) -> str:
        """Name of the primitive."""
        return "dequantize_weights"

    @property
    def bytes(self) -> int:
        """What the dequantised weights take."""
        return self.count * math.prod(self.matrix) * self.dtype.itemsize

    def __str__(self) -> str:
        shape = self.count, *self.matrix
        if not is_static(*shape):
            return f"dequantises weights first: {self.format} {list(shape)} to {self.dtype}"
        return (
            f"dequantises {readable(self.bytes)} of weights first: {self.format} {list(shape)}, "
            f"{readable(self.packed_bytes)}, to {self.dtype}"
        )


def plan_dequantize(
    operands: Sequence[Any], params: Mapping[str, Any], target: Target
) -> Plan[DequantizeProblem]:
    """The plan of one call of the primitive."""
    packed_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in operands)
    problem = DequantizeProblem(
        params["format"], params["matrix"], operands[0].shape[0], params["dtype"], packed_bytes
    )
    return Plan(problem, XLA, "no kernel multiplies weights of this format")


def readable(size: int) -> str:
    """A number of bytes with a unit, 1.6 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} bytes"
