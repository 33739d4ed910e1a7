"""When a call of XLA for each problem of a list is faster than one kernel for all of them.

That is what a list of one to four small problems comes to: XLA's calls have less to begin with, and
its float32 products no pass before them that splits the operands. In float64 cuBLAS has smaller
tiles than the kernel, so that a few products that are deep keep more multiprocessors busy.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import cdiv
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
from jax_grouped_gemm._src.lists.grouped_gemm.problem import GroupedGemmProblem

# What each call of XLA takes beside what is predicted, with operands of 16 bits and of float32, and
# what arithmetic on its result does; then a kernel's own. From tiny lists on an H200
# (docs/notes/lists.md).
XLA_SECONDS, FLOAT32_XLA_SECONDS, SCALING_SECONDS = 2.5e-6, 3.2e-6, 2e-6
KERNEL_SECONDS, SPLITTING_KERNEL_SECONDS = 4.5e-6, 15e-6
# XLA cuts a product that is deeper: its operands are padded and the parts added by other kernels.
MOST_UNCUT_K, CUT_SECONDS = 192, 1.5e-6
# Predictions are not that exact: XLA has to be faster by more than this.
MARGIN = 0.8

# The same in float64, fitted to the lists of h200_never_slower.json, 95 % of which are predicted
# within 10 %: of each call, of each element of the contracted dimension while every multiprocessor
# has a few tiles of cuBLAS at most, and how much longer a full chip takes than its rate says.
FP64_XLA_SECONDS, FP64_DEPTH_SECONDS, FP64_XLA_SHARE = 2.3e-6, 6.2e-9, 1.13
FP64_TILE, FP64_TILES_AT_A_TIME = 32, 10
FP64_KERNEL_SECONDS, FP64_KERNEL_SHARE = 1.8e-6, 1.1
FP64_MARGIN = 0.95


def faster_reason(
    problem: GroupedGemmProblem, kernel: Prediction, terms: int, target: Target
) -> str:
    """Why XLA should compute `problem`, empty if the kernel should.

    Args:
      problem: the products, of 16-bit, float32 or float64 operands.
      kernel: what is predicted of the kernel.
      terms: products of 16-bit parts for one of float32, 0 for other operands.
      target: the device.
    """
    if problem.dtype == jnp.float64:
        listed = FP64_KERNEL_SECONDS + FP64_KERNEL_SHARE * kernel.seconds
        return _reason(_fp64_seconds(problem, target), listed, FP64_MARGIN)
    rate = SIXTEEN_BITS
    if terms:
        rate = FLOAT32 if terms == FULL_TERMS else TF32
    rate *= target.multiprocessors / H200.multiprocessors
    launching = FLOAT32_XLA_SECONDS if terms else XLA_SECONDS
    launching += _scaling_seconds(problem)
    working = [entry for entry in problem.entries if 0 not in entry.shape]
    multiplying = sum(math.prod(entry.shape) for entry in working) / rate
    moving = (problem.operand_bytes + problem.result_bytes) / BANDWIDTH
    cutting = CUT_SECONDS * sum(entry.k > MOST_UNCUT_K for entry in working)
    whole = max(multiplying, moving) + launching * len(working) + cutting
    listed = kernel.seconds + (SPLITTING_KERNEL_SECONDS if terms else KERNEL_SECONDS)
    return _reason(whole, listed, MARGIN)


def _scaling_seconds(problem: GroupedGemmProblem) -> float:
    """Of the arithmetic on each result."""
    scaled = problem.has_alpha or problem.alpha != 1 or problem.has_c
    return SCALING_SECONDS if scaled else 0.0


def _fp64_seconds(problem: GroupedGemmProblem, target: Target) -> float:
    """What XLA's products of float64 take, one after another."""
    at_a_time = FP64_TILES_AT_A_TIME * target.multiprocessors
    rate = FP64 * target.multiprocessors / H200.multiprocessors
    seconds = 0.0
    for entry in problem.entries:
        g, m, n, k = entry.shape
        if 0 in entry.shape:
            continue
        tiles = g * cdiv(m, FP64_TILE) * cdiv(n, FP64_TILE)
        seconds += FP64_XLA_SECONDS + FP64_DEPTH_SECONDS * k * max(1, tiles / at_a_time)
        seconds += FP64_XLA_SHARE * math.prod(entry.shape) / rate + _scaling_seconds(problem)
    return seconds


def _reason(whole: float, listed: float, margin: float) -> str:
    if whole > margin * listed:
        return ""
    return (
        f"XLA's products, a call each, are predicted to take {whole * 1e6:.3g} us, "
        f"the kernel {listed * 1e6:.3g} us"
    )
