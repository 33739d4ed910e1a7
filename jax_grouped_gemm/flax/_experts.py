"""What both layers do with their experts, on one device or over a mesh."""

from __future__ import annotations

from typing import Any

import jax

from jax_grouped_gemm import moe

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
