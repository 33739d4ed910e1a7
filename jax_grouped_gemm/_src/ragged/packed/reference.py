"""The product of rows and packed weights that are dequantised first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jax_grouped_gemm._src.quantized.weights import TRANSFORMED, with_arrays
from jax_grouped_gemm._src.ragged.primitive import ragged_noncontracting

if TYPE_CHECKING:
    from jax_grouped_gemm._src.ragged.packed.primitive import PackedOperands


def dequantized(operands: PackedOperands, reason: str, **options: Any) -> jax.Array:
    """Dequantises the matrices and multiplies rows by them; `explain` prints `reason`."""
    x, layouts = operands.x, dict(transpose_lhs=False, transpose_rhs=False)

    def of_array(rhs: Any) -> jax.Array:
        return ragged_noncontracting(x, rhs, operands.sizes, operands.offset, **layouts, **options)

    return with_arrays("ragged_dot", of_array, operands.rhs, x=x, name="lhs", reason=reason)


def dot(*leaves: jax.Array, tree: Any, implementation: Any = None, **options: Any) -> jax.Array:
    """Computes the primitive in pure JAX."""
    given = tree.unflatten(leaves)
    return dequantized(given, TRANSFORMED, implementation=implementation, **options)
