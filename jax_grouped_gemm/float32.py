"""How float32 operands reach the tensor cores: as float16 parts, scaled group by group.

Each element x of a group is scaled by a power of two that brings the group's largest finite
magnitude to [2^14, 2^15), and is then high + low / 2^11, two float16 numbers that hold 23 of its 24
bits. Three products of parts (all but low times low), summed in float32, have the accuracy of a
float32 product; the product of the high parts alone, with 11 bits of each operand, that of TF32.

Float16 has few exponents, so the bits that are kept of an element depend on its group: all of them
down to 2^-27 of the largest magnitude (2^-28 for the high part alone), then fewer and fewer, and
none below 2^-51 (2^-40). Each accumulated product may so have an absolute error of 2^-49 (2^-38)
times the largest magnitudes of both operands' groups, beside the relative ones. NaN and infinity
leave the scales alone; infinity times an element of which nothing is left is NaN.

The method is that of Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores
while surpassing the FP32 theoretical peak performance" (2022), with scales and with rounded sums.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

if TYPE_CHECKING:
    from jax_grouped_gemm.plan import RaggedProblem

ALIGNMENT_BYTES = 256
FULL_TERMS = 3


def num_terms(precision: Any) -> int:
    """Products of float16 parts for one of float32: 3 if either operand is to be exact, else 1."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    exact = (lax.Precision.HIGH, lax.Precision.HIGHEST)
    return FULL_TERMS if any(p in exact for p in precisions) else 1


def workspace_bytes(problem: RaggedProblem, terms: int) -> int:
    """Bytes of the parts of both operands, and of what is noted of groups, rows and matrices.

    The layout is that of `csrc/sm90/f32/workspace.cc`.
    """
    lhs_batched, rhs_batched, sizes_batched, offset_batched = problem.batched
    owners_batched = sizes_batched or offset_batched
    lhs_batched |= owners_batched
    is_contracting = problem.op == "ragged_contracting"
    rhs_batched |= owners_batched and is_contracting
    batch = math.prod(problem.batch)
    lhs_batches, rhs_batches, owner_batches = (
        batch if batched else 1 for batched in (lhs_batched, rhs_batched, owners_batched)
    )
    parts = 1 if terms == 1 else 2
    sections = (
        (lhs_batches * problem.g, np.uint32),
        (rhs_batches * problem.g, np.uint32),
        (0 if is_contracting else rhs_batches * problem.g, np.int32),
        (owner_batches * problem.m, np.int32),
        (parts * lhs_batches * math.prod(problem.shape(problem.lhs)), np.float16),
        (parts * rhs_batches * math.prod(problem.shape(problem.rhs)), np.float16),
    )
    sizes = (count * np.dtype(dtype).itemsize for count, dtype in sections)
    return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
