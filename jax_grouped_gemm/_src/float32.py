"""Splits float32 operands into parts of 16 bits, which tensor cores multiply.

Most products use float16 parts, scaled group by group. Here, a group is the rows of an operand that
a group of a ragged product owns, or the weights of such a group. In lists of products and in
symmetric updates, a group is a matrix.

A power of two scales the elements of a group, so that the largest finite magnitude of the group is
in [2^14, 2^15). A scaled element is split into high + low / 2^11. These two float16 numbers hold 23
of its 24 bits. Three products of parts (all except low times low), summed in float32, are as
accurate as a float32 product. The product of the high parts alone, with 11 bits of each operand, is
as accurate as TF32.

Float16 has few exponents, so the precision of an element depends on its group. Elements keep all
bits down to 2^-27 of the largest magnitude (2^-28 for the high part alone), smaller elements lose
bits, and elements below 2^-51 (2^-40) keep none. So each accumulated product may have an absolute
error of 2^-49 (2^-38) times the largest magnitudes of both operands' groups, in addition to the
relative errors. NaN and infinity do not affect scales. Infinity times an element that keeps no bits
is NaN.

The method is that of Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores
while surpassing the FP32 theoretical peak performance" (2022), with scales and with rounded sums.

If groups have few rows, or there is little to multiply, reading the weights dominates, and the two
passes that scale and split them would take several times as long (`_src.ragged.split_in_kernel`).
Then the kernel itself splits elements into two or three bfloat16 parts of eight bits each. Bfloat16
has all exponents of float32, so the kernel scales nothing, and magnitudes of groups do not matter.
Six products of three parts are as accurate as a float32 product. Three products of two parts, which
hold 16 bits, are more accurate than TF32. Parts are at least 2^-133, so elements below 2^-109 lose
bits. Infinity times any element of at least 2^-133 is infinity. A NaN whose upper 16 bits are those
of infinity counts as infinity, but arithmetic does not produce such NaNs.
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
    """Returns the number of float16 products for a float32 product: 3 for HIGHEST, 1 by default."""
    precisions = precision if isinstance(precision, tuple) else (precision,)
    exact = (lax.Precision.HIGH, lax.Precision.HIGHEST)
    return FULL_TERMS if any(p in exact for p in precisions) else 1


def terms_of(dtype: Any, precision: Any) -> int:
    """Returns `num_terms` for float32 operands, 0 for other operands, which are not split."""
    return num_terms(precision) if dtype == np.float32 else 0


def products_in_kernel(terms: int) -> int:
    """Returns the number of bfloat16 products that are as accurate as `terms` float16 products."""
    return 6 if terms == FULL_TERMS else 3


def described(terms: int, *, in_kernel: bool = False) -> str:
    """Returns the text of `explain` for a product."""
    accuracy = "float32" if terms == FULL_TERMS else "TF32"
    if in_kernel:
        products = f"{products_in_kernel(terms)} products of bfloat16 parts"
    else:
        products = f"{terms} products of float16 parts"
    return f"{products}, as accurate as {accuracy}"


def list_workspace_bytes(stacks: Iterable[tuple[int, int]], terms: int) -> int:
    """Returns the bytes for parts of all operands of a list, and each matrix's largest magnitude.

    `csrc/parts/listed_workspace.cc` has the layout.

    Args:
      stacks: for every operand of every product, the number of matrices and the elements of each.
      terms: see `num_terms`.
    """
    stacks = list(stacks)
    maxima = section_bytes(sum(matrices for matrices, _ in stacks), np.uint32)
    parts = num_parts(terms)
    return maxima + sum(section_bytes(parts * g * size, PART_DTYPE) for g, size in stacks)


def bytes_of_split(operand_bytes: float, terms: int) -> tuple[float, float]:
    """Returns the bytes of operands that a kernel reads, and the bytes that passes before it move.

    Passes read operands twice: for the largest magnitudes, and to split them. If `terms` is 0,
    there are no passes.
    """
    if not terms:
        return operand_bytes, 0.0
    part_bytes = operand_bytes * num_parts(terms) * PART_DTYPE.itemsize / 4
    return part_bytes, 2 * operand_bytes + part_bytes


def num_parts(terms: int) -> int:
    """Returns the number of float16 parts of an operand."""
    return 1 if terms == 1 else 2


def section_bytes(count: int, dtype: Any) -> int:
    """Returns the bytes of an array in a workspace, aligned."""
    return round_up(count * np.dtype(dtype).itemsize, ALIGNMENT_BYTES)
