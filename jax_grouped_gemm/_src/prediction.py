"""How long a kernel takes: the larger of what multiplying and what moving bytes would take.

Rates are those that an H200 sustains, whose clock falls while all tensor cores are busy. Other
chips differ in the number of their multiprocessors, and in clock and memory, which is not known
here.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.target import H200, Target

# Multiply-adds a second of all tensor cores of an H200, and bytes a second of its memory, both as
# large products and large copies of benchmarks/results have them.
SIXTEEN_BITS = 390e12
EIGHT_BITS = 680e12
FP64 = 30e12
# Of XLA's float32 products, at the default precision and exact, as h200_rank_k.json has them.
TF32, FLOAT32 = 170e12, 24e12
BANDWIDTH = 4.2e12


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The bounds of a kernel's time.

    Attributes:
      tensor_seconds: what the tensor cores take, those idle included that have no tile.
      memory_seconds: what reading every operand and writing every result once takes.
      split_seconds: what splitting float32 operands into parts takes before.
    """

    tensor_seconds: float
    memory_seconds: float
    split_seconds: float = 0.0

    @property
    def bound(self) -> Literal["tensor cores", "memory"]:
        """Which takes longer."""
        return "tensor cores" if self.tensor_seconds >= self.memory_seconds else "memory"

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.split_seconds + max(self.tensor_seconds, self.memory_seconds)

    def __str__(self) -> str:
        us = self.seconds * 1e6
        time = f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms"
        return f"predicted time {time}, bound by {_WITH_ARTICLE[self.bound]}"


_WITH_ARTICLE = {"tensor cores": "the tensor cores", "memory": "memory"}


def predict(
    dtype: np.dtype,
    *,
    multiply_adds: float,
    utilization: float,
    num_bytes: float,
    target: Target,
    products: int = 1,
    split_bytes: float = 0,
) -> Prediction:
    """The bounds of a kernel on `target`.

    Args:
      dtype: of the operands.
      multiply_adds: pairs of elements to be multiplied.
      utilization: share of the tensor cores' work that is useful.
      num_bytes: what is read and written.
      target: the device.
      products: products of 16-bit parts for one of float32.
      split_bytes: what is read and written before, to split float32 operands.
    """
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        rate = FP64 / 4  # of complex numbers, each product is four
    elif dtype.itemsize == 8:
        rate = FP64
    else:
        rate = EIGHT_BITS if dtype.itemsize == 1 else SIXTEEN_BITS
    rate *= target.multiprocessors / H200.multiprocessors
    return Prediction(
        tensor_seconds=multiply_adds * products / (rate * utilization) if multiply_adds else 0.0,
        memory_seconds=num_bytes / BANDWIDTH,
        split_seconds=split_bytes / BANDWIDTH,
    )
