"""Code of the experts that both Flax layers share, for one device or a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.arguments import (
    canonical_dtype,
    canonical_precision,
    check_floating,
    checked_boolean,
    checked_implementation,
    checked_int,
    with_invariance,
)
from jax_grouped_gemm._src.expert_parallel.mesh import check_options as check_expert_parallel
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.fp8.quantize.api import QuantizedWeights
from jax_grouped_gemm._src.fp8.recipe import checked_recipe
from jax_grouped_gemm._src.invariance import is_enabled
from jax_grouped_gemm._src.meshes import names_of
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.quantized.api import checked as checked_quantized
from jax_grouped_gemm._src.quantized.api import quantize
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import Format
from jax_grouped_gemm._src.ragged.api import ragged_dot
from jax_grouped_gemm._src.rows.routing import check_routing, checked_mask

# This preset splits each operand into three bfloat16 parts. It is as accurate as float32, and takes
# half of the time.
ROUTER_PRECISION = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6

OF_MESH = (
    "expert_axis",
    "token_axes",
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
    """Raises the error that a call would raise, if the options cannot work for any input."""
    if layer.top_k > layer.num_experts:
        raise ValueError(
            f"MoE: top_k must be at most num_experts = {layer.num_experts}, got {layer.top_k}"
        )
    as_activation(layer.activation)
    for name in (
        "renormalize",
        "apply_router_weight_on_input",
        "biases",
        "gate_bias",
        "batch_invariant",
    ):
        checked_boolean(f"MoE: {name}", getattr(layer, name))
    if layer.router is not None:
        if not callable(layer.router):
            raise TypeError(f"MoE: router must be callable or None, got {layer.router!r}")
        if not layer.renormalize:
            raise ValueError("MoE: a router computes its own weights, so renormalize must be True")
    for name in ("dtype", "param_dtype"):
        if (given := getattr(layer, name)) is not None:
            scalar: Any = jax.ShapeDtypeStruct((), canonical_dtype(f"MoE: {name}", given))
            check_floating("MoE", **{name: scalar})
    if not callable(layer.implementation):
        checked_implementation(layer.implementation)
        canonical_precision(layer.precision)
    with_invariance("MoE", layer.implementation, layer.batch_invariant)
    if layer.recipe is not None:
        checked_recipe(layer.recipe)
        if callable(layer.implementation) or layer.precision is not None:
            raise ValueError(
                "MoE: recipe decides how the matmuls are computed, so precision must be None and "
                f"implementation must not be a function, got precision={layer.precision!r} and "
                f"implementation={layer.implementation!r}"
            )
    if layer.expert_axis is None:
        if layer.mesh is not None or layer.fsdp_axis is not None or layer.tensor_axis is not None:
            raise ValueError("MoE: mesh, fsdp_axis and tensor_axis need an expert_axis")
        return
    of_mesh = {name: getattr(layer, name) for name in (*OF_MESH, "batch_invariant")}
    if layer.mesh is None:
        check_expert_parallel(**of_mesh)
    else:
        moe.expert_parallel(layer.mesh, **of_mesh)
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


def takes_quantized(layer: Any, embed: int) -> bool:
    """Returns whether a layer multiplies by weights that are quantised in advance."""
    recipe = layer.recipe
    in_fp8 = recipe is not None and (recipe.forward, recipe.dgrad) == ("fp8", "fp8")
    if not in_fp8 or layer.tensor_axis is not None:
        return False
    mesh = layer.mesh or jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape.get(name, 1) for name in names_of(layer.fsdp_axis))
    return devices == 1 or embed % (devices * BLOCK) == 0


# Define functions, because results of `lecun_normal` cannot be pickled.
def default_kernel_init(*args: Any, **options: Any) -> jax.Array:
    """Draws each expert's matrix from LeCun's normal distribution."""
    return jax.nn.initializers.lecun_normal(batch_axis=(0,))(*args, **options)


def default_gate_init(*args: Any, **options: Any) -> jax.Array:
    """Draws the router's matrix from LeCun's normal distribution."""
    return jax.nn.initializers.lecun_normal()(*args, **options)


def as_dict(quantized: QuantizedMlp) -> dict[str, dict[str, jax.Array]]:
    """Returns quantised weights as nested dictionaries, which checkpoints restore unchanged."""
    return {matrix: forms._asdict() for matrix, forms in quantized._asdict().items()}


def from_dict(arrays: Mapping[str, Mapping[str, jax.Array]]) -> QuantizedMlp:
    """Returns the quantised weights from which `as_dict` made `arrays`."""
    return QuantizedMlp(**{name: QuantizedWeights(**forms) for name, forms in arrays.items()})


def quantized_weights(
    wi_0: jax.Array, wi_1: jax.Array, wo: jax.Array, format: str | Format, **options: Any
) -> dict[str, QuantizedArray]:
    """Returns the weights of a layer, quantised to `format`, by name."""
    named = dict(wi_0=wi_0, wi_1=wi_1, wo=wo)
    return {name: quantize(w, format, **options) for name, w in named.items()}


def checked_weights(layer: Any, embed: int, **given: Any) -> dict[str, QuantizedArray]:
    """Returns the weights `given`; raises a `TypeError` unless they fit one or stacked layers."""
    wi = layer.num_experts, embed, layer.hidden_features
    for name, q in given.items():
        shape = (wi[0], wi[2], wi[1]) if name == "wo" else wi
        if checked_quantized(f"MoE: {name}", q).shape[-3:] != shape:
            raise TypeError(f"MoE: {name} must be [..., {shape}] of this layer, got {q.shape}")
    return given


def axes_of_arrays(q: QuantizedArray, axes: Sequence[str | None]) -> dict[str, Any]:
    """Returns the logical axes of each array of `q`, from those of the matrices [..., k, n]."""
    *stack, k, n = axes
    more = [None] * (len(q.leading) - len(stack))  # the axes of stacked layers may be unnamed
    try:
        return {name: tuple(x) for name, x in q.specs(P(*more, *stack, k, n)).arrays.items()}
    except NotImplementedError:  # nobody knows the dimensions of formats that users add
        return {}


def parameters(
    layer: Any, embed: int, kernel_init: Any, bias_init: Any
) -> Iterator[tuple[str, Any, tuple[int, ...], tuple[str, ...]]]:
    """Yields name, initialiser, shape and logical axes of each matrix, and of each bias if any."""
    wi = (layer.num_experts, embed, layer.hidden_features), ("exp", "embed", "mlp")
    wo = (layer.num_experts, layer.hidden_features, embed), ("exp", "mlp", "embed")
    matrices = ("wi_0", *wi), ("wi_1", *wi), ("wo", *wo)
    yield from ((name, kernel_init, shape, axes) for name, shape, axes in matrices)
    if layer.biases:
        yield from ((f"{name}_bias", bias_init, x[::2], axes[::2]) for name, x, axes in matrices)


def forward(
    layer: Any,
    x: jax.Array,
    logits: jax.Array,
    mask: Any,
    given: Sequence[jax.Array | QuantizedArray],
    quantized: Any,
) -> tuple[jax.Array, moe.Routing, moe.ExpertParallelStats | None]:
    """Computes a layer with the parameters `given`, by `moe.dropless_mlp`, or by
    `moe.expert_parallel` if the layer has an `expert_axis`."""
    dtype = jnp.result_type(x, layer.param_dtype) if layer.dtype is None else layer.dtype
    routing = routed(layer, logits, mask)
    matrices = (w if isinstance(w, QuantizedArray) else w.astype(dtype) for w in given[:3])
    biases: Any = tuple(given[3:]) or None
    names = (
        "activation",
        "apply_router_weight_on_input",
        "precision",
        "implementation",
        "recipe",
        "batch_invariant",
    )
    options = {name: getattr(layer, name) for name in names}
    if not takes_quantized(layer, x.shape[-1]):
        quantized = None
    if layer.expert_axis is None:
        options |= dict(biases=biases, quantized=quantized, token_axes=layer.token_axes)
        y = moe.dropless_mlp(x.astype(dtype), routing, *matrices, **options)
        return y, routing, None
    of_mesh = {name: getattr(layer, name) for name in OF_MESH}
    run = moe.expert_parallel(layer.mesh, **of_mesh, **options)
    y, stats = run(x.astype(dtype), routing, *matrices, biases=biases, quantized=quantized)
    return y, routing, stats


# Define functions instead of partial objects, which are never equal, because graphs of equal layers
# must be equal.
def router_dot(x: jax.Array, gate: jax.Array, *numbers: Any, **options: Any) -> jax.Array:
    """Multiplies tokens by a router's matrix at `ROUTER_PRECISION`, like `jax.lax.dot_general`."""
    if is_enabled():
        return invariant_router_dot(x, gate)
    return jax.lax.dot_general(x, gate, *numbers, **options | dict(precision=ROUTER_PRECISION))


def invariant_router_dot(x: jax.Array, gate: jax.Array, *_: Any, **__: Any) -> jax.Array:
    """Multiplies as a product of one group, because bits of XLA's dot depend on the token count."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    sizes = jnp.full(1, rows.shape[0], jnp.int32)
    highest = jax.lax.Precision.HIGHEST
    logits = ragged_dot(rows, gate[None], sizes, highest, batch_invariant=True)
    return logits.reshape(*x.shape[:-1], gate.shape[-1])


def without_padding(x: jax.Array, mask: Any) -> jax.Array:
    """Zeroes tokens where the mask is False, so that NaN in padding does not reach gradients."""
    if mask is None:
        return x
    return jnp.where(checked_mask("MoE", mask, "x", x)[..., None], x, 0)


def routed(layer: Any, logits: jax.Array, mask: Any) -> moe.Routing:
    """Returns a layer's routing for logits. Padding tokens visit no expert."""
    if layer.router is None:
        routing = moe.route(logits, layer.top_k, renormalize=layer.renormalize)
    else:
        routing = layer.router(logits)
        check_routing("MoE: router", routing)
        if routing.experts.shape != (*logits.shape[:-1], layer.top_k):
            raise TypeError(
                f"MoE: router must choose top_k = {layer.top_k} experts a token, got experts "
                f"{routing.experts.shape} for logits {logits.shape}"
            )
    return routing if mask is None else moe.mask_tokens(routing, mask)
