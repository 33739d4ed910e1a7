"""Group sizes and offsets on a device that has a slice of the rows, or of the groups' matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.partition import Split
from jax_grouped_gemm._src.ragged.reference import ends_of_groups


def of_groups(
    operands: Sequence[jax.Array], params: dict[str, Any], split: Split
) -> tuple[Sequence[jax.Array], dict[str, Any]]:
    """Returns a device's operands and parameters of a product; group sizes and offset come last.

    If m is split, the local size of a group is the number of its rows in the slice. If g is split,
    the offset grows by the index of the slice's first group.
    """
    *others, sizes, offset = operands
    if split.splits("m"):
        sizes = sizes_in_slice(sizes, split)
    if split.splits("g"):
        offset = offset + split.first("g")
        params = dict(params)
        if "num_groups" in params:
            params["num_groups"] = split.part("g")
        if "zeroes_unowned" in params:
            # Rows of other devices' groups must be zero, because devices add up their results.
            params["zeroes_unowned"] = True
    return (*others, sizes, offset), params


def of_accumulator(
    operands: Sequence[jax.Array], params: dict[str, Any], split: Split
) -> tuple[Sequence[jax.Array], dict[str, Any]]:
    """Returns a device's operands and parameters of an accumulating product.

    If m is split, devices add up their results, so only the first one adds the accumulator.
    """
    (accumulator, *others), params = of_groups(operands, params, split)
    if split.splits("m"):
        accumulator = jnp.where(split.first("m") == 0, accumulator, 0)
    return (accumulator, *others), params


def sizes_in_slice(sizes: jax.Array, split: Split) -> jax.Array:
    """Returns the number of rows of each group [.., G] in this device's slice of the rows."""
    first, rows = split.first("m"), split.part("m")
    ends = ends_of_groups(sizes, split.sizes["m"])
    ends = jnp.clip(ends, first, first + rows)
    start = jnp.broadcast_to(first, (*ends.shape[:-1], 1)).astype(ends.dtype)
    return jnp.diff(ends, axis=-1, prepend=start)
