"""How float32 operands reach the tensor cores: in parts of 16 bits.

Mostly these are float16 parts, scaled group by group.

A group is the rows of an operand that one group of a ragged product owns, or the weights of one;
in lists of products and in symmetric updates it is a matrix.

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

Where groups have few rows, time is what reading the weights takes, and the two passes that scale
and split them would take several times as long. There x is the sum of two or three bfloat16 parts,
eight bits of it each, which the kernel splits on the way: bfloat16 has all exponents of float32, so
nothing is scaled, and no group's magnitudes matter. Six products of three parts have the accuracy
of a float32 product, three products of two parts, of 16 bits, more than TF32's. The parts of an
element end at 2^-133, so that elements below 2^-109 lose bits. Infinity times any element from
2^-133 on is infinity. A NaN counts as one if its upper half says so, as in all that arithmetic
makes; one of which only lower bits are set is taken for infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

if TYPE_CHECKING:
    from jax_grouped_gemm._src.ragged.problem import RaggedProblem

ALIGNMENT_BYTES = 256
FULL_TERMS = 3
PART_DTYPE = np.dtype(np.float16)
FEW_ROWS = 64
"""Rows a group, on average, up to which operands are split on their way to the tensor cores."""


def num_terms(precision: Any) -> int:
    """Products of float16 parts for one of float32: 3 if either operand is to be exact, else 1."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    exact = (lax.Precision.HIGH, lax.Precision.HIGHEST)
    return FULL_TERMS if any(p in exact for p in precisions) else 1


def has_few_rows(problem: RaggedProblem) -> bool:
    """Whether reading the weights takes longer than multiplying them."""
    return problem.m <= FEW_ROWS * problem.num_groups


def described(terms: int, *, few_rows: bool = False) -> str:
    """What `explain` says of a product."""
    accuracy = "float32" if terms == FULL_TERMS else "TF32"
    if few_rows:
        products = f"{6 if terms == FULL_TERMS else 3} products of bfloat16 parts"
    else:
        products = f"{terms} products of float16 parts"
    return f"{products}, as accurate as {accuracy}"


def workspace_bytes(problem: RaggedProblem, terms: int) -> int:
    """Bytes of the parts of both operands, and of what is noted of groups, rows and matrices.

    The layout is that of `csrc/sm90/f32/workspace.cc`.
    """
    lhs_batched, rhs_batched, sizes_batched, offset_batched = problem.batched
    owners_batched = sizes_batched or offset_batched
    lhs_batched |= owners_batched
    is_contracting = problem.contracts_rows
    rhs_batched |= owners_batched and is_contracting
    batch = math.prod(problem.batch)
    lhs_batches, rhs_batches, owner_batches = (
        batch if batched else 1 for batched in (lhs_batched, rhs_batched, owners_batched)
    )
    parts = _num_parts(terms)
    sections = (
        (lhs_batches * problem.g, np.uint32),
        (rhs_batches * problem.g, np.uint32),
        (0 if is_contracting else rhs_batches * problem.g, np.int32),
        (owner_batches * problem.m, np.int32),
        (parts * lhs_batches * math.prod(problem.shape(problem.lhs)), PART_DTYPE),
        (parts * rhs_batches * math.prod(problem.shape(problem.rhs)), PART_DTYPE),
    )
    return sum(_section_bytes(*section) for section in sections)


def list_workspace_bytes(stacks: Iterable[tuple[int, int]], terms: int) -> int:
    """Bytes of the parts of lists of operands, and of the largest magnitude of each matrix.

    The layout is that of `csrc/sm90/f32/list_workspace.cc`.

    Args:
      stacks: of every operand of every product, the number of matrices and the elements of each.
      terms: see `num_terms`.
    """
    stacks = list(stacks)
    maxima = _section_bytes(sum(matrices for matrices, _ in stacks), np.uint32)
    parts = _num_parts(terms)
    return maxima + sum(_section_bytes(parts * g * size, PART_DTYPE) for g, size in stacks)


def _num_parts(terms: int) -> int:
    return 1 if terms == 1 else 2


def _section_bytes(count: int, dtype: Any) -> int:
    size = count * np.dtype(dtype).itemsize
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
