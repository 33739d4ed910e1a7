"""Our kernels in every compiled configuration, whatever the plan would choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from benchmarks.peers.base import NotOffered

# Not at run time: `first_call.py` times the import of our library, and needs the peers before.
if TYPE_CHECKING:
    from jax_grouped_gemm._src.tile_config import TileConfig


def compiled(op: str) -> tuple[TileConfig, ...]:
    """The configurations of a primitive, by its name."""
    from jax_grouped_gemm._src import tile_config
    from jax_grouped_gemm._src.fp8 import plan as plan_fp8

    return {
        "ragged_noncontracting": tile_config.TILE_CONFIGS + tile_config.STREAM_K_TILE_CONFIGS,
        "ragged_contracting": tile_config.TILE_CONFIGS + tile_config.PINGPONG_TILE_CONFIGS,
        "scaled_ragged_noncontracting": plan_fp8.NONCONTRACTING_TILES + plan_fp8.STREAM_K_TILES,
        "scaled_ragged_contracting": plan_fp8.CONTRACTING_TILES,
    }[op]


def most(*ops: str) -> int:
    """The most configurations that any of these primitives has."""
    return max(len(compiled(op)) for op in ops)


def config(op: str, index: int) -> TileConfig:
    """One of the configurations of a primitive.

    Raises:
      NotOffered: if there are not so many.
    """
    configs = compiled(op)
    if index >= len(configs):
        raise NotOffered(f"{op} has {len(configs)} configurations")
    return configs[index]


def with_config(function: Callable[..., jax.Array], config: TileConfig) -> Callable[..., jax.Array]:
    """`function` with `config` for the products that it calls."""
    import jax_grouped_gemm as jgg

    def configured(*operands: jax.Array) -> jax.Array:
        with jgg.use_tiles(forward=config):
            return function(*operands)

    return configured
