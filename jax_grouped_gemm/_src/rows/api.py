"""Rows of a mixture of experts: sorted by expert, copied there, and added up on the way back.

A token has k pairs, (token, choice). Pair p = token * k + choice has a row of its own among the
rows that are sorted by expert, `inverse[p]`, and row i is that of pair `order[i]`.

Operations copy bit by bit, add up in float32 (float64 of float64) in the order of the choices, and
round once. An index that is out of range, negative ones included, is no row. `count` is the number
of valid rows if not all are, an integer on the device: the CUDA kernels neither read nor write rows
at or past it, whose contents are undefined in results and in cotangents. So a buffer for the worst
case costs its addresses only.

Each operation is differentiable to any order; `dispatch` and `combine` are each other's transpose.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import as_array, checked_implementation, to_int32
from jax_grouped_gemm._src.rows import primitive
from jax_grouped_gemm._src.rows.reference import accumulator


class ExpertOrder(NamedTuple):
    """The T*k (token, choice) pairs sorted by expert; ties keep the token order."""

    order: jax.Array  # [T*k] int32, the pair that sorted row i holds
    inverse: jax.Array  # [T*k] int32, the sorted row that holds pair i
    group_sizes: jax.Array  # [E] int32, number of rows of every expert


def sort_pairs(
    experts: ArrayLike, num_experts: int, *, implementation: str | None = None
) -> ExpertOrder:
    """Sorts pairs by their experts [..., k]; see `moe.sort_by_expert`."""
    experts = _integers("experts", experts)
    if not isinstance(num_experts, int) or num_experts < 0:
        raise ValueError(f"num_experts must be an integer, at least 0, got {num_experts!r}")
    params = dict(num_experts=num_experts, implementation=checked_implementation(implementation))
    return ExpertOrder(*primitive.sort_by_expert(experts.reshape(-1), **params))


def gather_rows(
    x: ArrayLike,
    rows: ArrayLike,
    count: ArrayLike | None = None,
    *,
    inverse: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Copies `x[rows]`, with rows of zeros where an index is not in [0, T).

    Args:
      x: tokens [T, ...] of any dtype.
      rows: integers [m], the token that each row is a copy of, such as `order // top_k`.
      count: integer scalar, how many of the m rows are valid, by default all. The others are
        undefined.
      inverse: integers [T, k], where in `rows` each token is, every place once; negative ones or
        those past the last are none. With it the kernel reads each token once and the gradient
        with respect to `x` is `combine`. Without it the gradient is XLA's scatter-add.
      implementation: None takes the CUDA kernel where it can run and the reference elsewhere;
        "cuda" insists on the kernel; "reference" is pure JAX. Kernels move bfloat16, float16 and
        float32, in pieces of 16 bytes if a token is a multiple of that.

    Returns:
      [m, ...], in the dtype of `x`.

    Raises:
      TypeError: an operand has an unsuitable dtype.
      ValueError: shapes do not fit together, or `implementation` is invalid.
      NotImplementedError: "cuda" was asked for and no kernel can run.
    """
    x, rows = _array("x", x), _integers("rows", rows)
    if rows.ndim != 1:
        raise ValueError(f"rows must have the shape [m], got {rows.shape}")
    inverse = (
        jnp.zeros((x.shape[0], 0), jnp.int32) if inverse is None else _integers("inverse", inverse)
    )
    if inverse.ndim != 2 or inverse.shape[0] != x.shape[0]:
        raise ValueError(f"inverse must be [T, k] with T = {x.shape[0]} of x, got {inverse.shape}")
    y = primitive.gather_rows(
        _as_matrix(x),
        rows,
        inverse,
        *_absent_weights(x.shape[0]),
        _count(count),
        divisor=1,
        implementation=checked_implementation(implementation),
    )
    return y.reshape(rows.shape[0], *x.shape[1:])


def dispatch(
    x: ArrayLike,
    expert_order: ExpertOrder,
    *,
    count: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Copies tokens [T, ...] to their experts' rows [T*k, ...], sorted by expert.

    Args:
      x, count, implementation: see `gather_rows`.
      expert_order: of T*k pairs.
    """
    x = _array("x", x)
    tokens, pairs = x.shape[0], expert_order.order.shape[0]
    top_k = pairs // max(tokens, 1)
    if top_k * tokens != pairs:
        raise ValueError(
            f"x must have T tokens for expert_order of T*k = {pairs} pairs, got x {x.shape}"
        )
    y = primitive.gather_rows(
        _as_matrix(x),
        expert_order.order,
        expert_order.inverse.reshape(tokens, top_k),
        *_absent_weights(tokens),
        _count(count),
        divisor=max(top_k, 1),
        implementation=checked_implementation(implementation),
    )
    return y.reshape(pairs, *x.shape[1:])


def combine(
    rows: ArrayLike,
    expert_order: ExpertOrder | ArrayLike,
    top_k: int | None = None,
    weights: ArrayLike | None = None,
    *,
    order: ArrayLike | None = None,
    count: ArrayLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Adds up every token's rows: [m, ...] -> [T, ...], the transpose of `dispatch`.

    out[t] = the sum over c of weights[t, c] * rows[inverse[t, c]], for all choices with a row.

    Args:
      rows: [m, ...] of any dtype.
      expert_order: an `ExpertOrder` of m = T*k pairs, or integers [T, k], the row of every pair
        (its `inverse`).
      top_k: k, for an `ExpertOrder`.
      weights: [T, k], real, by default ones.
      order: integers [m], the pair t * k + c of every row, where `expert_order` is an array. Then
        no row may belong to two pairs, and the gradient with respect to `rows` is a gather, as it
        is with an `ExpertOrder`. Without it the gradient is XLA's scatter-add.
      count: see `gather_rows`.
      implementation: see `gather_rows`.

    Returns:
      [T, ...], in the dtype of `rows`.

    Raises:
      TypeError, ValueError, NotImplementedError: see `gather_rows`.
    """
    rows = _array("rows", rows)
    inverse, order = _pairs_and_rows(rows, expert_order, top_k, order)
    tokens, choices = inverse.shape
    if weights is None:
        (weights,) = _absent_weights(tokens)
    else:
        weights = _array("weights", weights)
        if not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(f"weights must be floating point, got {weights.dtype}")
        if weights.shape != (tokens, choices):
            raise ValueError(f"weights must be [T, k] = {inverse.shape}, got {weights.shape}")
        weights = weights.astype(_weight_dtype(rows.dtype))
    x = primitive.combine_rows(
        _as_matrix(rows),
        order,
        inverse,
        weights,
        _count(count),
        divisor=max(choices, 1),
        implementation=checked_implementation(implementation),
    )
    return x.reshape(tokens, *rows.shape[1:])


def _pairs_and_rows(rows, expert_order, top_k, order) -> tuple[jax.Array, jax.Array]:
    """inverse [T, k], and order [m], empty if it is not known."""
    if isinstance(expert_order, ExpertOrder):
        if order is not None:
            raise ValueError("order comes with an ExpertOrder and is not to be given as well")
        pairs = expert_order.inverse.shape[0]
        if not isinstance(top_k, int) or top_k < 1 or pairs % top_k:
            raise ValueError(
                f"top_k must be a positive integer that divides the {pairs} pairs of expert_order, "
                f"got {top_k!r}"
            )
        if rows.shape[0] != pairs:
            raise ValueError(f"rows must be [T*k, ...] with T*k = {pairs}, got {rows.shape}")
        return expert_order.inverse.reshape(-1, top_k), expert_order.order
    inverse = _integers("expert_order", expert_order)
    if not (top_k is None or isinstance(top_k, int)):
        raise TypeError(
            f"top_k must be an integer or None, got a {type(top_k).__name__}; weights come after it"
        )
    if inverse.ndim != 2 or top_k not in (None, inverse.shape[-1]):
        raise ValueError(
            "expert_order must be an ExpertOrder or have the shape [T, k], with k = top_k if that "
            f"is given, got the shape {inverse.shape} and top_k={top_k!r}"
        )
    order = jnp.zeros((0,), jnp.int32) if order is None else _integers("order", order)
    if order.shape not in ((0,), rows.shape[:1]):
        raise ValueError(f"order must be [m] with m = {rows.shape[0]} of rows, got {order.shape}")
    return inverse, order


def _array(name: str, x: ArrayLike) -> jax.Array:
    x = as_array(name, x)
    if x.ndim == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar")
    return x


def _integers(name: str, x: ArrayLike) -> jax.Array:
    x = _array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got dtype {x.dtype}")
    return to_int32(x)


def _count(count: ArrayLike | None) -> jax.Array:
    """`count` as int32 [1], or [0] if all rows are valid."""
    if count is None:
        return jnp.zeros((0,), jnp.int32)
    count = jnp.asarray(count)
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(f"count must be an integer, got dtype {count.dtype}")
    if count.shape not in ((), (1,)):
        raise ValueError(f"count must be a scalar or have shape (1,), got {count.shape}")
    return to_int32(count).reshape(1)


def _absent_weights(tokens: int) -> tuple[jax.Array]:
    return (jnp.zeros((tokens, 0), jnp.float32),)


def _weight_dtype(dtype) -> Any:
    return accumulator(jnp.zeros((), dtype).real.dtype)


def _as_matrix(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))
