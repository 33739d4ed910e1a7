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

Where groups have few rows, or there is little else to multiply, time is what reading the weights
takes, and the two passes that scale and split them would take several times as long
(`_src.ragged.split_in_kernel`). There x is the sum of two or three bfloat16 parts,
eight bits of it each, which the kernel splits on the way: bfloat16 has all exponents of float32, so
nothing is scaled, and no group's magnitudes matter. Six products of three parts have the accuracy
of a float32 product, three products of two parts, of 16 bits, more than TF32's. The parts of an
element end at 2^-133, so that elements below 2^-109 lose bits. Infinity times any element from
2^-133 on is infinity. A NaN counts as one if its upper half says so, as in all that arithmetic
makes; one of which only lower bits are set is taken for infinity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import round_up

ALIGNMENT_BYTES = 256
FULL_TERMS = 3
PART_DTYPE = np.dtype(np.float16)


def num_terms(precision: Any) -> int:
    """Products of float16 parts for one of float32: 3 if either operand is to be exact, else 1."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    exact = (lax.Precision.HIGH, lax.Precision.HIGHEST)
    return FULL_TERMS if any(p in exact for p in precisions) else 1


def terms_of(dtype: Any, precision: Any) -> int:
    """`num_terms` of operands of float32, 0 of others, which are multiplied as they are."""
    return num_terms(precision) if dtype == np.float32 else 0


def products_in_kernel(terms: int) -> int:
    """Products of bfloat16 parts, with few rows a group, for the accuracy of `terms`."""
    return 6 if terms == FULL_TERMS else 3


def described(terms: int, *, in_kernel: bool = False) -> str:
    """The words of `explain` for a product."""
    accuracy = "float32" if terms == FULL_TERMS else "TF32"
    if in_kernel:
        products = f"{products_in_kernel(terms)} products of bfloat16 parts"
    else:
        products = f"{terms} products of float16 parts"
    return f"{products}, as accurate as {accuracy}"


def list_workspace_bytes(stacks: Iterable[tuple[int, int]], terms: int) -> int:
    """Bytes of the parts of lists of operands, and of the largest magnitude of each matrix.

    The layout is that of `csrc/parts/listed_workspace.cc`.

    Args:
      stacks: of every operand of every product, the number of matrices and the elements of each.
      terms: see `num_terms`.
    """
    stacks = list(stacks)
    maxima = section_bytes(sum(matrices for matrices, _ in stacks), np.uint32)
    parts = num_parts(terms)
    return maxima + sum(section_bytes(parts * g * size, PART_DTYPE) for g, size in stacks)


def bytes_of_split(operand_bytes: float, terms: int) -> tuple[float, float]:
    """The bytes that a kernel reads of operands, and those that passes over them move before.

    They are read twice, for the largest magnitudes and to be split. Without terms nothing is.
    """
    if not terms:
        return operand_bytes, 0.0
    part_bytes = operand_bytes * num_parts(terms) * PART_DTYPE.itemsize / 4
    return part_bytes, 2 * operand_bytes + part_bytes


def num_parts(terms: int) -> int:
    """How many float16 parts an operand has."""
    return 1 if terms == 1 else 2


def section_bytes(count: int, dtype: Any) -> int:
    """Bytes of an array in a workspace."""
    return round_up(count * np.dtype(dtype).itemsize, ALIGNMENT_BYTES)
