"""Sends rows to the devices that have their experts, and back, by `jax.lax.ragged_all_to_all`.

Rows of a device are sorted by expert. Arriving rows are sorted by expert, and then by source, so
they need no other sort. All offsets follow from one matrix, the number of rows of each source for
each expert, so that neither direction nor a derivative asks other devices for offsets.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from jax_grouped_gemm._src.arrays import cdiv, vary_over, varying_axes
from jax_grouped_gemm._src.autodiff import is_mapped_over_mesh_axis, is_zero, tangent_of
from jax_grouped_gemm._src.expert_parallel.group import Axes
from jax_grouped_gemm._src.op import Primitive

LEAST_UPDATES = 32
"""The least number of updates (runs of rows) for each peer. XLA copies an update with one thread
block, which is far slower than the link, so each peer gets several updates."""


class Route(NamedTuple):
    """The rows that a device sends to and gets from each peer. Fields: int32 [peers * updates]."""

    input_offsets: jax.Array  # where each update begins in the rows to be sent
    send_sizes: jax.Array
    output_offsets: jax.Array  # where each update begins in the rows of the peer
    recv_sizes: jax.Array


class Routes(NamedTuple):
    """The routes of rows to their experts and back. `back` is the transpose of `there`."""

    there: Route
    back: Route


def routes(counts: jax.Array, device: jax.Array, num_rows: int) -> Routes:
    """Returns the routes of rows to their experts and back.

    Args:
      counts: int32 [devices, E], rows of each device for each expert.
      device: int32 scalar, index of this device.
      num_rows: the number of rows that a device has room for. Further rows are not sent.
    """
    devices, num_experts = counts.shape
    here = num_experts // devices
    starts = _exclusive_cumsum(counts, axis=1)  # where experts begin in a source's rows
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
    """Counts how often each device chooses each expert: [devices, n] -> int32 [devices, E]."""
    names = jnp.arange(num_experts, dtype=experts.dtype)
    return jnp.sum(experts[:, :, None] == names[None, None], axis=1, dtype=jnp.int32)


def _exclusive_cumsum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis, dtype=x.dtype) - x


def _cut(starts, sizes, ends_at, received, pieces) -> Route:
    """Cuts each update into `pieces` smaller updates."""

    def offsets(x):
        return (x.reshape(-1, 1) + begins(sizes)).reshape(-1)

    piece = jnp.arange(pieces, dtype=jnp.int32)[None]

    def begins(sizes):
        return sizes.reshape(-1, 1) * piece // pieces

    def parts(sizes):
        ends = sizes.reshape(-1, 1) * (piece + 1) // pieces
        return (ends - begins(sizes)).reshape(-1)

    return Route(offsets(starts), parts(sizes), offsets(ends_at), parts(received))


def exchange(
    rows: jax.Array, ways: Routes, axes: Axes, num_rows: int, all_arrive: bool
) -> jax.Array:
    """Sends rows [n, D] of this device, and returns the arriving rows [num_rows, D].

    The exchange is linear in the rows, and its transpose sends cotangents the other way.

    Args:
      rows: rows to send.
      ways: the route of the rows, and the route of their cotangents.
      axes: the mesh axes of the devices.
      num_rows: rows of the result.
      all_arrive: whether callers read only rows that arrive. If True, the remaining rows of the
        result are undefined. If False, they are zero.
    """
    params: dict[str, Any] = dict(axes=axes, num_rows=num_rows, all_arrive=all_arrive)
    varying = varying_axes(rows, *ways.there) | frozenset(axes)
    operands = [vary_over(x, varying) for x in (rows, *ways.there, *ways.back)]
    # Trace the exchange here, where the mesh axes have their names, and lower this program later.
    program = jax.make_jaxpr(functools.partial(_send, **params))(*operands)
    return EXCHANGE.bind(*operands, program=program, **params)


def _send(rows, *routes, axes: Axes, num_rows: int, all_arrive: bool) -> jax.Array:
    varying = varying_axes(rows)
    like = jax.ShapeDtypeStruct((num_rows, rows.shape[1]), rows.dtype)
    there = routes[:4]

    def on_gpu(rows, route):
        empty = lax.empty if all_arrive else jnp.zeros
        # The buffer has the type of the result.
        buffer = vary_over(empty(like.shape, like.dtype), varying)
        # Under `vmap`, mapped rows need a mapped route, so add a mapped zero. XLA removes the sum.
        nothing = sum(jnp.sum(x[:1, :1] != x[:1, :1], dtype=jnp.int32) for x in (rows, buffer)) * 0
        route = (x + nothing for x in route)
        return lax.ragged_all_to_all(rows, buffer, *route, axis_name=axes)

    def elsewhere(rows, route):
        return _reference(rows, route, axes, num_rows)

    if is_mapped_over_mesh_axis():
        # `vmap` over a mesh axis cannot map the nested programs that a choice by platform has.
        return elsewhere(rows, there)
    return lax.platform_dependent(rows, there, cuda=on_gpu, default=elsewhere)


EXCHANGE = Primitive("exchange_rows")
EXCHANGE.def_impl(lambda *operands, program, **_: _run(program, *operands)[0])
EXCHANGE.def_abstract_eval(lambda *_, program, **params: program.out_avals[0])


def _run(program, *operands):
    from jax.extend.core import jaxpr_as_fun  # slow to import, see `op.py`

    return jaxpr_as_fun(program)(*operands)


def _lower(ctx, *operands, program, **_):
    return mlir.lower_fun(functools.partial(_run, program))(ctx, *operands)


def _jvp(primals, tangents, *, program, **params):
    rows, *routes = primals
    ways = Routes(Route(*routes[:4]), Route(*routes[4:]))
    out = exchange(rows, ways, **params)
    if is_zero(tangents[0]):
        return out, tangent_of(out, [])
    return out, exchange(tangents[0], ways, **params)


def _transpose(ct, rows, *routes, program, axes, num_rows, all_arrive):
    if is_zero(ct):
        return [None] * 9
    back = Routes(Route(*routes[4:]), Route(*routes[:4]))
    return [exchange(ct, back, axes, rows.aval.shape[0], all_arrive), *[None] * 8]


def _batch(operands, dims, *, program, **params):
    return jax.vmap(functools.partial(_send, **params), dims)(*operands), 0


mlir.register_lowering(EXCHANGE, _lower)
ad.primitive_jvps[EXCHANGE] = _jvp
ad.primitive_transposes[EXCHANGE] = _transpose
batching.primitive_batchers[EXCHANGE] = _batch


def _reference(rows: jax.Array, route: tuple, axes: Axes, num_rows: int) -> jax.Array:
    """Exchanges rows by collectives that every platform has; rows that nobody sends are zero."""
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
