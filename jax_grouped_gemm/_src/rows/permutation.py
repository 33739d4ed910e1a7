"""Permutes rows with gathers only, in the forward and in the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import is_static


@jax.custom_jvp
def permute_rows(rows: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns ``rows[permutation]`` along axis 0. The gradient is the gather ``ct[inverse]``.

    ``permutation`` and ``inverse`` are integers [rows.shape[0]]. ``inverse`` must be the inverse of
    ``permutation``; the function does not check this.

    Raises:
      NotImplementedError: there are 2^31 rows or more.
    """
    rows = jnp.asarray(rows)
    if is_static(rows.shape[0]) and rows.shape[0] >= 2**31:
        raise NotImplementedError(
            f"permute_rows: rows of shape {rows.shape} has {rows.shape[0]} rows, beyond the limit "
            "2147483647 (2^31 - 1) of int32 indices"
        )
    return rows.at[permutation].get(unique_indices=True, mode="promise_in_bounds")


@permute_rows.defjvp
def _permute_rows_jvp(primals, tangents):
    # JAX transposes a gather into a scatter-add, which is slow and, in general, not reproducible
    # on a GPU. JAX transposes a scatter into a gather. A permutation can be written as either, so
    # write the tangent map as a scatter. Then reverse mode runs gathers only.
    rows, permutation, inverse = primals
    tangent, _, _ = tangents
    permuted_tangent = (
        jnp.zeros_like(tangent)
        .at[inverse]
        .set(tangent, unique_indices=True, mode="promise_in_bounds")
    )
    return permute_rows(rows, permutation, inverse), permuted_tangent
