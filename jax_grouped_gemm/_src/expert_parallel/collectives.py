"""Tokens gathered from all devices of a group, and partial results added up where they came from.

The two are each other's transpose.
"""

from __future__ import annotations

import functools
import operator

import jax
from jax import lax

from jax_grouped_gemm._src.arithmetic import at_least_float32
from jax_grouped_gemm._src.expert_parallel.group import Axes, Group
from jax_grouped_gemm._src.expert_parallel.prediction import Combine


def gather(x: jax.Array, group: Group, combine: Combine) -> jax.Array:
    """[T, ...] of each device -> [sources * T, ...]; its gradient is added up as `combine` says."""
    if not group.tokens:
        return x
    if combine == "all_to_all":
        return _gather(x, group.tokens)
    return lax.all_gather(x, group.tokens, tiled=True)


def scatter(y: jax.Array, group: Group, combine: Combine) -> jax.Array:
    """Partial results [sources * T, ...] of each device -> their sums [T, ...] for its tokens."""
    if group.tokens:
        if combine == "all_to_all":
            y = _scatter(y, group.tokens)
        else:
            y = lax.psum_scatter(y, group.tokens, tiled=True)
    return lax.psum(y, group.summed) if group.summed else y


# What JAX makes of the derivatives of an all_to_all and a sum would broadcast before sending.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.all_gather(x, axes, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scatter(y: jax.Array, axes: Axes) -> jax.Array:
    """Added up in float32 at least, in the order of the devices, and rounded once."""
    parts = y.reshape(lax.axis_size(axes), -1, *y.shape[1:])
    parts = lax.all_to_all(parts, axes, 0, 0)
    total = functools.reduce(operator.add, parts.astype(at_least_float32(y.dtype)))
    return total.astype(y.dtype)


_gather.defvjp(lambda x, axes: (_gather(x, axes), None), lambda axes, _, ct: (_scatter(ct, axes),))
_scatter.defvjp(lambda y, axes: (_scatter(y, axes), None), lambda axes, _, ct: (_gather(ct, axes),))
