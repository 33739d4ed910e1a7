"""Abstract results of primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec


def unsharded_aval(
    primitive: Primitive, operands: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    """Abstract result of `shape` and `dtype` that varies over the operands' manual mesh axes.

    Raises:
      NotImplementedError: an operand is sharded over explicit mesh axes.
    """
    for x in operands:
        if any(axes is not None for axes in x.sharding.spec):
            raise NotImplementedError(
                f"{primitive} infers no sharding over explicit mesh axes, got an operand of "
                f"type {x}; call it inside jax.shard_map or use a mesh with auto axes."
            )
    on_mesh = next((x for x in operands if not x.sharding.mesh.empty), operands[0])
    sharding = NamedSharding(on_mesh.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return on_mesh.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
