"""What both layers do with their experts, on one device or over a mesh."""

from __future__ import annotations

from typing import Any

import jax

from jax_grouped_gemm import moe
from jax_grouped_gemm._src.arguments import checked_int

OF_MESH = (
    "expert_axis",
    "fsdp_axis",
    "tensor_axis",
    "strategy",
    "chunks",
    "buffer_factor",
    "overlap",
    "save",
)


def check_sizes(**sizes: int) -> None:
    """Raises a `TypeError` or `ValueError` unless all sizes of a layer are positive integers."""
    for name, size in sizes.items():
        if checked_int(f"MoE: {name}", size) < 1:
            raise ValueError(f"MoE: {name} must be positive, got {size}")


# Functions of this module, since what `lecun_normal` returns cannot be pickled.
def default_kernel_init(*args: Any, **options: Any) -> jax.Array:
    """LeCun's normal distribution for each expert's matrix."""
    return jax.nn.initializers.lecun_normal(batch_axis=(0,))(*args, **options)


def default_gate_init(*args: Any, **options: Any) -> jax.Array:
    """LeCun's normal distribution for the router."""
    return jax.nn.initializers.lecun_normal()(*args, **options)


def apply_experts(
    layer: Any, x: jax.Array, routing: moe.Routing, *matrices: jax.Array, quantized: Any = None
) -> tuple[jax.Array, moe.ExpertParallelStats | None]:
    """`moe.dropless_mlp` with the options of a layer, or over its mesh if it has an expert axis."""
    names = ("activation", "precision", "implementation", "recipe")
    options = {name: getattr(layer, name) for name in names}
    if layer.expert_axis is None:
        if layer.mesh is not None or layer.fsdp_axis is not None or layer.tensor_axis is not None:
            raise ValueError("MoE: mesh, fsdp_axis and tensor_axis need an expert_axis")
        return moe.dropless_mlp(x, routing, *matrices, quantized=quantized, **options), None
    if quantized is not None:
        raise ValueError(
            "MoE: weights quantised in advance are for one device, without expert_axis"
        )
    of_mesh = {name: getattr(layer, name) for name in OF_MESH}
    return moe.expert_parallel(layer.mesh, **of_mesh, **options)(x, routing, *matrices)
