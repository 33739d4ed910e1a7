"""Rank-k and rank-2k updates in pure JAX: what every other implementation must compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.lists.scaling import multiply, per_matrix, scaled_c


def update(
    alpha: jax.Array,
    a: jax.Array,
    b: jax.Array | None,
    beta: jax.Array | None,
    c: jax.Array | None,
    diagonal: jax.Array | None = None,
    *,
    hermitian: bool,
    transpose: bool,
    upper: bool,
    symmetrize: bool,
    result_dtype: np.dtype,
    precision: lax.PrecisionLike,
    symm: bool = False,
    **_,
) -> jax.Array:
    """Updates one stack of matrices; see `primitive.rank_k`.

    Args:
      alpha: [g], or [1] for all matrices.
      a: [g, n, k], or [g, k, n] with `transpose`.
      b: like `a`, or None for a rank-k update.
      beta: [g] or [1], or None.
      c: [g, n, n], or None. The computed triangle of c is not read where beta is zero, and
        the other triangle is not read with `symmetrize`.
      diagonal: [g] or [1], multiples of the identity to add; or None.
      hermitian: whether products are with the conjugate transpose.
      transpose: whether the last two dimensions of `a` and `b` are exchanged.
      upper: whether the upper triangle is computed.
      symmetrize: whether the other triangle is the mirror image, rather than c's or zero.
      result_dtype: dtype of the result.
      precision: precision of the products.
      symm: whether the product is A B^T alone where there is a b.

    Returns:
      [g, n, n].
    """
    dtype = at_least_float32(result_dtype)
    k_axis = 1 if transpose else 2
    if symmetrize and a.shape[k_axis] == 1:
        a, b = _with_a_zero(a, k_axis), None if b is None else _with_a_zero(b, k_axis)
    other = a if b is None else b
    product = multiply(
        "gki,gkj->gij" if transpose else "gik,gjk->gij",
        a,
        jnp.conj(other) if hermitian else other,
        precision,
        dtype,
    )
    reverse = flip(product, hermitian=False)
    if symmetrize:
        # Mirror before any arithmetic, so that an element and its mirror image come from the same
        # numbers in the same expression. Otherwise XLA may fuse multiply-adds in only one of them.
        product, reverse = _mirrored(product, upper), _mirrored(reverse, upper)
        c = None if c is None else _mirrored(c, upper)
    scale = per_matrix(alpha, dtype)
    result = scale * product
    if b is not None and not symm:
        # B A^T is the transpose of A B^T.
        result += jnp.conj(scale * reverse) if hermitian else scale * reverse
    if c is not None and beta is not None:
        result += scaled_c(beta, c, dtype)
    if diagonal is not None:
        row, column = _indices(result)
        result = jnp.where(row == column, result + per_matrix(diagonal, dtype), result)
    if symmetrize:
        result = _conjugated_outside(result, upper) if hermitian else result
        return result.astype(result_dtype)
    # Round before adding the other triangle, so that an unscaled product is written, and read again
    # to be masked, in the result's type.
    result = result.astype(result_dtype)
    return fill(result, c, upper=upper, hermitian=hermitian, symmetrize=False)


def _with_a_zero(x: jax.Array, axis: int) -> jax.Array:
    """Returns `x` with a zero after its only element along `axis`, so that its products stay dots.

    XLA turns a dot over one element into a multiplication. It repeats the multiplication where the
    result is mirrored, and may fuse it to a multiply-add in one of the two places.
    """
    return jnp.pad(x, [(0, 1 if i == axis else 0) for i in range(x.ndim)])


def _computed(x: jax.Array, upper: bool) -> jax.Array:
    """Returns a mask of each matrix's computed triangle."""
    row, column = _indices(x)
    return row <= column if upper else row >= column


def _indices(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the row and the column of every element, shaped like `x`."""
    row = lax.broadcasted_iota(np.int32, x.shape, x.ndim - 2)
    return row, lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1)


def _mirrored(x: jax.Array, upper: bool) -> jax.Array:
    """Returns the computed triangle of each matrix and its mirror image."""
    return jnp.where(_computed(x, upper), x, flip(x, hermitian=False))


def _conjugated_outside(x: jax.Array, upper: bool) -> jax.Array:
    """Makes symmetric matrices Hermitian: real diagonals, and conjugates outside the triangle."""
    x = _with_real_diagonal(x)
    return jnp.where(_computed(x, upper), x, jnp.conj(x))


def _with_real_diagonal(x: jax.Array) -> jax.Array:
    row, column = _indices(x)
    return jnp.where(row == column, jnp.real(x), x)


def fill(
    inside: jax.Array,
    outside: jax.Array | None,
    *,
    upper: bool,
    hermitian: bool,
    symmetrize: bool,
) -> jax.Array:
    """Returns the computed triangle of `inside`. The rest is its mirror image, `outside` or 0."""
    if hermitian:
        inside = _with_real_diagonal(inside)
    if symmetrize:
        outside = flip(inside, hermitian)
    elif outside is None:
        outside = jnp.zeros((), inside.dtype)
    return jnp.where(_computed(inside, upper), inside, outside.astype(inside.dtype))


def flip(x: jax.Array, hermitian: bool) -> jax.Array:
    """Returns the transpose of each matrix, conjugated if `hermitian`."""
    x = jnp.swapaxes(x, -1, -2)
    return jnp.conj(x) if hermitian else x
