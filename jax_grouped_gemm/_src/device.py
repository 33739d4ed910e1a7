"""The GPU that a plan is made for, and its speed.

The time of a kernel is at least that of its multiplications, and at least that of moving its bytes.
The rates are those that an H200 sustains; its clock falls while all tensor cores are busy. For
another chip, plans use its number of multiprocessors, but the clock and memory of an H200.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates that a chip sustains, by default an H200.

    Rates of tensor cores and memory are those of large products and large copies in
    benchmarks/results; h200_rank_k.json has the rates of XLA's float32 products.

    Attributes:
      multiprocessors: number on this chip, to which predicted multiply-adds are proportional.
      sixteen_bits, eight_bits, fp64: multiply-adds per second for operands of these sizes.
      tf32, float32: multiply-adds per second of XLA, at the default and at the highest precision.
      bandwidth: bytes per second of the memory.
    """

    multiprocessors: int = 132
    sixteen_bits: float = 390e12
    eight_bits: float = 680e12
    fp64: float = 30e12
    tf32: float = 170e12
    float32: float = 24e12
    bandwidth: float = 4.2e12


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a plan is made for, by default an H200.

    An H100 SXM and a GH200 have the same number of multiprocessors.

    Attributes:
      multiprocessors: number of multiprocessors.
      rates: speed of the chip.
    """

    multiprocessors: int = 132
    rates: Rates = dataclasses.field(default=Rates(), repr=False)

    def __post_init__(self) -> None:
        if self.multiprocessors < 1:
            raise ValueError(f"multiprocessors must be positive, got {self.multiprocessors}")

    @classmethod
    def of(cls, device: Any) -> Target:
        """Returns the target for a `jax.Device`, or for the description of one to compile for."""
        count = getattr(device, "core_count", None)
        return cls(count) if count else H200

    def clusters(self, size: int) -> int:
        """Returns the number of clusters of `size` thread blocks that run at a time."""
        return max(self.multiprocessors // size, 1)

    def multiply_adds(self, dtype: np.dtype) -> float:
        """Returns multiply-adds per second of `dtype` operands; for float32, of 16-bit parts."""
        rates, dtype = self.rates, np.dtype(dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            rate = rates.fp64 / 4  # a complex product is four real products
        elif dtype.itemsize == 8:
            rate = rates.fp64
        else:
            rate = rates.eight_bits if dtype.itemsize == 1 else rates.sixteen_bits
        return rate * (self.multiprocessors / rates.multiprocessors)


H200 = Target()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The bounds of a kernel's time.

    Attributes:
      tensor_seconds: time of the tensor cores, some of which are idle if tiles are few.
      memory_seconds: time to read every operand and write every result once.
      split_seconds: time to split float32 operands into parts first.
    """

    tensor_seconds: float
    memory_seconds: float
    split_seconds: float = 0.0

    @property
    def bound(self) -> Literal["tensor cores", "memory"]:
        """The larger of the two bounds."""
        return "tensor cores" if self.tensor_seconds >= self.memory_seconds else "memory"

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return self.split_seconds + max(self.tensor_seconds, self.memory_seconds)

    def __str__(self) -> str:
        article = "" if self.bound == "memory" else "the "
        return f"predicted time {duration(self.seconds)}, bound by {article}{self.bound}"


def duration(seconds: float) -> str:
    """Returns a time with its unit, in microseconds or milliseconds."""
    us = seconds * 1e6
    return f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms"


def predict(
    dtype: np.dtype,
    *,
    multiply_adds: float,
    utilization: float,
    num_bytes: float,
    target: Target,
    split_bytes: float = 0,
) -> Prediction:
    """Returns the bounds of a kernel's time on `target`.

    Args:
      dtype: dtype of the operands.
      multiply_adds: number of multiply-adds.
      utilization: share of the tensor cores' work that is useful.
      num_bytes: bytes that the kernel reads and writes.
      target: the device.
      split_bytes: bytes that passes before the kernel read and write to split float32 operands.
    """
    rate = target.multiply_adds(dtype) * utilization
    return Prediction(
        tensor_seconds=multiply_adds / rate if multiply_adds else 0.0,
        memory_seconds=num_bytes / target.rates.bandwidth,
        split_seconds=split_bytes / target.rates.bandwidth,
    )
