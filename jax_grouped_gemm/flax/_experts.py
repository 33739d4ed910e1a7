"""What both layers do with their experts, on one device or over a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.arguments import checked_implementation, checked_int
from jax_grouped_gemm._src.fp8.api import QuantizedWeights
from jax_grouped_gemm._src.fp8.recipe import checked_recipe
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp

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


def check_options(layer: Any, embed: int | None = None) -> None:
    """Raises what a call would, where the options of a layer cannot work for any input."""
    if layer.top_k > layer.num_experts:
        raise ValueError(
            f"MoE: top_k must be at most num_experts = {layer.num_experts}, got {layer.top_k}"
        )
    as_activation(layer.activation)
    if not callable(layer.implementation):
        checked_implementation(layer.implementation)
    if layer.recipe is not None:
        checked_recipe(layer.recipe)
        if callable(layer.implementation) or layer.precision is not None:
            raise ValueError(
                "MoE: recipe decides how the matmuls are computed, so that precision must be None "
                f"and implementation no function, got precision={layer.precision!r} and "
                f"implementation={layer.implementation!r}"
            )
    if layer.expert_axis is None:
        if layer.mesh is not None or layer.fsdp_axis is not None or layer.tensor_axis is not None:
            raise ValueError("MoE: mesh, fsdp_axis and tensor_axis need an expert_axis")
    elif layer.mesh is not None:
        moe.expert_parallel(layer.mesh, **{name: getattr(layer, name) for name in OF_MESH})
        sizes = dict(expert_axis=("num_experts", layer.num_experts))
        sizes |= dict(tensor_axis=("hidden_features", layer.hidden_features))
        if embed is not None:
            sizes |= dict(fsdp_axis=("in_features", embed))
        for axis, (name, size) in sizes.items():
            names = getattr(layer, axis)
            names = (names,) if isinstance(names, str) else names or ()
            devices = math.prod(layer.mesh.shape[name] for name in names)
            if size % devices:
                raise ValueError(
                    f"MoE: {name} must be a multiple of the {devices} devices along {axis}, got "
                    f"{size}"
                )


def takes_quantized(layer: Any) -> bool:
    """Whether a layer multiplies by weights that are quantised in advance."""
    recipe = layer.recipe
    both = recipe is not None and (recipe.forward, recipe.dgrad) == ("fp8", "fp8")
    return both and layer.expert_axis is None


# Functions of this module, since what `lecun_normal` returns cannot be pickled.
def default_kernel_init(*args: Any, **options: Any) -> jax.Array:
    """LeCun's normal distribution for each expert's matrix."""
    return jax.nn.initializers.lecun_normal(batch_axis=(0,))(*args, **options)


def default_gate_init(*args: Any, **options: Any) -> jax.Array:
    """LeCun's normal distribution for the router."""
    return jax.nn.initializers.lecun_normal()(*args, **options)


def as_dict(quantized: QuantizedMlp) -> dict[str, dict[str, jax.Array]]:
    """Quantised weights as nested dictionaries, which checkpoints restore as they were."""
    return {matrix: forms._asdict() for matrix, forms in quantized._asdict().items()}


def from_dict(arrays: Mapping[str, Mapping[str, jax.Array]]) -> QuantizedMlp:
    """The inverse of `as_dict`."""
    return QuantizedMlp(**{name: QuantizedWeights(**forms) for name, forms in arrays.items()})


def apply_experts(
    layer: Any, x: jax.Array, routing: moe.Routing, *matrices: jax.Array, quantized: Any = None
) -> tuple[jax.Array, moe.ExpertParallelStats | None]:
    """`moe.dropless_mlp` with the options of a layer, or over its mesh if it has an expert axis."""
    names = ("activation", "precision", "implementation", "recipe")
    options = {name: getattr(layer, name) for name in names}
    if not takes_quantized(layer):
        quantized = None
    if layer.expert_axis is None:
        return moe.dropless_mlp(x, routing, *matrices, quantized=quantized, **options), None
    of_mesh = {name: getattr(layer, name) for name in OF_MESH}
    return moe.expert_parallel(layer.mesh, **of_mesh, **options)(x, routing, *matrices)
