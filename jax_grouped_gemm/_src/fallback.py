"""Predicts whether XLA is faster than a kernel, for all operations.

A kernel has tiles of 128 rows, and needs passes that split float32 operands. XLA has smaller tiles,
cuts the contracted dimension, and does not split float32 operands. So small problems fall back to
XLA: ragged products to products of all rows with every group's matrix, lists to a call for each
product, and symmetric updates to products of whole matrices. A recipe falls back to bf16
(`fp8/prediction.py`).

Each of the two predicted times is a sum of terms times coefficients. Terms are launches, the time
of multiplying or of moving bytes at the rates of `device`, and passes over memory. `fallback.json`
has the coefficients of each kind of problem, which `python -m benchmarks.fit` fits to measurements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.float32 import FULL_TERMS
from jax_grouped_gemm._src.invariance import invariant, is_enabled, is_invariant, without
from jax_grouped_gemm._src.plan import Kernel, Plan

COEFFICIENTS = Path(__file__).with_suffix(".json")

# `TILE` is the side of XLA's tiles of large products. If there are more multiprocessors than tiles,
# XLA cuts contracted dimensions of `LEAST_CUT_K` or more, and pads them to multiples of `STEP`.
TILE, STEP, LEAST_CUT_K = 128, 64, 640
# Limit the temporary memory for copies of operands.
MOST_COPIED_BYTES = 64 << 20

Policy = Literal["auto", "kernels", "xla"]
_context = jax.make_user_context("auto")


@contextlib.contextmanager
def policy(name: Policy) -> Iterator[None]:
    """Returns a context that decides between kernels and XLA where `implementation` is None.

    It covers calls that this thread makes or traces inside, and their gradients, even if gradients
    are computed outside. It can decorate a function.

    Args:
      name: "auto", the default, falls back to XLA where XLA is predicted to be faster. "kernels"
        takes a kernel wherever a kernel can run. "xla" falls back wherever XLA can run.

    Raises:
      ValueError: `name` is not one of these.
    """
    if name not in get_args(Policy):
        raise ValueError(f"policy must be one of {get_args(Policy)}, got {name!r}")
    with _context(name):
        yield


def is_open(implementation: Any) -> bool:
    """Returns whether a plan may use XLA: only if nothing asks for kernels or batch invariance."""
    return implementation is None and _context.value != "kernels" and not is_enabled()


def with_policy(params: Mapping[str, Any], *, per_row: bool) -> Mapping[str, Any]:
    """Returns a primitive's parameters with the `implementation` that the contexts `policy` and,
    with `per_row`, `batch_invariant` ask for. None may become "prefer_kernels" or "prefer_xla"."""
    implementation = params["implementation"]
    if not per_row:
        implementation = without(implementation)
    elif is_enabled():
        implementation = invariant(implementation)
    if implementation is None and _context.value != "auto":
        implementation = f"prefer_{_context.value}"
    return {**params, "implementation": implementation}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work that XLA does instead of a kernel.

    Attributes:
      kind: "noncontracting", "contracting", "list" or "update".
      description: description of the products, for `explain`.
      products: g, m, n and k of each call, a stack of g products of [m, k] and [k, n].
      dtype: dtype of the operands.
      terms: products of 16-bit parts for one float32 product, 0 for other operands.
      moved_bytes: bytes of operands and results of the products.
      pass_bytes: bytes that passes before and after the products read and write.
      passes: launches of these passes, without the launches that are part of every call.
      copied_bytes: bytes of copies of operands, which are temporary memory.
    """

    kind: str
    description: str
    products: tuple[tuple[int, int, int, int], ...]
    dtype: np.dtype
    terms: int
    moved_bytes: float
    pass_bytes: float = 0.0
    passes: int = 0
    copied_bytes: int = 0

    @property
    def name(self) -> str:
        """The name of the coefficients: the kind, and the bits of the operands' type."""
        bits = "64" if self.dtype.itemsize > 4 else "32" if self.terms else "16"
        return f"{self.kind}_{bits}"

    @property
    def fits(self) -> bool:
        """Whether copies take at most `MOST_COPIED_BYTES`."""
        return self.copied_bytes <= MOST_COPIED_BYTES

    def rate(self, target: Target) -> float:
        """Returns the multiply-adds per second of XLA's products."""
        if not self.terms:
            return target.multiply_adds(self.dtype)
        rates = target.rates
        rate = rates.float32 if self.terms == FULL_TERMS else rates.tf32
        return rate * (target.multiprocessors / rates.multiprocessors)

    def kernel_terms(self, plan: Plan[Any]) -> dict[str, float]:
        """Returns the terms of the time of a plan's kernel in seconds, without coefficients."""
        tile, kernel = plan.tile, plan.prediction
        assert tile is not None and kernel is not None
        return {
            "launch": 1e-6,
            "group": 1e-6 * sum(g for g, *_ in self.products),
            "wide_tile": 1e-6 * (tile.tile_n > TILE),
            "cut": 1e-6 * tile.stream_k,  # sums of cut tiles pass through memory
            "bound": max(kernel.tensor_seconds, kernel.memory_seconds),
            "split": kernel.split_seconds,
        }

    def xla_terms(self, target: Target) -> dict[str, float]:
        """Returns the terms of XLA's time in seconds, without coefficients."""
        bandwidth, multiply_adds = target.rates.bandwidth, sum(map(math.prod, self.products))
        padded = (
            g * (m * k + k * n + m * n)
            for g, m, n, k in self.products
            if k >= LEAST_CUT_K and k % STEP and not _fills(g, m, n, target)
        )
        return {
            "launch": 1e-6 * (len(self.products) + self.passes),
            "depth": 1e-9 * sum(k for *_, k in self.products),
            "bound": max(multiply_adds / self.rate(target), self.moved_bytes / bandwidth),
            "passes": self.pass_bytes / bandwidth,
            "padding": self.dtype.itemsize * sum(padded) / bandwidth,
        }


def _fills(g: int, m: int, n: int, target: Target) -> bool:
    """Returns whether XLA's products [g, m, n] have a tile for each multiprocessor."""
    return g * cdiv(m, TILE) * cdiv(n, TILE) >= target.multiprocessors


@functools.cache
def coefficients() -> dict[str, dict[str, Any]]:
    """Returns, by `Work.name`, the coefficients "kernel" and "instead" (XLA), and the "margin"."""
    return json.loads(COEFFICIENTS.read_text())


def seconds(terms: Mapping[str, float], factors: Mapping[str, float]) -> float:
    """Returns the sum of terms times their coefficients."""
    return sum(factors[name] * term for name, term in terms.items())


def compared(
    kind: str, kernel: Mapping[str, float], instead: Mapping[str, float]
) -> tuple[float, float, bool]:
    """Returns the seconds of a kernel and of XLA instead, and whether to take XLA."""
    factors = coefficients()[kind]
    ours, others = seconds(kernel, factors["kernel"]), seconds(instead, factors["instead"])
    return ours, others, others <= factors["margin"] * ours


def faster_reason(xla: Kernel, plan: Plan[Any], target: Target, implementation: Any) -> str:
    """Returns why to take the row `xla` instead of the kernel of `plan`, empty if XLA is slower.

    `implementation` is the parameter of the primitive.
    """
    work: Work | None = xla.work(plan.problem)
    if work is None or not work.fits or implementation in ("cuda", "prefer_kernels"):
        return ""
    if is_invariant(implementation):  # both times depend on the number of rows
        return ""
    terms = work.kernel_terms(plan), work.xla_terms(target)
    ours, whole, is_faster = compared(work.name, *terms)
    if not is_faster and implementation != "prefer_xla":
        return ""
    return (
        f"{work.description} are predicted to take {whole * 1e6:.3g} us, "
        f"the kernel {ours * 1e6:.3g} us"
    )
