"""Permutes rows with gathers only, in the forward and in the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_jvp
def permute_rows(rows: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns ``rows[permutation]`` along axis 0. The gradient is the gather ``ct[inverse]``.

    ``permutation`` and ``inverse`` are integers [rows.shape[0]]. ``inverse`` must be the inverse of
    ``permutation``; the function does not check this.
    """
    return jnp.asarray(rows).at[permutation].get(unique_indices=True, mode="promise_in_bounds")


@permute_rows.defjvp
def _permute_rows_jvp(primals, tangents):
    # JAX transposes a gather into a scatter-add, which is slow and, in general, not reproducible
    # on a GPU. It transposes a scatter into a gather. A permutation can be either, so write the
    # tangent map as a scatter. Then reverse mode runs gathers only.
    rows, permutation, inverse = primals
    tangent, _, _ = tangents
    permuted_tangent = (
        jnp.zeros_like(tangent)
        .at[inverse]
        .set(tangent, unique_indices=True, mode="promise_in_bounds")
    )
    return permute_rows(rows, permutation, inverse), permuted_tangent
