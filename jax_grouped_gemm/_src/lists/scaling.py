"""Products and scales of stacks of matrices, in the dtype in which sums are accumulated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def multiply(
    spec: str,
    x: jax.Array,
    y: jax.Array,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    result_dtype: np.dtype | None = None,
) -> jax.Array:
    """Computes `jnp.einsum` with sums of `dtype`, rounded to `result_dtype` if that is given."""
    result_dtype = dtype if result_dtype is None else result_dtype
    einsum = functools.partial(jnp.einsum, spec, precision=precision)
    if x.dtype.itemsize >= 4:
        return einsum(x, y, preferred_element_type=dtype).astype(result_dtype)
    # XLA:CPU has no batched product of 16-bit operands with a wider result. On a GPU the product
    # itself rounds its sums, which are float32.
    return lax.platform_dependent(
        x,
        y,
        cpu=lambda x, y: einsum(x.astype(dtype), y.astype(dtype)).astype(result_dtype),
        default=functools.partial(einsum, preferred_element_type=result_dtype),
    )


def per_matrix(scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns scales [g] or [1] in the shape and dtype to multiply [g, n, n] of `dtype`."""
    return scale.astype(dtype)[:, None, None]


def scaled_c(beta: jax.Array | complex, c: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns beta C in `dtype`, zero where beta is zero, even if C is not finite."""
    c = c.astype(dtype)
    if isinstance(beta, jax.Array):
        beta = per_matrix(beta, dtype)
    return jnp.where(beta == 0, 0, beta * c)
