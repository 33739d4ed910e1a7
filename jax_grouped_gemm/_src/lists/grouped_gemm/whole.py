"""When a call of XLA for each problem of a list is faster than one kernel for all of them.

That is what a list of one to four small problems comes to: XLA's calls have less to begin with, and
its float32 products no pass before them that splits the operands.
"""

from __future__ import annotations

import math

from jax_grouped_gemm._src.device import (
    BANDWIDTH,
    FLOAT32,
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


def faster_reason(
    problem: GroupedGemmProblem, kernel: Prediction, terms: int, target: Target
) -> str:
    """Why XLA should compute `problem`, empty if the kernel should.

    Args:
      problem: the products, of 16-bit or float32 operands.
      kernel: what is predicted of the kernel.
      terms: products of 16-bit parts for one of float32, 0 for other operands.
      target: the device.
    """
    rate = SIXTEEN_BITS
    if terms:
        rate = FLOAT32 if terms == FULL_TERMS else TF32
    rate *= target.multiprocessors / H200.multiprocessors
    launching = FLOAT32_XLA_SECONDS if terms else XLA_SECONDS
    scaled = problem.has_alpha or problem.alpha != 1 or problem.has_c
    launching += SCALING_SECONDS if scaled else 0
    working = [entry for entry in problem.entries if 0 not in entry.shape]
    multiplying = sum(math.prod(entry.shape) for entry in working) / rate
    moving = (problem.operand_bytes + problem.result_bytes) / BANDWIDTH
    cutting = CUT_SECONDS * sum(entry.k > MOST_UNCUT_K for entry in working)
    whole = max(multiplying, moving) + launching * len(working) + cutting
    listed = kernel.seconds + (SPLITTING_KERNEL_SECONDS if terms else KERNEL_SECONDS)
    if whole > MARGIN * listed:
        return ""
    return (
        f"XLA's products, a call each, are predicted to take {whole * 1e6:.3g} us, "
        f"the kernel {listed * 1e6:.3g} us"
    )
