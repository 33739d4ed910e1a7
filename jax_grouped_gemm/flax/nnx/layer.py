"""Mixture-of-experts layer for Flax NNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grouped_gemm import moe
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp.fp8.weights import quantize_mlp
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.format import Format
from jax_grouped_gemm.flax._experts import (
    as_dict,
    axes_of_arrays,
    check_options,
    check_sizes,
    checked_weights,
    default_gate_init,
    default_kernel_init,
    forward,
    from_dict,
    invariant_router_dot,
    parameters,
    quantized_weights,
    router_dot,
    takes_quantized,
    without_padding,
)

MATRICES = ("wi_0", "wi_1", "wo")


class Quantized(nnx.Variable):
    """An array of an `MoE`'s quantised weights. Optimisers of `nnx.Param` ignore it."""


def quantize(model: nnx.Module, format: str | Format | None = None, **options: Any) -> None:
    """Quantises the weights of every `MoE` of `model`, in place.

    With a `format`, weights are frozen. Quantised variables replace the parameters wi_0, wi_1 and
    wo, which become None. The layer multiplies x, in the layer's dtype, by these variables, as
    `moe.dropless_mlp` does with a `jax_grouped_gemm.QuantizedArray`. All other parameters still get
    gradients:

        quantize(model, "mxfp4")

    Without a `format`, the function quantises the layers with an FP8 recipe, as the recipe says.
    Four kinds of layers stay unchanged: layers without a recipe, with a recipe whose `forward` or
    `dgrad` is "bf16", with a `tensor_axis`, and with slices along `fsdp_axis` that are not a
    multiple of 128 features.

    A layer whose weights are quantised does not quantise them again, neither for each microbatch
    nor in rematerialisation. Parameters change in an optimiser step, so quantise again after it:

        quantize(model)

        @nnx.jit
        def step(model, optimizer, batch):
            gradients = nnx.grad(loss)(model, batch)
            optimizer.update(model, gradients)
            quantize(model)

    The quantised weights are variables of the type `Quantized`, one for each array, such as
    `layer.quantized["wi"]["values"]`. They are constants of the loss, and may be left out of a
    checkpoint. Stacked parameters, such as those of layers under `nnx.scan`, become stacked
    quantised weights. Parameters are not rounded to the `dtype` of a layer before they are
    quantised.

    Args:
      model: a module.
      format: a format of `jax_grouped_gemm.quantize`, or None.
      **options: options of `jax_grouped_gemm.quantize`, such as `group_size`.

    Raises:
      ValueError: `format` is not registered, or a layer has a recipe and `format` has the layout
        "packed".
    """
    if format is not None:
        for layer in [m for _, m in nnx.iter_graph(model) if isinstance(m, MoE)]:
            if layer.formats is None:
                wi_0, wi_1, wo = (w[...] for w in (layer.wi_0, layer.wi_1, layer.wo))
                set_quantized(layer, **quantized_weights(wi_0, wi_1, wo, format, **options))
        return
    for _, module in nnx.iter_graph(model):
        if has_quantized(module):
            wi_0, wi_1, wo = (getattr(module, name)[...] for name in MATRICES)
            put(module, as_dict(quantize_mlp(wi_0, wi_1, wo, module.recipe)))


def has_quantized(module: Any) -> bool:
    """Returns whether a module is a layer whose recipe takes quantised weights."""
    if not isinstance(module, MoE) or module.recipe is None or module.formats is not None:
        return False
    return takes_quantized(module, module.wi_0.shape[-2])


def put(layer: MoE, arrays: dict[str, dict[str, jax.Array]]) -> None:
    """Stores quantised weights in a layer."""
    if layer.quantized is None:
        # Make a variable for each array, because checkpoints turn named tuples into dictionaries.
        layer.quantized = nnx.data(
            {
                matrix: {
                    form: Quantized(x, **_metadata(layer, matrix, form))
                    for form, x in forms.items()
                }
                for matrix, forms in arrays.items()
            }
        )
        return
    for matrix, forms in arrays.items():
        for form, x in forms.items():
            layer.quantized[matrix][form].set_value(x)


def _metadata(layer: MoE, matrix: str, form: str) -> dict[str, Any]:
    """Returns the metadata of a quantised weight: the logical axes of the parameter, or none."""
    axes = _axes(layer, "wo" if matrix == "wo" else "wi_0")
    if axes is None:
        return {}
    *stack, k, n = axes
    return _annotation((*stack, n, k) if form.endswith("_t") else (*stack, k, n))


def _axes(layer: MoE, name: str) -> tuple[str | None, ...] | None:
    """Returns the logical axes of a matrix, None if its parameter has none or is gone."""
    parameter = getattr(layer, name)
    return None if parameter is None else parameter.get_metadata().get("out_sharding")


def set_quantized(
    layer: MoE, wi_0: QuantizedArray, wi_1: QuantizedArray, wo: QuantizedArray
) -> None:
    """Replaces a layer's parameters by quantised weights, such as those of a checkpoint.

        layer = nnx.eval_shape(lambda: MoE(..., rngs=nnx.Rngs(0)))  # allocates nothing
        weights = jax_grouped_gemm.checkpoints.gpt_oss(tensors, 0)
        set_quantized(layer, *weights[:3])

    The parameters wi_0, wi_1 and wo become None. The arrays are variables of the type `Quantized`,
    such as `layer.quantized["wi_0"]["values"]`, and have the parameters' logical axes.

    Args:
      layer: a layer. If it has a recipe, the weights must be of the format "fp8_128x128" in the
        layout "rows".
      wi_0, wi_1: [E, D, F].
      wo: [E, F, D].

    Raises:
      TypeError: a weight is not a `QuantizedArray`, or does not have the parameter's shape.
      ValueError: the layer has a recipe, and a weight has the layout "packed".
    """
    given = checked_weights(layer, layer.gate.in_features, wi_0=wi_0, wi_1=wi_1, wo=wo)
    if layer.recipe is not None and any(q.format.layout != "rows" for q in given.values()):
        raise ValueError("MoE: weights in the layout 'packed' are for layers without a recipe")
    layer.formats = tuple((q.format, q.matrix) for q in given.values())
    variables = {}
    for name, q in given.items():
        axes = _axes(layer, name)
        specs = {} if axes is None else axes_of_arrays(q, axes)
        variables[name] = {
            array: Quantized(x, **(_annotation(specs[array]) if specs else {}))
            for array, x in q.arrays.items()
        }
    for name in given:
        setattr(layer, name, nnx.data(None))
    layer.quantized = nnx.data(variables)


class MoE(nnx.Module):
    """Dropless gated MoE feed-forward layer: [..., D] -> ([..., D], `moe.AuxiliaryLosses`).

    Parameters, with their logical axes (MaxText's names) in the ``out_sharding`` metadata:
      gate.kernel [D, E] ("embed", None), wi_0 and wi_1 [E, D, F] ("exp", "embed", "mlp"), wo [E, F,
      D] ("exp", "mlp", "embed"); with `biases` wi_0_bias and wi_1_bias [E, F] ("exp", "mlp") and
      wo_bias [E, D] ("exp", "embed"), with `gate_bias` gate.bias [E] (None,). The axes are
      annotations only: the constructor needs no mesh and shards nothing. Read the axes with
      ``nnx.get_partition_spec`` under logical axis rules.

    The router runs in float32 whatever ``dtype`` is.

    Args:
      in_features: D, the width of a token.
      hidden_features: F, the width of every expert.
      num_experts: E.
      top_k: number of experts for each token.
      renormalize: whether a token's weights sum to one, see `moe.route`.
      activation: activation of the experts, see `moe.dropless_mlp`.
      apply_router_weight_on_input: see `moe.dropless_mlp`.
      router: a function that replaces `moe.route`, such as `functools.partial(moe.route, ...)` or a
        module with a correction bias. It gets float32 logits [..., E] and returns a `moe.Routing`
        with `top_k` experts for each token. `renormalize` must then be True.
      biases: whether experts have biases.
      gate_bias: whether the router's logits have a bias.
      dtype: dtype of the experts' computation; None promotes the input and the parameters.
      param_dtype: dtype of the parameters.
      precision: precision of the experts' matmuls.
      kernel_init: initialiser of wi_0, wi_1 and wo.
      gate_init: initialiser of the router.
      bias_init: initialiser of all biases.
      implementation: what computes the ragged matmuls, see `moe.dropless_mlp`.
      recipe: recipe of FP8 matmuls, see `moe.dropless_mlp`. Weights are quantised in each call, or
        in advance: see `quantize`.
      batch_invariant: see `moe.dropless_mlp` and `moe.expert_parallel`; the router's logits are
        batch invariant too.
      expert_axis: mesh axis, or axes, along which experts are divided, see `moe.expert_parallel`.
        With None the layer runs on one device. Parameters and checkpoints are the same in both
        cases.
      token_axes: mesh axes along which the first dimension of x is split, see `moe.dropless_mlp`
        and, with `expert_axis`, `moe.expert_parallel`.
      mesh, fsdp_axis, tensor_axis, strategy, chunks, buffer_factor, overlap, save: options of
        `moe.expert_parallel`, which only a layer with an `expert_axis` uses.
      rngs: random numbers for the initialisers, from the stream "params".
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool = True,
        activation: moe.ActivationLike = "silu",
        apply_router_weight_on_input: bool = False,
        router: Callable[[jax.Array], moe.Routing] | None = None,
        biases: bool = False,
        gate_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Callable[..., jax.Array] = default_kernel_init,
        gate_init: Callable[..., jax.Array] = default_gate_init,
        bias_init: Callable[..., jax.Array] = jax.nn.initializers.zeros,
        implementation: moe.Implementation = None,
        recipe: Recipe | None = None,
        batch_invariant: bool = False,
        expert_axis: str | tuple[str, ...] | None = None,
        token_axes: str | tuple[str, ...] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        fsdp_axis: str | tuple[str, ...] | None = None,
        tensor_axis: str | tuple[str, ...] | None = None,
        strategy: str = "auto",
        chunks: int | str = "auto",
        buffer_factor: float | None = None,
        overlap: bool | str = "auto",
        save: str = "auto",
        rngs: nnx.Rngs,
    ):
        check_sizes(
            in_features=in_features,
            hidden_features=hidden_features,
            num_experts=num_experts,
            top_k=top_k,
        )
        self.top_k = top_k
        self.renormalize = renormalize
        self.activation = activation
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.router = router
        self.biases = biases
        self.gate_bias = gate_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.implementation = implementation
        self.recipe = recipe
        self.batch_invariant = batch_invariant
        self.expert_axis = expert_axis
        self.token_axes = token_axes
        self.mesh = mesh
        self.fsdp_axis = fsdp_axis
        self.tensor_axis = tensor_axis
        self.strategy = strategy
        self.chunks = chunks
        self.buffer_factor = buffer_factor
        self.overlap = overlap
        self.save = save
        self.quantized: dict[str, dict[str, Quantized]] | None = nnx.data(None)
        # The formats and the sizes of wi_0, wi_1 and wo, if `quantized` replaces them.
        self.formats: tuple[Any, ...] | None = None
        self.num_experts = num_experts
        self.hidden_features = hidden_features
        check_options(self, in_features)

        self.gate = nnx.Linear(
            in_features,
            num_experts,
            use_bias=gate_bias,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            precision=jax.lax.Precision.HIGHEST,
            kernel_init=gate_init,
            bias_init=bias_init,
            dot_general=invariant_router_dot if batch_invariant else router_dot,
            kernel_metadata=_annotation(("embed", None)),
            bias_metadata=_annotation((None,)),
            rngs=rngs,
        )
        self.wi_0, self.wi_1, self.wo, *of_biases = (
            nnx.Param(init(rngs.params(), shape, param_dtype), **_annotation(axes))
            for _, init, shape, axes in parameters(self, in_features, kernel_init, bias_init)
        )
        if of_biases:
            self.wi_0_bias, self.wi_1_bias, self.wo_bias = of_biases

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None
    ) -> tuple[jax.Array, moe.AuxiliaryLosses]:
        """Applies the layer.

        Args:
          x: tokens [..., D].
          mask: booleans [...], False for padding tokens, see `moe.mask_tokens`. Padding tokens
            visit no expert, are zero in the result and count in no loss. None means that all tokens
            are real.

        Raises:
          TypeError: `mask` has an unsuitable dtype or shape, or `router` returns something other
            than a `moe.Routing` with `top_k` experts for each token.
        """
        x = without_padding(x, mask)
        arrays = {
            matrix: {form: variable.get_value() for form, variable in forms.items()}
            for matrix, forms in (self.quantized or {}).items()
        }
        given: list[Any]
        quantized = None
        if self.formats is None:
            given = [w[...] for w in (self.wi_0, self.wi_1, self.wo)]
            quantized = from_dict(arrays) if arrays else None
        else:
            given = [
                QuantizedArray(**arrays[name], format=format, matrix=matrix)
                for name, (format, matrix) in zip(MATRICES, self.formats, strict=True)
            ]
        if self.biases:
            given += [b[...] for b in (self.wi_0_bias, self.wi_1_bias, self.wo_bias)]
        y, routing, _ = forward(self, x, self.gate(x), mask, given, quantized)
        return y, moe.auxiliary_losses(routing, mask=mask)


def _annotation(axes: tuple[str | None, ...]) -> dict[str, Any]:
    # Eager sharding would make construction fail without a mesh that has these axes.
    return {"out_sharding": axes, "eager_sharding": False}
