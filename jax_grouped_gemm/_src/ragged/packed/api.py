"""Chooses whether a product reads quantised weights packed or dequantises them first."""

from __future__ import annotations

from typing import Any

import jax

from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.plan import dequantized_reason
from jax_grouped_gemm._src.ragged.packed.primitive import PACKED_DOT, PackedOperands
from jax_grouped_gemm._src.ragged.packed.reference import dequantized


def packed_product(
    x: jax.Array, rhs: QuantizedArray, sizes: jax.Array, offset: jax.Array, **options: Any
) -> jax.Array:
    """Computes the product [m, n] of rows and packed or dequantised matrices, whichever is faster.

    Args:
      x: rows [m, k].
      rhs: matrices [g, k, n] in the layout "packed".
      sizes, offset: group sizes [G], and the group of the first matrix [1].
      **options: parameters of `ragged_noncontracting`, except transpose_lhs and transpose_rhs.
    """
    operands = PackedOperands(x, rhs, sizes, offset)
    problem = operands.problem(options["preferred_element_type"])
    asked = options["precision"], options["implementation"]
    if reason := dequantized_reason([problem], operands, *asked):
        return dequantized(operands, reason, **options)
    leaves, tree = jax.tree.flatten(operands)
    return PACKED_DOT.bind(*leaves, tree=tree, **options)
