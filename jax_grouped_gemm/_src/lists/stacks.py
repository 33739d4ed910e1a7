"""Operands of primitives that are lists with a stack for each problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def split(operands: Sequence[Any], count: int, present: Sequence[bool]) -> list[list[Any]]:
    """Flat operands as lists of `count`; of those that are not present, a list of None."""
    lists, start = [], 0
    for is_present in present:
        end = start + count * is_present
        lists.append(list(operands[start:end]) if is_present else [None] * count)
        start = end
    return lists


def mapped_size(factors: Sequence[Any], dims: Sequence[int | None]) -> int | None:
    """Size of the axis over which vmap maps the factors of one problem, None if it does not."""
    for x, dim in zip(factors, dims, strict=True):
        if x is not None and dim is not None:
            return x.shape[dim]
    return None


def fold(x: jax.Array | None, dim: int | None, size: int | None) -> jax.Array | None:
    """A stack with its mapped axis made part of it; broadcast where it is not mapped."""
    if x is None or size is None:
        return x
    x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def unfold(out: jax.Array, size: int | None) -> jax.Array:
    """A folded result with its mapped axis in front."""
    return out if size is None else out.reshape(size, out.shape[0] // size, *out.shape[1:])
