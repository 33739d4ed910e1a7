"""Rows sent to the devices that have their experts, and back, by `jax.lax.ragged_all_to_all`.

Rows of a device are sorted by expert, and so are those that arrive, each expert's by source: there
is nothing to be sorted again. All offsets follow from one matrix, of how many rows each source has
for each expert, so that neither direction nor a derivative asks other devices for them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import cdiv, vary_over, varying_axes
from jax_grouped_gemm._src.autodiff import is_mapped_over_mesh_axis
from jax_grouped_gemm._src.expert_parallel.group import Axes

LEAST_UPDATES = 32
"""XLA copies an update by one block of threads, which reaches a fraction of a link's speed."""


class Route(NamedTuple):
    """What this device sends to each peer and gets from it: int32 [peers * updates] each."""

    input_offsets: jax.Array  # of each update, in the rows to be sent
    send_sizes: jax.Array
    output_offsets: jax.Array  # of each update, in the rows of the peer
    recv_sizes: jax.Array


class Routes(NamedTuple):
    """Both directions; each is the transpose of the other."""

    there: Route
    back: Route


def routes(counts: jax.Array, device: jax.Array, num_rows: int) -> Routes:
    """The way of rows to their experts and back.

    Args:
      counts: int32 [devices, E], how many rows each device has for each expert.
      device: int32 scalar, which of them this is.
      num_rows: what a device has room for; rows past that are not sent.
    """
    devices, num_experts = counts.shape
    here = num_experts // devices
    starts = _exclusive_cumsum(counts, axis=1)  # in the rows of a source
    arriving = counts.T.reshape(devices, here * devices)  # at each device: by expert, then source
    arrivals = _exclusive_cumsum(arriving, axis=1).reshape(num_experts, devices).T
    kept = jnp.clip(num_rows - arrivals, 0, counts)

    def mine(matrix):
        return lax.dynamic_slice_in_dim(matrix, device * here, here, axis=1)

    def of(matrix):
        return lax.dynamic_index_in_dim(matrix, device, axis=0, keepdims=False)

    pieces = cdiv(LEAST_UPDATES, here)
    there = _cut(of(starts), of(kept), of(arrivals), mine(kept).reshape(-1), pieces)
    back = _cut(mine(arrivals), mine(kept), mine(starts), of(kept), pieces)
    return Routes(there, back)


def count_matrix(experts: jax.Array, num_experts: int) -> jax.Array:
    """Choices [devices, n] -> int32 [devices, E], how many each device has for each expert."""
    names = jnp.arange(num_experts, dtype=experts.dtype)
    return jnp.sum(experts[:, :, None] == names[None, None], axis=1, dtype=jnp.int32)


def _exclusive_cumsum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


def _cut(starts, sizes, ends_at, received, pieces) -> Route:
    """Each update as so many smaller ones."""

    def offsets(x):
        return (x.reshape(-1, 1) + begins(sizes)).reshape(-1)

    piece = jnp.arange(pieces, dtype=jnp.int32)[None]

    def begins(sizes):
        return sizes.reshape(-1, 1) * piece // pieces

    def parts(sizes):
        ends = sizes.reshape(-1, 1) * (piece + 1) // pieces
        return (ends - begins(sizes)).reshape(-1)

    return Route(offsets(starts), parts(sizes), offsets(ends_at), parts(received))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def exchange(
    rows: jax.Array, ways: Routes, axes: Axes, num_rows: int, all_arrive: bool
) -> jax.Array:
    """Rows [n, D] of this device -> those that arrive here, [num_rows, D].

    Args:
      rows: what is sent.
      ways: the route of the rows, and that of their cotangents.
      axes: the mesh axes of the devices.
      num_rows: of the result.
      all_arrive: whether rows to which nothing is sent are never looked at; they are undefined
        then, and zero otherwise.
    """
    like = jax.ShapeDtypeStruct((num_rows, rows.shape[1]), rows.dtype)
    varying = varying_axes(rows, *ways.there) | frozenset(axes)

    def on_gpu(rows, route):
        empty = lax.empty if all_arrive else jnp.zeros
        # Its type is that of the result.
        buffer = vary_over(empty(like.shape, like.dtype), varying)
        # Mapped over, rows or a buffer need a route that is, too. XLA folds what this adds.
        nothing = sum(jnp.sum(x[:1, :1] != x[:1, :1], dtype=jnp.int32) for x in (rows, buffer)) * 0
        route = (x + nothing for x in route)
        return lax.ragged_all_to_all(rows, buffer, *route, axis_name=axes)

    def elsewhere(rows, route):
        return _reference(rows, route, axes, num_rows)

    rows, *route = (vary_over(x, varying) for x in (rows, *ways.there))
    if is_mapped_over_mesh_axis():
        # Both branches would be programs within a program.
        return elsewhere(rows, route)
    return lax.platform_dependent(rows, tuple(route), cuda=on_gpu, default=elsewhere)


def _exchange_forward(rows, ways, axes, num_rows, all_arrive):
    return exchange(rows, ways, axes, num_rows, all_arrive), (ways, rows.shape[0])


def _exchange_backward(axes, num_rows, all_arrive, kept, ct):
    (there, back), sent = kept
    return exchange(ct, Routes(back, there), axes, sent, all_arrive), None


exchange.defvjp(_exchange_forward, _exchange_backward)


def _reference(rows: jax.Array, route: tuple, axes: Axes, num_rows: int) -> jax.Array:
    """The same by collectives that every platform has; zeros where nothing arrives."""
    everyone = lax.all_gather(rows, axes)
    offsets = lax.all_gather(jnp.stack(route[:3]), axes)
    devices = offsets.shape[0]
    offsets = offsets.reshape(devices, 3, devices, -1)
    to_here = lax.dynamic_index_in_dim(offsets, lax.axis_index(axes), axis=2, keepdims=False)
    begins, sizes, places = jnp.moveaxis(to_here, 1, 0)  # [devices, updates] each
    at = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
    begins, sizes, places = begins[None], sizes[None], places[None]
    arrives = (at >= places) & (at < places + sizes)
    source = jnp.sum(jnp.where(arrives, jnp.arange(devices)[None, :, None], 0), axis=(1, 2))
    row = jnp.sum(jnp.where(arrives, begins + at - places, 0), axis=(1, 2))
    return jnp.where(jnp.any(arrives, axis=(1, 2))[:, None], everyone[source, row], 0)
