"""One layer over the devices of a group, by either way of bringing tokens to their experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.arithmetic import at_least_float32
from jax_grouped_gemm._src.expert_parallel import collectives
from jax_grouped_gemm._src.expert_parallel.collectives import Combine
from jax_grouped_gemm._src.expert_parallel.experts import Experts, weights_of_rows
from jax_grouped_gemm._src.expert_parallel.group import Group
from jax_grouped_gemm._src.expert_parallel.pairs import LocalPairs, buffer_rows, local_pairs

Save = Literal["x", "rows", "nothing"]

# What a backward pass keeps that gathers tokens again.
_GATE_AND_UP = ("mlpwi_0", "mlpwi_1")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a layer is computed.

    Attributes:
      chunks: into how many parts the tokens of a device are divided.
      buffer_factor: see `expert_parallel_mlp`.
      combine: how partial results are added up.
      save: what the backward pass has of the tokens.
    """

    chunks: int
    buffer_factor: float | None
    combine: Combine
    save: Save


class Choices(NamedTuple):
    """The choices of tokens [T, k]."""

    experts: jax.Array
    weights: jax.Array


def run(
    x: jax.Array, choices: Choices, experts: Experts, group: Group, schedule: Schedule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens [T, D] of this device -> their results, rows wanted here and rows that were kept."""
    tokens, top_k = choices.experts.shape
    everyone = _gather_choices(choices, group)
    # [sources * T, k] -> [sources, chunks, T / chunks, k]
    parts = (group.num_sources, schedule.chunks, tokens // schedule.chunks, top_k)
    of_chunks = jax.tree.map(lambda c: c.reshape(parts), everyone)
    results = []
    for chunk, part in enumerate(jnp.split(x, schedule.chunks)):
        of_chunk = jax.tree.map(lambda c: c[:, chunk].reshape(-1, top_k), of_chunks)  # noqa: B023
        function = functools.partial(_gathered, group=group, schedule=schedule, experts=experts)
        results.append(function(part, of_chunk))
    ys, wanted, kept = zip(*results, strict=True)
    return jnp.concatenate(ys), sum(wanted), sum(kept)


def _gather_choices(choices: Choices, group: Group) -> Choices:
    """The choices of all sources, by one collective."""
    if not group.tokens:
        return choices
    # Integers up to 2^24 are floats exactly.
    top_k = choices.experts.shape[1]
    dtype = at_least_float32(choices.weights.dtype)
    experts = lax.stop_gradient(choices.experts.astype(dtype))
    both = jnp.concatenate([experts, choices.weights.astype(dtype)], axis=1)
    both = lax.all_gather(both, group.tokens, tiled=True)
    experts, weights = both[:, :top_k], both[:, top_k:]
    return Choices(lax.stop_gradient(experts).astype(jnp.int32), weights)


def _gathered(x, choices, *, group, schedule, experts):
    """Everybody's tokens come here, and partial results go back."""
    num_rows = buffer_rows(
        *choices.experts.shape, experts.count, group.num_slices, schedule.buffer_factor
    )
    pairs = local_pairs(
        choices.experts, _first_expert(group, experts), experts.count, num_rows, experts.of_rows
    )

    def layer(x, weights):
        everybody = collectives.gather(x, group, schedule.combine)
        weights = weights_of_rows(weights, pairs)
        if schedule.save == "rows":
            rows = experts.on_rows(experts.copy(everybody, pairs), pairs, weights)
        else:
            rows = experts.on_tokens(everybody, pairs, weights)
        partial_sums = experts.add_up(checkpoint_name(rows, "mlpwo"), pairs)
        return collectives.scatter(partial_sums, group, schedule.combine)

    if schedule.save == "nothing":
        policy = jax.checkpoint_policies.save_only_these_names(*_GATE_AND_UP)
        layer = jax.checkpoint(layer, policy=policy)
    y = layer(x, choices.weights)
    return y, pairs.wanted, pairs.count[0]


def _first_expert(group: Group, experts: Experts) -> jax.Array:
    return group.slice_index() * experts.count
