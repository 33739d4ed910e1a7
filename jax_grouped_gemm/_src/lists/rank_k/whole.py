"""When XLA's products of whole matrices are faster than the kernels, which compute a triangle.

Half of the products is saved where matrices are many tiles large. A matrix smaller than a tile, or
too few of them for the multiprocessors, leaves most of the tensor cores idle, where cuBLAS has
smaller tiles and cuts the contracted dimension; and float32 operands are split in passes of their
own, which cost the same however little there is to multiply.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src import xla
from jax_grouped_gemm._src.arrays import at_least_float32, round_up
from jax_grouped_gemm._src.device import (
    BANDWIDTH,
    FLOAT32,
    FP64,
    H200,
    SIXTEEN_BITS,
    TF32,
    Prediction,
    Target,
)
from jax_grouped_gemm._src.float32 import FULL_TERMS
from jax_grouped_gemm._src.lists.rank_k.problem import RankKProblem, Stack
from jax_grouped_gemm._src.plan import DEFAULT_TILE, TileConfig

# What a call takes beside what is predicted: its launches, which XLA has for each stack, and the
# ends of kernels. XLA's products of 16 bits and float32 have less to begin with, and what steps
# along K take until they are cut.
XLA_SECONDS = 5e-6
SHALLOW_SECONDS, DEPTH_SECONDS, UNCUT_K = 2.7e-6, 2e-6, 256
KERNEL_SECONDS, SPLITTING_KERNEL_SECONDS = 3e-6, 25e-6
# Of a kernel with tiles of 128x256, which small updates have that are smaller than a tile. From the
# random updates of h200_never_slower.json (docs/notes/rank_k.md).
LARGE_TILE_SECONDS = 6.5e-6
# How much longer float32 kernels were measured to take than the rate of 16 bits predicts.
SPLITTING_SHARE = 1.15
# Sums that stay in the L2 cache, of 50 MB, until they are read, and how much faster that is.
CACHED_BYTES, CACHE_SPEEDUP = 32e6, 2
# cuBLAS's tiles of complex products are as wide, and were measured to multiply at half the rate
# where each multiprocessor has one.
COMPLEX_TILE, COMPLEX_RATE = 64, FP64 / 8
# Predictions are not that exact: XLA has to be faster by more than this.
MARGIN = 0.9


def faster_reason(
    problem: RankKProblem, kernel: Prediction, tile: TileConfig, terms: int, target: Target
) -> str:
    """Why XLA should compute `problem`, empty if the kernel should.

    Args:
      problem: the updates.
      kernel: what is predicted of the kernel.
      tile: of the kernel.
      terms: products of 16-bit parts for one of float32, 0 for other operands.
      target: the device.
    """
    if problem.dtype == jnp.complex64:
        return ""  # the kernels accumulate in float64, which XLA does not
    whole = _seconds(problem, terms, target)
    if terms:
        triangle = SPLITTING_SHARE * kernel.seconds + SPLITTING_KERNEL_SECONDS
    else:
        is_large = tile == DEFAULT_TILE
        triangle = kernel.seconds + (LARGE_TILE_SECONDS if is_large else KERNEL_SECONDS)
    if whole > MARGIN * triangle:
        return ""
    return (
        f"XLA's products of whole matrices are predicted to take {whole * 1e6:.3g} us, "
        f"the kernel {triangle * 1e6:.3g} us"
    )


def _seconds(problem: RankKProblem, terms: int, target: Target) -> float:
    """What XLA's product takes, and the pass over it that adds, mirrors and masks."""
    elements = sum(s.g * s.n * s.n for s in problem.stacks)
    sums_bytes = np.dtype(at_least_float32(problem.result_dtype)).itemsize * elements
    multiplied = sum(s.g * _multiplied_rows(problem, s.n) ** 2 * s.k for s in problem.stacks)
    multiplying = multiplied / _rate(problem, terms, target)
    moving = (problem.operand_bytes + sums_bytes) / BANDWIDTH
    # Sums and, where results are symmetric or sums of two products, their mirror images are read.
    passes = 1.0 + (problem.num_products > 1 or problem.symmetrize)
    reads = sums_bytes * passes / (CACHE_SPEEDUP if sums_bytes <= CACHED_BYTES else 1)
    results = problem.result_dtype.itemsize * elements * (1 + problem.has_c)
    launching = sum(_launching_seconds(problem, s, terms, target) for s in problem.stacks)
    return max(multiplying, moving) + (reads + results) / BANDWIDTH + launching


def _launching_seconds(problem: RankKProblem, stack: Stack, terms: int, target: Target) -> float:
    """What XLA's product of a stack takes beside its bytes and multiplications."""
    g, n, k = stack.g, stack.n, stack.k
    if 0 in (g, n):
        return 0.0
    if problem.dtype.itemsize > 4:
        return XLA_SECONDS
    seconds = SHALLOW_SECONDS + DEPTH_SECONDS * min(k / UNCUT_K, 1)
    if terms:
        return seconds
    operand_bytes = problem.dtype.itemsize * problem.num_products * g * n * k
    return seconds + xla.cutting_seconds(g, n, n, k, operand_bytes, target)


def _multiplied_rows(problem: RankKProblem, n: int) -> int:
    """Rows of a matrix [n, n] with those that fill up its tiles."""
    is_complex = jnp.issubdtype(problem.dtype, jnp.complexfloating)
    return round_up(n, COMPLEX_TILE) if is_complex else n


def _rate(problem: RankKProblem, terms: int, target: Target) -> float:
    """Multiply-adds a second."""
    if jnp.issubdtype(problem.dtype, jnp.complexfloating):
        rate = COMPLEX_RATE
    elif problem.dtype.itemsize == 8:
        rate = FP64
    elif terms:
        rate = FLOAT32 if terms == FULL_TERMS else TF32
    else:
        rate = SIXTEEN_BITS
    return rate * target.multiprocessors / H200.multiprocessors
