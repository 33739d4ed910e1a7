"""Draws small, thin, shallow and deep shapes of every operation.

This module does not use a device. A case depends only on the seed, its operation and its number, so
that every process draws the same case.
"""

import math

import numpy as np

from benchmarks import grouped_gemm, rank_k
from benchmarks.harness.cases import Shape

MOST_FLOPS = 4e11  # a case takes a millisecond at most
MOST_LIST_FLOPS = 1e11
MOST_BYTES = 1 << 29
MOST_ELEMENTS = 3e8  # of results; several float64 copies must fit into memory

# Ragged operations by name: the op, the dtype and the precision.
RAGGED = {
    op + suffix: (op, dtype, "default")
    for suffix, dtype in (("", "bfloat16"), ("_f32", "float32"))
    for op in ("forward", "dgrad", "wgrad")
}
DISTRIBUTIONS = ("random", "uniform", "zipf")
UPDATES = {
    name: rank_k.UPDATES[name] for name in ("syrk", "syr2k", "syr2k_f32_default", "her2k_c128")
} | {"syrk_f32_default": rank_k.Update("syrk_f32_default", False, "float32", (), 1e-3, "default")}
LISTS = {kind.op: kind for kind in grouped_gemm.KINDS if kind.precision == "default"}
RECIPES = ("recipe_layer", "recipe_layer_step", "recipe_dot", "recipe_dot_step")
OPS = (*RAGGED, *UPDATES, *LISTS, *RECIPES)


def generator(op: str, number: int, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, OPS.index(op), number])


def size(rng: np.random.Generator, low: int, high: int, multiple: int = 8) -> int:
    """Draws a size from `low` to `high`, with a uniform logarithm, mostly a multiple of 64."""
    drawn = math.exp(rng.uniform(math.log(low), math.log(high)))
    multiple = 64 if drawn >= 128 and rng.random() < 0.75 else multiple
    return max(multiple, multiple * round(drawn / multiple))


def ragged_shape(rng: np.random.Generator, dtype: str) -> Shape:
    """Draws a shape whose groups have one to a thousand rows on average."""
    width = 4 if dtype == "float32" else 2
    while True:
        groups = 2 ** int(rng.integers(0, 8))
        rows = groups * int(2 ** rng.integers(0, 11))
        k, n = size(rng, 64, 8192), size(rng, 64, 8192)
        moved = width * (groups * k * n + rows * (k + n))
        if moved <= MOST_BYTES and 2 * rows * k * n <= MOST_FLOPS:
            return Shape(f"{groups}x{rows // groups}x{k}x{n}", groups, rows, k, n)


def update_shape(rng: np.random.Generator, update: rank_k.Update) -> rank_k.Shape:
    """Draws g, n and k."""
    width = np.dtype(update.dtype if update.dtype != "bfloat16" else "float16").itemsize
    slow = {2: 1, 4: 4, 8: 16, 16: 64}[width]
    while True:
        g = 2 ** int(rng.integers(0, 8))
        n, k = size(rng, 32, 4096), size(rng, 16, 8192)
        if width * g * n * (n + 2 * k) <= MOST_BYTES and slow * 2 * g * n * n * k <= MOST_FLOPS:
            return g, n, k


def stack_of_hundreds(rng: np.random.Generator) -> rank_k.Shape:
    """Draws g, n and k of a large stack, as in Muon. A case takes three milliseconds at most."""
    while True:
        g, n, k = int(2 ** rng.uniform(7, 9.6)), size(rng, 512, 1024), size(rng, 64, 4096)
        if g * n * (n + 2 * k) <= 3 * MOST_BYTES and g * n * n <= MOST_ELEMENTS:
            return g, n, k


def list_of_problems(rng: np.random.Generator, kind: grouped_gemm.Kind) -> list:
    """Draws up to 40 unequal products."""
    slow = 1 if kind.dtype == "bfloat16" else 8
    count = int(2 ** rng.uniform(0, 5.3))
    high = 2 ** rng.uniform(7, 11.5)
    problems: list = []
    while len(problems) < count:
        m, k, n = (size(rng, 16, high) for _ in "mkn")
        if slow * 2 * m * k * n * count <= MOST_LIST_FLOPS:
            problems.append((m, k, n))
    return problems
