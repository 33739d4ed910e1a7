"""Groups of a device with a slice of the rows, or of the groups' matrices."""

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
    """Localises a ragged product whose last operands are group sizes and offset.

    Slices of rows m: the local size of a group is the number of its rows in the slice. Rows of the
    slice begin with its first group, so it needs no offset. Slices of groups g: the window of
    groups begins later.
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
            # Rows of other devices' groups are terms of a sum.
            params["zeroes_unowned"] = True
    return (*others, sizes, offset), params


def of_accumulator(
    operands: Sequence[jax.Array], params: dict[str, Any], split: Split
) -> tuple[Sequence[jax.Array], dict[str, Any]]:
    """Localises an accumulating product; the sum over devices adds the accumulator once."""
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
