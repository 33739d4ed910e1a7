"""Gathers tokens from all devices of a group, and adds up partial results on each token's device.

Gathering is the transpose of adding up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.expert_parallel.group import Axes, Group
from jax_grouped_gemm._src.expert_parallel.options import Combine


def gather(x: jax.Array, group: Group, combine: Combine) -> jax.Array:
    """Gathers x [T, ...] of all sources: [sources * T, ...], the transpose of `scatter`.

    The sources are in the order of the devices. With "ppermute" this order begins with the device
    itself.
    """
    if not group.tokens:
        return x
    by_shifts = combine == "ppermute"
    return _gather_by_shifts(x, group.tokens) if by_shifts else _gather(x, group.tokens)


def scatter(y: jax.Array, group: Group, combine: Combine) -> jax.Array:
    """Adds up partial results [sources * T, ...] for each device's own tokens: [T, ...]."""
    if group.tokens:
        scattered = _scatter_by_shifts if combine == "ppermute" else _scatter
        y = scattered(y, group.tokens)
    return lax.psum(y, group.summed) if group.summed else y


# `_scatter` takes the steps of `_gather` backwards, so that JAX transposes one into the other.
# `_scatter_by_shifts` takes those of `_gather_by_shifts` backwards. Copies are made in float32 at
# least, because their transpose is a sum over devices, which needs this precision.


def _gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Sends a copy from each device to each other device, as an all_gather does."""
    copies = jnp.broadcast_to(x.astype(at_least_float32(x.dtype)), (lax.axis_size(axes), *x.shape))
    everybody = lax.all_to_all(copies.astype(x.dtype), axes, 0, 0)
    return everybody.reshape(-1, *x.shape[1:])


def _scatter(y: jax.Array, axes: Axes) -> jax.Array:
    """Adds up partial results in the order of the devices, and rounds once."""
    parts = y.reshape(lax.axis_size(axes), -1, *y.shape[1:])
    parts = lax.all_to_all(parts, axes, 0, 0)
    return jnp.sum(parts, axis=0, dtype=at_least_float32(y.dtype)).astype(y.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _gather_by_shifts(x: jax.Array, axes: Axes) -> jax.Array:
    """Sends tokens to the device before this one, then to the device before that, and so on.

    A device copies its own tokens while other tokens travel.
    """
    _, *others = _copies_by_shifts(x, axes)
    buffer = jnp.pad(x, ((0, len(others) * len(x)), *((0, 0),) * (x.ndim - 1)))
    buffer = barrier(buffer)
    for place, part in enumerate(others, 1):
        buffer = lax.dynamic_update_slice_in_dim(buffer, part, place * len(x), axis=0)
    return buffer


@_gather_by_shifts.defjvp
def _(axes, primals, tangents):
    # Concatenate, because the transpose of an update of slices would also write zeros.
    (x,), (tangent,) = primals, tangents
    return _gather_by_shifts(x, axes), jnp.concatenate(_copies_by_shifts(tangent, axes))


def _copies_by_shifts(x: jax.Array, axes: Axes) -> list[jax.Array]:
    copies = x.astype(at_least_float32(x.dtype))
    return [_shifted(copies.astype(x.dtype), axes, -by) for by in range(lax.axis_size(axes))]


def _scatter_by_shifts(y: jax.Array, axes: Axes) -> jax.Array:
    """Adds up partial results, which are in the order of `_gather_by_shifts`, and rounds once."""
    parts = jnp.split(y, lax.axis_size(axes))
    return _sum(_shifted(part, axes, shift) for shift, part in enumerate(parts))


def made_and_scattered(make: Callable[[jax.Array], jax.Array], of: jax.Array, axes: Axes):
    """Scatters `make(part)` for each source's part of `of` [sources * T, ...].

    A device computes the results for other devices first. These results travel by shifts while the
    device computes the result for itself.
    """
    own, *others = jnp.split(of, lax.axis_size(axes))
    parts = []
    for shift, part in enumerate(others, 1):
        made = make(part)
        parts.append(_shifted(made, axes, shift))
        own, made = barrier((own, made))
    return _sum([make(own), *parts])


def _sum(parts: Iterable[jax.Array]) -> jax.Array:
    first, *others = parts
    total = first.astype(at_least_float32(first.dtype))
    for part in others:
        total += part.astype(total.dtype)
    return total.astype(first.dtype)


def _shifted(x: jax.Array, axes: Axes, by: int) -> jax.Array:
    """Sends `x` to the device that is `by` places later in a ring."""
    size = lax.axis_size(axes)
    if by % size == 0:
        return x
    return lax.ppermute(x, axes, [(device, (device + by) % size) for device in range(size)])
