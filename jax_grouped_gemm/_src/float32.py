"""How float32 operands reach the tensor cores: in parts of 16 bits.

Most products use float16 parts, scaled group by group.

A group is the rows of an operand that one group of a ragged product owns, or the weights of one;
in lists of products and in symmetric updates it is a matrix.

Each element x of a group is scaled by a power of two that brings the group's largest finite
magnitude to [2^14, 2^15), and is then high + low / 2^11, two float16 numbers that hold 23 of its 24
bits. Three products of parts (all but low times low), summed in float32, have the accuracy of a
float32 product. The product of the high parts alone, with 11 bits of each operand, has that of
TF32.

Float16 has few exponents, so the precision of an element depends on its group: elements keep all
bits down to 2^-27 of the largest magnitude (2^-28 for the high part alone), then fewer and fewer,
and none below 2^-51 (2^-40). So each accumulated product may have an absolute error of 2^-49
(2^-38) times the largest magnitudes of both operands' groups, besides the relative errors. NaN and
infinity do not count for the scales. Infinity times an element that keeps no bits is NaN.

The method is that of Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores
while surpassing the FP32 theoretical peak performance" (2022), with scales and with rounded sums.

Where groups have few rows, or there is little to multiply, reading the weights dominates, and the
two passes that scale and split them would take several times as long
(`_src.ragged.split_in_kernel`). There the kernel itself splits x into two or three bfloat16 parts
of eight bits each. Bfloat16 has all exponents of float32, so nothing is scaled, and magnitudes of
groups do not matter. Six products of three parts have the accuracy of a float32 product. Three
products of two parts, which hold 16 bits, are more accurate than TF32. Parts end at 2^-133, so
elements below 2^-109 lose bits. Infinity times any element from 2^-133 on is infinity. A NaN must
have a bit set in its upper half, as those of arithmetic have; others count as infinity.
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
    """The number of float16 products for a float32 product: 3 if an operand is exact, or 1."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    exact = (lax.Precision.HIGH, lax.Precision.HIGHEST)
    return FULL_TERMS if any(p in exact for p in precisions) else 1


def terms_of(dtype: Any, precision: Any) -> int:
    """Returns `num_terms` for float32 operands, 0 for others, which are not split."""
    return num_terms(precision) if dtype == np.float32 else 0


def products_in_kernel(terms: int) -> int:
    """The number of bfloat16 products, with few rows a group, for the accuracy of `terms`."""
    return 6 if terms == FULL_TERMS else 3


def described(terms: int, *, in_kernel: bool = False) -> str:
    """Returns the words of `explain` for a product."""
    accuracy = "float32" if terms == FULL_TERMS else "TF32"
    if in_kernel:
        products = f"{products_in_kernel(terms)} products of bfloat16 parts"
    else:
        products = f"{terms} products of float16 parts"
    return f"{products}, as accurate as {accuracy}"


def list_workspace_bytes(stacks: Iterable[tuple[int, int]], terms: int) -> int:
    """Returns bytes for the parts of lists of operands and each matrix's largest magnitude.

    The layout is that of `csrc/parts/listed_workspace.cc`.

    Args:
      stacks: for every operand of every product, the number of matrices and the elements of each.
      terms: see `num_terms`.
    """
    stacks = list(stacks)
    maxima = section_bytes(sum(matrices for matrices, _ in stacks), np.uint32)
    parts = num_parts(terms)
    return maxima + sum(section_bytes(parts * g * size, PART_DTYPE) for g, size in stacks)


def bytes_of_split(operand_bytes: float, terms: int) -> tuple[float, float]:
    """Returns the bytes of operands that a kernel reads, and the bytes that passes move before.

    Passes read operands twice: for the largest magnitudes, and to split them. Without terms there
    are no passes.
    """
    if not terms:
        return operand_bytes, 0.0
    part_bytes = operand_bytes * num_parts(terms) * PART_DTYPE.itemsize / 4
    return part_bytes, 2 * operand_bytes + part_bytes


def num_parts(terms: int) -> int:
    """Returns the number of float16 parts of an operand."""
    return 1 if terms == 1 else 2


def section_bytes(count: int, dtype: Any) -> int:
    """Bytes of an array in a workspace."""
    return round_up(count * np.dtype(dtype).itemsize, ALIGNMENT_BYTES)
