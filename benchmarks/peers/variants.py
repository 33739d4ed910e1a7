"""Our kernels in every compiled configuration, whatever the plan would choose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import jax

from benchmarks.peers.base import NotOffered

# Not at run time: `first_call.py` times the import of our library, and needs the peers before.
if TYPE_CHECKING:
    from jax_grouped_gemm.plan import TileConfig


def compiled(op: str) -> tuple[TileConfig, ...]:
    """The configurations of a primitive, by its name: all that were compiled.

    The extension knows them; without it, they are those that a plan can choose from.
    """
    from jax_grouped_gemm import plan, plan_fp8

    try:
        from jax_grouped_gemm import _extension
    except ImportError:
        return {
            "ragged_noncontracting": plan.TILE_CONFIGS,
            "ragged_contracting": plan.TILE_CONFIGS,
            "scaled_ragged_noncontracting": plan_fp8.NONCONTRACTING_TILES,
            "scaled_ragged_contracting": plan_fp8.CONTRACTING_TILES,
        }[op]
    return listed(op, _extension.kernel_configs(), plan.TileConfig)


def listed(op: str, configs: Iterable[Mapping], kind: type) -> tuple[TileConfig, ...]:
    """The configurations of a primitive among all that the extension lists, as `kind`."""
    # Kernels with another schedule of the same product have its name and a suffix.
    added = {op: {}, f"{op}_stream_k": {"stream_k": True}}
    names = [field.name for field in dataclasses.fields(kind)]
    return tuple(
        kind(**{name: config[name] for name in names if name in config}, **added[config["op"]])
        for config in configs
        if config["op"] in added
    )


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
    """`function` with `config` for the products that it calls.

    Raises:
      NotOffered: if the library cannot be told which one to take.
    """
    import jax_grouped_gemm as jgg

    if not hasattr(jgg, "use_tiles"):
        raise NotOffered("this version of jax_grouped_gemm chooses its configurations alone")

    def configured(*operands: jax.Array) -> jax.Array:
        with jgg.use_tiles(forward=config):
            return function(*operands)

    return configured
