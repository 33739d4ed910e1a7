"""How evenly a layer's rows fell on the devices that share its experts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import register_namedtuple_serialization

from jax_grouped_gemm._src.expert_parallel.group import Group


class ExpertParallelStats(NamedTuple):
    """Counts of one call. All devices along the layer's mesh axes have the same counts."""

    rows_per_device: jax.Array  # [slices] int32, (token, choice) pairs of each slice of the experts
    max_over_mean: jax.Array  # float32, largest of `rows_per_device` over the mean; 1 if balanced
    overflow: jax.Array  # int32, pairs that were dropped because `buffer_factor` left no room


register_namedtuple_serialization(
    ExpertParallelStats, serialized_name="jax_grouped_gemm.moe.ExpertParallelStats"
)


def group_stats(wanted: jax.Array, kept: jax.Array, group: Group) -> ExpertParallelStats:
    """Returns statistics from the number of rows for this device's experts, and of rows kept."""
    here = jnp.arange(group.num_slices, dtype=jnp.int32) == group.slice_index()
    # Devices that share the hidden features of the same experts count the same pairs.
    here &= group.tensor_index() == 0
    both = jnp.stack([wanted, wanted - kept])
    rows, dropped = lax.psum(jnp.where(here[None], both[:, None], 0), group.every)
    most, mean = jnp.max(rows), jnp.sum(rows) / group.num_slices
    ratio = jnp.where(mean > 0, most / jnp.maximum(mean, 1e-9), 1)
    return ExpertParallelStats(rows, ratio.astype(jnp.float32), jnp.sum(dropped))
