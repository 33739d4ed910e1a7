"""The mean of gradients and the direction of an update, computed in float32 at least."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import at_least_float32


def promoted(gradient: jax.Array, mu: jax.Array) -> np.dtype:
    """Returns the dtype of an update."""
    return jnp.promote_types(gradient.dtype, mu.dtype)


def widened(tree: Any) -> Any:
    """Converts floating-point leaves to float32 at least."""

    def one(x):
        is_narrow = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(at_least_float32(x.dtype)) if is_narrow else x

    return jax.tree.map(one, tree)


def mean(decay: Any, old: jax.Array, new: jax.Array) -> jax.Array:
    """Updates the exponentially decaying mean `old` with `new`."""
    dtype = at_least_float32(promoted(new, old))
    return decay * old.astype(dtype) + (1 - decay) * new.astype(dtype)


def direction(
    decay: Any, mu: jax.Array, gradient: jax.Array, count: jax.Array, nesterov: bool
) -> jax.Array:
    """Returns the mean `mu` of `count` gradients without its bias.

    With `nesterov`, it is the mean after one more step with the same `gradient`.
    """
    if not nesterov:
        return _unbiased(decay, mu, count)
    gradient = _unbiased(decay, gradient.astype(mu.dtype), count)
    return decay * _unbiased(decay, mu, count + 1) + (1 - decay) * gradient


def _unbiased(decay: Any, mean: jax.Array, count: jax.Array) -> jax.Array:
    """Corrects the bias of a mean of `count` values that began with zero."""
    return mean / (1 - decay ** count.astype(float)).astype(mean.dtype)
