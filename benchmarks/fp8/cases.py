"""What is measured of FP8, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property

from benchmarks.harness.cases import SHAPES, SUITES, Case, Op, Shape
from benchmarks.harness.fp8_inputs import DTYPE

# FP8 tensor cores contract the last dimension of both operands, so that weights are stored
# [groups, n, k] for the forward product and [groups, k, n] for dgrad.
PRODUCTS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("fp8_forward", "x", "wt", transpose_rhs=True, out_dtype="bfloat16"),
        Op("fp8_dgrad", "dy", "w", transpose_rhs=True, out_dtype="bfloat16"),
        Op("fp8_wgrad", "x", "dy", contracting=True, out_dtype="float32"),
    )
}
QUANTIZERS = ("quantize_rows", "quantize_weights", "quantize_ragged")
STEP = "fp8_step"
OPS = (*PRODUCTS, *QUANTIZERS, STEP)

QUANTIZED_SHAPES = ("dsv3_up", "qwen3_up", "ds256_n512")
STEP_SHAPES = ("dsv3_up", "mixtral_up", "qwen3_up")
TINY_SHAPES = ("tiny", "tiny_fine")


@dataclasses.dataclass(frozen=True)
class Fp8Case:
    """A row of the results: a shape, an op and a distribution of group sizes."""

    shape: Shape
    op: str
    distribution: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.shape.name}/{self.op}/{self.distribution}"

    @cached_property
    def product(self) -> Case:
        """A product in the terms of the other benchmarks."""
        return Case(self.shape, PRODUCTS[self.op], self.distribution, DTYPE, self.seed)


def default_cases(seed: int = 0) -> list[Fp8Case]:
    """All cases, the most wanted first, each shape's together."""

    def products(shapes: Iterable[Shape], ops: Iterable[str], *distributions: str):
        for shape in shapes:
            for op in ops:
                for distribution in distributions:
                    yield Fp8Case(shape, op, distribution, seed)

    def named(names: Iterable[str]) -> list[Shape]:
        return [SHAPES[name] for name in names]

    *wgrads, small_k = SUITES["fp8"]
    few_tokens = [SHAPES["ds256_n512"], small_k]
    return [
        *products(SUITES["main"], ("fp8_forward", "fp8_dgrad"), "random"),
        *products(wgrads, ("fp8_wgrad",), "uniform", "random"),
        *products(named(STEP_SHAPES), (STEP,), "random"),
        *products(named(QUANTIZED_SHAPES), QUANTIZERS, "random"),
        *products(few_tokens, ("fp8_forward",), "uniform"),
        *products(SUITES["main"], ("fp8_wgrad",), "random"),
    ]


def tiny_cases(seed: int = 0) -> list[Fp8Case]:
    """Every op on shapes that a CPU can do."""
    shapes = [SHAPES[name] for name in TINY_SHAPES]
    return [Fp8Case(shape, op, "random", seed) for shape in shapes for op in OPS]
