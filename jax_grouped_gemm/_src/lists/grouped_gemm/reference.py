"""Products of lists of matrices in pure JAX: what every other implementation must compute."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.lists.scaling import multiply, per_matrix, scaled_c


def product(
    alpha: jax.Array | complex,
    lhs: jax.Array,
    rhs: jax.Array,
    beta: jax.Array | complex,
    c: jax.Array | None,
    *,
    transpose_lhs: bool,
    transpose_rhs: bool,
    result_dtype: np.dtype,
    precision: lax.PrecisionLike,
) -> jax.Array:
    """Computes alpha A B + beta C for a stack of each; see `primitive.grouped_gemm`.

    Args:
      alpha: [g], or a number for all.
      lhs: [g, m, k], or [g, k, m] with `transpose_lhs`.
      rhs: [g, k, n], or [g, n, k] with `transpose_rhs`.
      beta: [g], or a number for all.
      c: [g, m, n], or None. Not read where beta is zero.
      transpose_lhs: whether the last two dimensions of `lhs` are exchanged.
      transpose_rhs: whether the last two dimensions of `rhs` are exchanged.
      result_dtype: dtype of the result.
      precision: precision of the products.

    Returns:
      [g, m, n].
    """
    dtype = at_least_float32(result_dtype)
    spec = f"g{'ki' if transpose_lhs else 'ik'},g{'jk' if transpose_rhs else 'kj'}->gij"
    if not isinstance(alpha, jax.Array) and alpha == 1 and c is None:
        return multiply(spec, lhs, rhs, precision, dtype, result_dtype)
    result = multiply(spec, lhs, rhs, precision, dtype)
    if not isinstance(alpha, jax.Array):
        result = alpha * result
    else:
        result = per_matrix(alpha, dtype) * result
    if c is not None:
        result += scaled_c(beta, c, dtype)
    return result.astype(result_dtype)
