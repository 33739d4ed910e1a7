"""Tokens gathered from all devices of a group, and partial results added up where they came from.

The two are each other's transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.expert_parallel.group import Axes, Group
from jax_grouped_gemm._src.expert_parallel.prediction import Combine


def gather(x: jax.Array, group: Group, combine: Combine) -> jax.Array:
    """[T, ...] of each device -> [sources * T, ...], by the transpose of what `combine` says.

    The sources are in the order of the devices, but with "ppermute", where they begin with the
    device itself.
    """
    if not group.tokens:
        return x
    if combine == "all_to_all":
        return _gather(x, group.tokens)
    if combine == "ppermute":
        return _gather_by_shifts(x, group.tokens)
    return lax.all_gather(x, group.tokens, tiled=True)


def scatter(y: jax.Array, group: Group, combine: Combine) -> jax.Array:
    """Partial results [sources * T, ...] of each device -> their sums [T, ...] for its tokens."""
    if group.tokens:
        if combine == "all_to_all":
            y = _scatter(y, group.tokens)
        elif combine == "ppermute":
            y = _scatter_by_shifts(y, group.tokens)
        else:
            y = lax.psum_scatter(y, group.tokens, tiled=True)
    return lax.psum(y, group.summed) if group.summed else y


# The first two below are made of the same steps backwards, so that JAX transposes one into the
# other, and so are the last two. The sum over devices, which is that of copies' cotangents, is in
# float32 at least for that reason.


def _gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Everybody sends everybody a copy, as an all_gather does."""
    copies = jnp.broadcast_to(x.astype(at_least_float32(x.dtype)), (lax.axis_size(axes), *x.shape))
    everybody = lax.all_to_all(copies.astype(x.dtype), axes, 0, 0)
    return everybody.reshape(-1, *x.shape[1:])


def _scatter(y: jax.Array, axes: Axes) -> jax.Array:
    """Added up in the order of the devices, and rounded once."""
    parts = y.reshape(lax.axis_size(axes), -1, *y.shape[1:])
    parts = lax.all_to_all(parts, axes, 0, 0)
    return jnp.sum(parts, axis=0, dtype=at_least_float32(y.dtype)).astype(y.dtype)


def _gather_by_shifts(x: jax.Array, axes: Axes) -> jax.Array:
    """Everybody sends to the device before it, then to the one before that, and so on."""
    copies = x.astype(at_least_float32(x.dtype))
    shifts = range(lax.axis_size(axes))
    return jnp.concatenate([_shifted(copies.astype(x.dtype), axes, -shift) for shift in shifts])


def _scatter_by_shifts(y: jax.Array, axes: Axes) -> jax.Array:
    """Added up in the order of `_gather_by_shifts`, and rounded once."""
    parts = jnp.split(y, lax.axis_size(axes))
    return _sum(_shifted(part, axes, shift) for shift, part in enumerate(parts))


def made_and_scattered(make: Callable[[jax.Array], jax.Array], of: jax.Array, axes: Axes):
    """`_scatter_by_shifts` of what `make` makes of `of` [sources * T, ...], a source at a time.

    What is for other devices is made first, and travels while the rest is made.
    """
    own, *others = jnp.split(of, lax.axis_size(axes))
    parts = []
    for shift, part in enumerate(others, 1):
        made = make(part)
        parts.append(_shifted(made, axes, shift))
        own, made = lax.optimization_barrier((own, made))
    return _sum([make(own), *parts])


def _sum(parts: Iterable[jax.Array]) -> jax.Array:
    parts = list(parts)
    total = sum(part.astype(at_least_float32(part.dtype)) for part in parts)
    return total.astype(parts[0].dtype)


def _shifted(x: jax.Array, axes: Axes, by: int) -> jax.Array:
    """Sent to the device that comes `by` later in a ring."""
    size = lax.axis_size(axes)
    if by % size == 0:
        return x
    return lax.ppermute(x, axes, [(device, (device + by) % size) for device in range(size)])
