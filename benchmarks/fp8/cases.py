"""The FP8 cases, as plain data."""

import itertools
from collections.abc import Sequence

from benchmarks.harness.cases import OPS as BF16_OPS
from benchmarks.harness.cases import SHAPES, SUITES, Case, Op, Shape, by_name
from benchmarks.harness.fp8_inputs import DTYPE

# FP8 tensor cores contract the last dimension of both operands, so that weights are stored
# [groups, n, k] for the forward product and [groups, k, n] for dgrad.
PRODUCTS: dict[str, Op] = by_name(
    Op("fp8_forward", "x", "wt", transpose_rhs=True, out_dtype="bfloat16"),
    Op("fp8_dgrad", "dy", "w", transpose_rhs=True, out_dtype="bfloat16"),
    Op("fp8_wgrad", "x", "dy", contracting=True, out_dtype="float32"),
)
QUANTIZERS = ("quantize_rows", "quantize_weights", "quantize_ragged")
STEP = "fp8_step"
OPS = (*PRODUCTS, *QUANTIZERS, STEP)

QUANTIZED_SHAPES = ("dsv3_up", "qwen3_up", "ds256_n512")
STEP_SHAPES = ("dsv3_up", "mixtral_up", "qwen3_up")
TINY_SHAPES = ("tiny", "tiny_fine")


def fp8_case(shape: Shape, op: str, distribution: str, seed: int = 0) -> Case:
    """Returns a case of an FP8 product, or of a quantiser or a step of bfloat16 inputs."""
    of = PRODUCTS.get(op) or Op(op, "x", "w")
    return Case(shape, of, distribution, DTYPE if op in PRODUCTS else "bfloat16", seed)


def of_bf16(case: Case, op: str) -> Case:
    """Returns the case of a bfloat16 product of the same shape and group sizes."""
    return Case(case.shape, BF16_OPS[op], case.distribution, seed=case.seed)


def default_cases(seed: int = 0) -> list[Case]:
    *wgrads, small_k = (shape.name for shape in SUITES["fp8"])
    main = [shape.name for shape in SUITES["main"]]
    chosen: tuple[tuple[Sequence[str], Sequence[str], Sequence[str]], ...] = (
        (main, ("fp8_forward", "fp8_dgrad"), ("random",)),
        (wgrads, ("fp8_wgrad",), ("uniform", "random")),
        (STEP_SHAPES, (STEP,), ("random",)),
        (QUANTIZED_SHAPES, QUANTIZERS, ("random",)),
        (["ds256_n512", small_k], ("fp8_forward",), ("uniform",)),
        (main, ("fp8_wgrad",), ("random",)),
    )
    return [
        fp8_case(SHAPES[name], op, distribution, seed)
        for group in chosen
        for name, op, distribution in itertools.product(*group)
    ]


def tiny_cases(seed: int = 0) -> list[Case]:
    shapes = [SHAPES[name] for name in TINY_SHAPES]
    return [fp8_case(shape, op, "random", seed) for shape in shapes for op in OPS]
