"""Moves rows of a mixture of experts: sorts by expert, copies tokens to rows, adds up rows.

A token has k pairs, (token, choice). After sorting by expert, row i belongs to pair `order[i]` =
token * k + choice, and the row of a pair is `inverse[token, choice]`.

Operations copy bits unchanged. They sum in float32 (float64 for float64) in the order of the
choices, and round once. A negative or too large index stands for no row. `count` is the number of
valid rows, an integer on the device. The CUDA kernels neither read nor write rows at or past
`count`, so these rows are undefined in results and in cotangents. Therefore a buffer for the worst
case takes memory but no time.

All moves are differentiable to any order; `dispatch` and `combine` are each other's transpose.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    as_array,
    as_indices,
    checked_implementation,
    checked_int,
    refuse_sharded,
)
from jax_grouped_gemm._src.rows import primitive
from jax_grouped_gemm._src.rows.operands import ExpertOrder, check_whole_routing, checked_order
from jax_grouped_gemm._src.rows.reference import accumulator
from jax_grouped_gemm._src.rows.routing import Routing


def sort_by_expert(
    routing: Routing | jax.Array | np.ndarray,
    num_experts: int | None = None,
    *,
    implementation: Implementation = None,
) -> ExpertOrder:
    """Orders the (token, choice) pairs so that every expert owns one contiguous range of rows.

    Args:
      routing: the result of `route`, or only its experts, integers [..., k]. Experts outside [0, E)
        are on other devices. Their pairs come last, and `group_sizes` does not count them.
      num_experts: E, if `routing` has only experts.
      implementation: see `gather_rows`. The kernel is a stable counting sort, in one launch for up
        to 4096 pairs and two for more.

    Raises:
      TypeError: an argument has an unsuitable type, dtype or shape.
      ValueError: `num_experts` is not from 0 to 2^31 - 1, or `implementation` is invalid.
      NotImplementedError: see `gather_rows`.
    """
    if isinstance(routing, jax.Array | np.ndarray):
        experts = _integers("sort_by_expert", "experts", routing)
        # This also refuses None.
        num_experts = checked_int("num_experts", num_experts)  # type: ignore[arg-type]
        if not 0 <= num_experts < 2**31:
            raise ValueError(f"num_experts must be from 0 to 2^31 - 1, got {num_experts}")
    else:
        check_whole_routing("sort_by_expert", routing)
        experts = as_indices("routing.experts", routing.experts)
        routed = routing.logits.shape[-1]
        if num_experts not in (None, routed):
            raise ValueError(
                f"num_experts must be that of the routing, {routed}, got {num_experts!r}"
            )
        num_experts = routed
    order, inverse, group_sizes = primitive.sort_by_expert(
        experts.reshape(-1),
        num_experts=num_experts,
        implementation=checked_implementation(implementation),
    )
    # Do not use -1, because `reshape` cannot infer a dimension of an array without elements.
    inverse = inverse.reshape(math.prod(experts.shape[:-1]), experts.shape[-1])
    return ExpertOrder(order, inverse, group_sizes)


def gather_rows(
    x: ArrayLike,
    rows: ArrayLike,
    count: ArrayLike | None = None,
    *,
    inverse: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Returns `x[rows]`, with rows of zeros where an index is not in [0, T).

    Args:
      x: tokens [T, ...] of any dtype.
      rows: integers [m], the token that each row copies, such as `order // top_k`.
      count: integer scalar, the number of valid rows, by default m. Other rows are undefined.
      inverse: integers [T, k], the positions of each token in `rows`. Each position must occur
        once; a negative or too large index stands for no row. With `inverse`, the kernel reads each
        token once, and the gradient with respect to `x` is `combine`. Without `inverse`, XLA
        computes this gradient, which is slower, because XLA sorts the rows by token, and adds up
        the rows of each token in ascending order.
      implementation: None takes the CUDA kernel where it can run and the reference elsewhere;
        "cuda" requires the kernel; "xla" is pure JAX. Kernels move bfloat16, float16 and float32,
        in pieces of 16 bytes if the size of a token is a multiple of 16 bytes.

    Returns:
      [m, ...], in the dtype of `x`.

    Raises:
      TypeError: an operand has an unsuitable dtype or shape.
      ValueError: `implementation` is invalid.
      NotImplementedError: `implementation="cuda"` but no kernel can run, or an operand is sharded
        over explicit mesh axes.
    """
    x = _array("gather_rows", "x", x)
    rows = _integers("gather_rows", "rows", rows)
    if rows.ndim != 1:
        raise TypeError(f"gather_rows: rows must be [m], got {rows.shape}")
    tokens = x.shape[0]
    if inverse is None:
        inverse = jnp.zeros((tokens, 0), jnp.int32)
    inverse = _integers("gather_rows", "inverse", inverse)
    if inverse.ndim != 2 or inverse.shape[0] != tokens:
        raise TypeError(
            f"gather_rows: inverse must be [T, k] with T = {tokens} of x, got {inverse.shape}"
        )
    y = primitive.gather_rows(
        _as_matrix(x),
        rows,
        inverse,
        _no_weights(tokens),
        _count("gather_rows", count),
        divisor=1,
        implementation=checked_implementation(implementation),
    )
    return y.reshape(rows.shape[0], *x.shape[1:])


def dispatch(
    x: ArrayLike,
    expert_order: ExpertOrder,
    *,
    count: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Copies tokens [T, ...] to their experts' rows [T*k, ...], sorted by expert.

    Args:
      x: see `gather_rows`.
      expert_order: the result of `sort_by_expert`.
      count: see `gather_rows`. Pass `expert_order.group_sizes.sum()` to leave out pairs whose
        experts are on other devices.
      implementation: see `gather_rows`.

    Raises:
      TypeError: `x` does not have T tokens, or `expert_order` is not an `ExpertOrder`.
      ValueError, NotImplementedError: see `gather_rows`.
    """
    order, inverse = checked_order("dispatch", expert_order)
    x = _array("dispatch", "x", x)
    tokens, top_k = inverse.shape
    if x.shape[0] != tokens:
        raise TypeError(f"dispatch: x must be [T, ...] with T = {tokens} as ordered, got {x.shape}")
    y = primitive.gather_rows(
        _as_matrix(x),
        order,
        inverse,
        _no_weights(tokens),
        _count("dispatch", count),
        divisor=max(top_k, 1),
        implementation=checked_implementation(implementation),
    )
    return y.reshape(order.size, *x.shape[1:])


def combine(
    rows: ArrayLike,
    expert_order: ExpertOrder | jax.Array | np.ndarray,
    top_k: int | None = None,
    weights: ArrayLike | None = None,
    *,
    order: ArrayLike | None = None,
    count: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Sums the rows of every token: [m, ...] -> [T, ...], the transpose of `dispatch`.

    out[t] = the sum over c of weights[t, c] * rows[inverse[t, c]], for all choices with a row.

    Args:
      rows: [m, ...] of any dtype; with `weights`, floating point or complex.
      expert_order: the result of `sort_by_expert`, for m = T*k; or only its field `inverse`,
        integers [T, k], for any m.
      top_k: k; optional.
      weights: [T, k], floating point, by default ones.
      order: integers [m], the pair t * k + c of every row, if `expert_order` is only the inverse.
        With `order` or the result of `sort_by_expert`, the gradient with respect to `rows` is a
        gather, and no row may belong to two pairs. Otherwise the gradient is a scatter-add.
      count: see `gather_rows`.
      implementation: see `gather_rows`.

    Returns:
      [T, ...], in the dtype of `rows`.

    Raises:
      TypeError: an operand has an unsuitable dtype or shape.
      ValueError: `top_k` is not k, or `order` is given although `expert_order` has an order, or
        `implementation` is invalid.
      NotImplementedError: see `gather_rows`.
    """
    rows = _array("combine", "rows", rows)
    order, inverse = _order_of_rows(rows, expert_order, order)
    tokens, choices = inverse.shape
    if top_k is not None and checked_int("top_k", top_k) != choices:
        raise ValueError(f"combine: top_k must be that of expert_order, {choices}, got {top_k}")
    if weights is None:
        weights = _no_weights(tokens)
    else:
        weights = _array("combine", "weights", weights)
        if weights.shape != inverse.shape or not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(
                f"combine: weights must be [T, k] = {inverse.shape}, floating point, got "
                f"{weights.dtype} of shape {weights.shape}"
            )
        if not jnp.issubdtype(rows.dtype, jnp.inexact):
            raise TypeError(
                f"combine: rows must be floating point or complex to have weights, got {rows.dtype}"
            )
        weights = weights.astype(accumulator(rows.real.dtype))
    x = primitive.combine_rows(
        _as_matrix(rows),
        order,
        inverse,
        weights,
        _count("combine", count),
        divisor=max(choices, 1),
        implementation=checked_implementation(implementation),
    )
    return x.reshape(tokens, *rows.shape[1:])


def _order_of_rows(rows, expert_order, order) -> tuple[jax.Array, jax.Array]:
    """Returns order [m], or [0] if it is not known, and inverse [T, k]."""
    if not isinstance(expert_order, jax.Array | np.ndarray):
        if order is not None:
            raise ValueError("combine: order is part of expert_order, so it must not be given too")
        order, inverse = checked_order("combine", expert_order)
        if rows.shape[0] != order.size:
            raise TypeError(
                f"combine: rows must be [{order.size}, ...] as ordered, got {rows.shape}"
            )
        return order, inverse
    inverse = _integers("combine", "expert_order", expert_order)
    if inverse.ndim != 2:
        raise TypeError(
            "combine: expert_order must be a moe.ExpertOrder or integers [T, k], got the shape "
            f"{inverse.shape}"
        )
    if order is None:
        return jnp.zeros((0,), jnp.int32), inverse
    order = _integers("combine", "order", order)
    if order.shape != rows.shape[:1]:
        raise TypeError(f"combine: order must be [m] = {rows.shape[:1]}, got {order.shape}")
    return order, inverse


def _array(function: str, name: str, x: ArrayLike) -> jax.Array:
    x = as_array(name, x)
    refuse_sharded(function, **{name: x})
    if x.ndim == 0:
        raise TypeError(f"{function}: {name} must have at least one dimension, got a scalar")
    return x


def _integers(function: str, name: str, x: ArrayLike) -> jax.Array:
    return _array(function, name, as_indices(f"{function}: {name}", x))


def _count(function: str, count: ArrayLike | None) -> jax.Array:
    """Returns `count` as int32 [1], or [0] if all rows are valid."""
    if count is None:
        return jnp.zeros((0,), jnp.int32)
    count = as_indices(f"{function}: count", count)
    if count.shape not in ((), (1,)):
        raise TypeError(f"{function}: count must be a scalar, got shape {count.shape}")
    return count.reshape(1)


def _no_weights(tokens: int) -> jax.Array:
    return jnp.zeros((tokens, 0), jnp.float32)


def _as_matrix(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))
