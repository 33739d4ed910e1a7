"""The GPU that a plan is made for, and how fast it is.

A kernel takes the larger of what multiplying and what moving bytes would take. Rates are those that
an H200 sustains, whose clock falls while all tensor cores are busy. Other chips differ in the
number of their multiprocessors, and in clock and memory, which is not known here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates that a chip sustains, by default an H200.

    The tensor cores' rates and the memory's are those of large products and large copies in
    benchmarks/results, those of XLA's float32 products are in h200_rank_k.json.

    Attributes:
      multiprocessors: of the chip that has these rates; others multiply in proportion to theirs.
      sixteen_bits, eight_bits, fp64: multiply-adds a second of operands of these sizes.
      tf32, float32: those of XLA's float32 products, at the default precision and exact.
      bandwidth: bytes a second of its memory.
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

    An H100 SXM and a GH200 have as many multiprocessors.

    Attributes:
      multiprocessors: how many it has.
      arch: which instructions it has.
      rates: how fast it is.
    """

    multiprocessors: int = 132
    arch: str = "sm90"
    rates: Rates = dataclasses.field(default=Rates(), repr=False)

    def __post_init__(self) -> None:
        if self.multiprocessors < 1:
            raise ValueError(f"multiprocessors must be positive, got {self.multiprocessors}")

    @classmethod
    def of(cls, device: Any) -> Target:
        """Describes a `jax.Device`, which may be one that is described only, to compile for it."""
        count = getattr(device, "core_count", None)
        return cls(count) if count else H200

    def multiply_adds(self, dtype: np.dtype) -> float:
        """Multiply-adds a second of operands of `dtype`; float32 ones are multiplied in parts."""
        rates, dtype = self.rates, np.dtype(dtype)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            rate = rates.fp64 / 4  # of complex numbers, each product is four
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
        return f"predicted time {duration(self.seconds)}, bound by {_WITH_ARTICLE[self.bound]}"


def duration(seconds: float) -> str:
    """A time in words."""
    us = seconds * 1e6
    return f"{us:.3g} us" if us < 999.5 else f"{us / 1e3:.3g} ms"


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
    rate = target.multiply_adds(dtype) * utilization
    return Prediction(
        tensor_seconds=multiply_adds * products / rate if multiply_adds else 0.0,
        memory_seconds=num_bytes / target.rates.bandwidth,
        split_seconds=split_bytes / target.rates.bandwidth,
    )
