"""Arrays whose rows the kernels can address."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pads the last dimensions of `x` with zeros up to `shape`."""
    batch_rank = x.ndim - len(shape)
    growth = [new - old for new, old in zip(shape, x.shape[batch_rank:], strict=True)]
    config = [(0, 0, 0)] * batch_rank + [(0, g, 0) for g in growth]
    return lax.pad(x, jnp.zeros((), x.dtype), config)
