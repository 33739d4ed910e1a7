"""The cases, as plain data: named shapes, operations and distributions of group sizes.

This module does not use a device, so that tests can use the same cases.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Shape:
    """A projection of an MoE layer: `rows` rows for `groups` experts, whose weights are k x n."""

    name: str
    groups: int
    rows: int
    k: int
    n: int


SUITES: dict[str, tuple[Shape, ...]] = {
    "main": (
        Shape("mixtral_up", 8, 8192, 4096, 14336),
        Shape("mixtral_down", 8, 8192, 14336, 4096),
        Shape("dsv3_up", 8, 32768, 7168, 4096),
        Shape("dsv3_down", 8, 32768, 2048, 7168),
        Shape("qwen3_up", 128, 65536, 2048, 1536),
        Shape("qwen3_down", 128, 65536, 768, 2048),
        Shape("ds256_n512", 256, 32768, 7168, 512),
        Shape("decode_up", 32, 640, 7168, 4096),
        Shape("decode_small", 128, 512, 2048, 1536),
    ),
    "models": (
        Shape("gpt_oss_up", 32, 32768, 2880, 5760),
        Shape("gpt_oss_down", 32, 32768, 2880, 2880),
        Shape("qwen3_235b_up", 128, 65536, 4096, 3072),
        Shape("qwen3_235b_down", 128, 65536, 1536, 4096),
    ),
    "fine": (
        Shape("fine64_k512", 64, 65536, 512, 2048),
        Shape("fine128_n256", 128, 65536, 2048, 256),
        Shape("fine256_k256", 256, 65536, 256, 7168),
        Shape("fine256_n256", 256, 65536, 2048, 256),
    ),
    # Weight gradients of a fixed number of rows for each group, and groups of few rows at small K.
    "fp8": (
        Shape("wgrad_g4_8192", 4, 32768, 4096, 7168),
        Shape("wgrad_g8_4096", 8, 32768, 7168, 2048),
        Shape("g256_m128_k512", 256, 32768, 512, 7168),
    ),
    # Low-rank adapters of experts: n or k is the rank.
    "adapters": (
        Shape("rank16_down", 64, 32768, 4096, 16),
        Shape("rank16_up", 64, 32768, 16, 4096),
        Shape("rank64_down", 8, 2048, 7168, 64),
        Shape("rank128_down", 128, 65536, 2048, 128),
    ),
    "decode": tuple(
        Shape(f"decode_r{rows}", 32, 32 * rows, 7168, 4096) for rows in (1, 2, 4, 8, 16, 32, 64)
    ),
    # Small enough for a CPU. Dry runs use these shapes.
    "tiny": (Shape("tiny", 4, 256, 64, 128), Shape("tiny_fine", 16, 128, 128, 64)),
}
SHAPES: dict[str, Shape] = {shape.name: shape for suite in SUITES.values() for shape in suite}


@dataclass(frozen=True)
class Op:
    """A ragged matmul of two of a layer's tensors.

    The tensors of a `Shape` are x [rows, k], w [groups, k, n], wt [groups, n, k] (the transposed
    weights) and dy [rows, n]. A `contracting` op is a weight gradient, which sums over rows. Other
    ops keep the rows; `transpose_rhs` says that they contract the last dimension of the weights.
    """

    name: str
    lhs: str
    rhs: str
    contracting: bool = False
    transpose_rhs: bool = False
    out_dtype: str | None = None


def by_name(*items: Any) -> dict[str, Any]:
    return {item.name: item for item in items}


OPS: dict[str, Op] = by_name(
    Op("forward", "x", "w"),
    Op("forward_t", "x", "wt", transpose_rhs=True),
    Op("dgrad", "dy", "w", transpose_rhs=True),
    Op("dgrad_t", "dy", "wt"),
    Op("wgrad", "x", "dy", contracting=True),
    Op("wgrad_f32", "x", "dy", contracting=True, out_dtype="float32"),
)


def tensor_shape(shape: Shape, tensor: str) -> tuple[int, ...]:
    """Returns the dimensions of a tensor that `Op` names."""
    return {
        "x": (shape.rows, shape.k),
        "w": (shape.groups, shape.k, shape.n),
        "wt": (shape.groups, shape.n, shape.k),
        "dy": (shape.rows, shape.n),
    }[tensor]


def _drawn(popularity: Callable[[np.random.Generator, int], np.ndarray]):
    """Returns a function that draws a group for each row by the groups' popularity."""

    def sizes(rng: np.random.Generator, groups: int, rows: int) -> np.ndarray:
        weights = popularity(rng, groups)
        return rng.multinomial(rows, weights / weights.sum())

    return sizes


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "uniform": lambda rng, groups, rows: np.diff(np.arange(groups + 1) * rows // groups),
    "multinomial": _drawn(lambda rng, groups: np.ones(groups)),
    "random": _drawn(lambda rng, groups: rng.dirichlet(np.full(groups, 4.0))),
    "zipf": _drawn(lambda rng, groups: rng.permutation(1.0 / np.arange(1, groups + 1))),
    "lognormal": _drawn(lambda rng, groups: rng.lognormal(sigma=1.0, size=groups)),
    "one_hot": lambda rng, groups, rows: rows * (np.arange(groups) == rng.integers(groups)),
}


def group_sizes(distribution: str, groups: int, rows: int, seed: int = 0) -> np.ndarray:
    """Returns int32 sizes [groups] that sum to `rows`. Equal arguments give equal sizes.

    "uniform" sizes differ by one row at most. "one_hot" has all rows in one group. Other
    distributions draw a group for each row, by a popularity that is equal ("multinomial"),
    Dirichlet(4) ("random", like the load of a trained router), 1/rank ("zipf") or exp(N(0, 1))
    ("lognormal").
    """
    # The seed depends on the name, so that a new distribution changes the sizes of no other.
    rng = np.random.default_rng([seed, zlib.crc32(distribution.encode()), groups, rows])
    return DISTRIBUTIONS[distribution](rng, groups, rows).astype(np.int32)


@dataclass(frozen=True)
class Problem:
    """Everything about a ragged matmul that a compiled program depends on, so not the group sizes.

    A non-contracting matmul of lhs [m, k] and rhs [groups, k, n] (or [groups, n, k] with
    `transpose_rhs`) gives [m, n]. A contracting one of lhs [m, k] and rhs [m, n] gives
    [groups, k, n]. The precision is for float32 operands.
    """

    contracting: bool
    transpose_rhs: bool
    groups: int
    m: int
    k: int
    n: int
    dtype: str
    out_dtype: str
    precision: str = "default"

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.groups, self.k, self.n) if self.contracting else (self.m, self.n)


@dataclass(frozen=True)
class Case:
    """A row of the results: a shape, an op and a distribution of group sizes."""

    shape: Shape
    op: Op
    distribution: str
    dtype: str = "bfloat16"
    seed: int = 0
    precision: str = "default"

    @property
    def name(self) -> str:
        return f"{self.shape.name}/{self.op.name}/{self.distribution}"

    @property
    def problem(self) -> Problem:
        op, shape = self.op, self.shape
        _, k = tensor_shape(shape, op.lhs)
        n = tensor_shape(shape, op.rhs)[-2 if op.transpose_rhs else -1]
        return Problem(
            contracting=op.contracting, transpose_rhs=op.transpose_rhs, groups=shape.groups,
            m=shape.rows, k=k, n=n, dtype=self.dtype, out_dtype=op.out_dtype or self.dtype,
            precision=self.precision,
        )  # fmt: skip

    @property
    def group_sizes(self) -> np.ndarray:
        return group_sizes(self.distribution, self.shape.groups, self.shape.rows, self.seed)


def row_ranges(sizes: np.ndarray) -> list[tuple[int, int]]:
    ends = np.cumsum(sizes)
    return list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))


def flops(problem: Problem, sizes: np.ndarray) -> int:
    """Returns the number of multiplications and additions for the rows that groups own."""
    return 2 * int(np.sum(sizes)) * problem.k * problem.n


def unavoidable_bytes(problem: Problem, sizes: np.ndarray) -> int:
    """Returns the least traffic with memory: used operands are read once, results written once.

    The weights of an empty group need not be read, but its weight gradient is written, as is every
    row of a non-contracting result.
    """
    rows = int(np.sum(sizes))
    if problem.contracting:
        read = rows * (problem.k + problem.n)
    else:
        read = (rows + int(np.count_nonzero(sizes)) * problem.n) * problem.k
    return read * itemsize(problem.dtype) + written_bytes(problem)


def written_bytes(problem: Problem) -> int:
    return math.prod(problem.out_shape) * itemsize(problem.out_dtype)


def itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def select_shapes(names: list[str]) -> list[Shape]:
    """Returns the shapes for names of shapes or suites, in order and without repeats."""
    chosen: dict[str, Shape] = {}
    for name in names:
        suite = SUITES.get(name) or ((SHAPES[name],) if name in SHAPES else None)
        if suite is None:
            raise ValueError(
                f"unknown shape or suite {name!r}: suites are {', '.join(SUITES)}; "
                f"shapes are {', '.join(SHAPES)}"
            )
        chosen.update((shape.name, shape) for shape in suite)
    return list(chosen.values())
