"""Computes a layer over the devices of a group, by either strategy."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.autodiff import recomputed
from jax_grouped_gemm._src.barrier import barrier
from jax_grouped_gemm._src.expert_parallel import collectives, exchange
from jax_grouped_gemm._src.expert_parallel.experts import LocalExperts, weights_of_rows
from jax_grouped_gemm._src.expert_parallel.group import Group
from jax_grouped_gemm._src.expert_parallel.options import Combine, Save, Strategy
from jax_grouped_gemm._src.expert_parallel.pairs import LocalPairs, buffer_rows, local_pairs


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a layer is computed.

    Attributes:
      strategy: how tokens come to their experts.
      chunks: number of parts into which the tokens of a device are divided.
      buffer_factor: see `expert_parallel_mlp`.
      combine: how partial results are added up.
      save: the form of the tokens that is kept for the backward pass.
      overlap: whether collectives run at the same time as products.
    """

    strategy: Strategy
    chunks: int
    buffer_factor: float | None
    combine: Combine
    save: Save
    overlap: bool


class Choices(NamedTuple):
    """The experts that tokens chose, and the router's weights: [T, k] each."""

    experts: jax.Array
    weights: jax.Array


def run(
    x: jax.Array, choices: Choices, experts: LocalExperts, group: Group, schedule: Schedule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the results [T, D] of this device's tokens, the number of rows for its experts, and
    the number of these rows that the buffers kept."""
    tokens, top_k = choices.experts.shape
    everyone = _gather_choices(choices, group, schedule)
    # [sources * T, k] -> [sources, chunks, T / chunks, k]
    parts = (group.num_sources, schedule.chunks, tokens // schedule.chunks, top_k)
    of_chunks = jax.tree.map(lambda c: c.reshape(parts), everyone)
    of_chunk = _gathered if schedule.strategy == "all_gather" else _exchanged
    results: list[Any] = []
    for chunk, part in enumerate(jnp.split(x, schedule.chunks)):
        of_part = jax.tree.map(lambda c: c[:, chunk].reshape(-1, top_k), of_chunks)  # noqa: B023
        if results:
            part, of_part, experts, results[-1] = _after(results[-1], part, of_part, experts)
        *result, experts = of_chunk(part, of_part, experts, group, schedule)
        results.append(result)
    ys, wanted, kept = zip(*results, strict=True)
    return jnp.concatenate(ys), sum(wanted), sum(kept)


def _after(result, x, choices: Choices, experts: LocalExperts):
    """Returns a chunk's operands, which wait for the previous chunk's `result`, and that result.

    The barrier bounds memory: buffers exist for one chunk at a time. In the backward pass, a chunk
    begins after the next chunk's gradients of matrices are added to the sum over chunks.
    """
    y, *counts = result
    x, choices, matrices, y = barrier((x, choices, experts.weights, y))
    return x, choices, dataclasses.replace(experts, weights=matrices), (y, *counts)


def _gather_choices(choices: Choices, group: Group, schedule: Schedule) -> Choices:
    """Returns the choices of all sources, in the order of the gathered tokens."""
    if not group.tokens:
        return choices
    # One collective sends both, because float32 holds integers up to 2^24 exactly.
    top_k = choices.experts.shape[1]
    dtype = at_least_float32(choices.weights.dtype)
    experts = lax.stop_gradient(choices.experts.astype(dtype))
    both = jnp.concatenate([experts, choices.weights.astype(dtype)], axis=1)
    if schedule.strategy == "all_gather" and schedule.combine == "ppermute":
        both = collectives.gather(both, group, "ppermute")
    else:
        both = lax.all_gather(both, group.tokens, tiled=True)
    experts, weights = both[:, :top_k], both[:, top_k:]
    return Choices(lax.stop_gradient(experts).astype(jnp.int32), weights)


def _local_pairs(choices, experts, group, schedule) -> LocalPairs:
    tokens, top_k = choices.experts.shape
    num_rows = buffer_rows(
        tokens, top_k, experts.weights.count, group.num_slices, schedule.buffer_factor
    )
    first = group.slice_index() * experts.weights.count
    return local_pairs(choices.experts, first, experts.weights.count, num_rows, experts.of_rows)


def _gathered(x, choices, experts, group, schedule):
    """Gathers the tokens of all devices, and sends partial results back.

    Returns y, the numbers of wanted and of kept rows, and the experts for the next chunk.
    """
    pairs = _local_pairs(choices, experts, group, schedule)

    def layer(x, weights, experts=experts):
        everybody = collectives.gather(x, group, schedule.combine)
        everybody, weights, experts = _together(everybody, weights, experts, schedule)
        weights = weights_of_rows(weights, pairs)
        if schedule.save == "rows":
            rows = experts.on_rows(experts.copy(everybody, pairs), weights, pairs.groups)
        elif experts.combines:
            # With ppermutes, the sums for each device leave as soon as they are ready.
            sources = len(everybody) // len(x) if schedule.combine == "ppermute" else 1
            y = experts.sums_on_tokens(everybody, pairs, weights, sources)
            y = checkpoint_name(y, "mlpwo")
            return collectives.scatter(y, group, schedule.combine), experts.weights
        else:
            rows = experts.on_tokens(everybody, pairs, weights)
        rows = checkpoint_name(rows, "mlpwo")
        return _returned(rows, pairs, experts, group, schedule.combine), experts.weights

    y, matrices = _keeping(schedule, layer)(x, choices.weights)
    experts = dataclasses.replace(experts, weights=matrices)
    return y, pairs.wanted, pairs.valid_rows[0], experts


def _returned(
    rows: jax.Array, pairs: LocalPairs, experts: LocalExperts, group: Group, combine: Combine
) -> jax.Array:
    """Returns the sums of each token's rows, on the device that has the token."""

    def at_once(rows, pairs):
        return collectives.scatter(experts.add_up(rows, pairs), group, combine)

    if combine != "ppermute" or not group.tokens:
        return at_once(rows, pairs)

    num_rows = pairs.num_rows

    @jax.custom_jvp
    def one_by_one(rows, order, inverse, sizes, valid_rows, wanted):
        pairs = LocalPairs(order, inverse, sizes, valid_rows, wanted, num_rows)

        def sums(inverse):
            return experts.add_up(rows, pairs._replace(inverse=inverse))

        y = collectives.made_and_scattered(sums, inverse, group.tokens)
        return lax.psum(y, group.summed) if group.summed else y

    @one_by_one.defjvp
    def _(primals, tangents):
        # Differentiate `at_once`, because its transpose copies all tokens to rows at once. The
        # transpose of `one_by_one` would add up an array of rows for each device.
        _, order, inverse, sizes, valid_rows, wanted = primals
        pairs = LocalPairs(order, inverse, sizes, valid_rows, wanted, num_rows)
        return one_by_one(*primals), at_once(tangents[0], pairs)

    indices = pairs.order, pairs.inverse, pairs.group_sizes, pairs.valid_rows, pairs.wanted
    return one_by_one(rows, *indices)


def _exchanged(x, choices, experts, group, schedule):
    """Sends rows to their experts and back, and adds them up on the token's device.

    The arriving rows are those that `_gathered` would copy, in the same order.
    """
    pairs = _local_pairs(choices, experts, group, schedule)
    num_experts = experts.weights.count * group.num_slices
    of_devices = choices.experts.reshape(group.num_slices, -1)
    counts = exchange.count_matrix(of_devices, num_experts)
    device = group.slice_index()
    ways = exchange.routes(counts, device, pairs.num_rows)
    mine = lax.dynamic_index_in_dim(of_devices, device, keepdims=False)
    mine = mine.reshape(len(x), -1)
    # Here every pair has a row, even if the device of its expert has no room for it.
    own = local_pairs(mine, jnp.int32(0), num_experts, mine.size, experts.of_rows)
    all_arrive = schedule.buffer_factor is None and not experts.reads_every_row

    def layer(x, weights, experts=experts):
        rows = experts.copy(x, own)
        rows = exchange.exchange(rows, ways, group.experts, pairs.num_rows, all_arrive)
        rows, weights, experts = _together(rows, weights, experts, schedule)
        rows = experts.on_rows(rows, weights_of_rows(weights, pairs), pairs.groups)
        back = exchange.Routes(ways.back, ways.there)
        rows = checkpoint_name(rows, "mlpwo")
        rows = exchange.exchange(rows, back, group.experts, mine.size, all_arrive)
        y = experts.add_up(rows, own)
        return lax.psum(y, group.summed) if group.summed else y

    y = _keeping(schedule, layer)(x, choices.weights)
    return y, pairs.wanted, pairs.valid_rows[0], experts


def _together(
    rows: jax.Array, weights: jax.Array, experts: LocalExperts, schedule: Schedule
) -> tuple[jax.Array, jax.Array, LocalExperts]:
    """Returns `rows`, `weights` and `experts`, with barriers that order their gradients.

    Without `overlap`, no gradient travels before all are computed, because its collective would
    wait for other devices on multiprocessors that a product needs. With several chunks, the
    collective waits for the gradient of wo only. This gradient is then added to the sum over
    chunks, so that the gradient of the next matrix can use its memory.
    """
    if schedule.overlap:
        return rows, weights, experts
    if schedule.chunks > 1:
        rows, wo = barrier((rows, experts.weights.wo))
        matrices = dataclasses.replace(experts.weights, wo=wo)
    else:
        rows, weights, matrices = barrier((rows, weights, experts.weights))
    return rows, weights, dataclasses.replace(experts, weights=matrices)


def _keeping(schedule, layer):
    """Returns `layer`, which the backward pass computes again if `save` is "nothing"."""
    return recomputed(layer) if schedule.save == "nothing" else layer
