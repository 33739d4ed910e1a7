"""Permutes rows, by gathers only in both directions."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_jvp
def permute_rows(rows: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    """``rows[permutation]`` along axis 0, whose gradient is the gather ``ct[inverse]``.

    ``inverse`` must be the inverse of ``permutation``, both [rows.shape[0]]; this is not checked.
    """
    return jnp.asarray(rows).at[permutation].get(unique_indices=True, mode="promise_in_bounds")


@permute_rows.defjvp
def _permute_rows_jvp(primals, tangents):
    # JAX transposes a gather into a scatter-add, which is slow and, in general, not reproducible
    # on a GPU, and a scatter into a gather. A permutation is both, so the tangent map is written
    # as the scatter: reverse mode then runs gathers only.
    rows, permutation, inverse = primals
    tangent, _, _ = tangents
    permuted_tangent = (
        jnp.zeros_like(tangent)
        .at[inverse]
        .set(tangent, unique_indices=True, mode="promise_in_bounds")
    )
    return permute_rows(rows, permutation, inverse), permuted_tangent
