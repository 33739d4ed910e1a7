"""Rows sent to the devices that have their experts, and back, by `jax.lax.ragged_all_to_all`.

Rows of a device are sorted by expert, and so are those that arrive, each expert's by source: there
is nothing to be sorted again. All offsets follow from one matrix, of how many rows each source has
for each expert, so that neither direction nor a derivative asks other devices for them.
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
"""XLA copies an update by one block of threads, which reaches a fraction of a link's speed."""


class Route(NamedTuple):
    """The rows that a device sends to each peer and gets from it: int32 [peers * updates] each."""

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


def exchange(
    rows: jax.Array, ways: Routes, axes: Axes, num_rows: int, all_arrive: bool
) -> jax.Array:
    """Rows [n, D] of this device -> those that arrive here, [num_rows, D].

    It is linear in the rows: its transpose sends the other way.

    Args:
      rows: what is sent.
      ways: the route of the rows, and that of their cotangents.
      axes: the mesh axes of the devices.
      num_rows: of the result.
      all_arrive: whether rows to which nothing is sent are never looked at; they are undefined
        then, and zero otherwise.
    """
    params: dict[str, Any] = dict(axes=axes, num_rows=num_rows, all_arrive=all_arrive)
    varying = varying_axes(rows, *ways.there) | frozenset(axes)
    operands = [vary_over(x, varying) for x in (rows, *ways.there, *ways.back)]
    # Traced here, where the mesh axes have their names; to lower it is to lower this.
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
        # Mapped over, rows or a buffer need a route that is, too. XLA folds what this adds.
        nothing = sum(jnp.sum(x[:1, :1] != x[:1, :1], dtype=jnp.int32) for x in (rows, buffer)) * 0
        route = (x + nothing for x in route)
        return lax.ragged_all_to_all(rows, buffer, *route, axis_name=axes)

    def elsewhere(rows, route):
        return _reference(rows, route, axes, num_rows)

    if is_mapped_over_mesh_axis():
        # Both branches would be programs within a program.
        return elsewhere(rows, there)
    return lax.platform_dependent(rows, there, cuda=on_gpu, default=elsewhere)


EXCHANGE = Primitive("exchange_rows")
EXCHANGE.def_impl(lambda *operands, program, **_: _run(program, *operands)[0])
EXCHANGE.def_abstract_eval(lambda *_, program, **params: program.out_avals[0])


def _run(program, *operands):
    from jax.extend.core import jaxpr_as_fun  # as slow to import as `op.py` says

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
    """The exchange by collectives that every platform has; zeros where nothing arrives."""
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
