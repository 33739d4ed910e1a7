"""Mixture-of-experts layer for Flax Linen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from jax_grouped_gemm import moe, optim
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp, quantize_mlp
from jax_grouped_gemm._src.quantized.format import Format
from jax_grouped_gemm.flax._experts import (
    as_dict,
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
    without_padding,
)

QUANTIZED = "quantized"
"""The collection of variables for weights that are quantised in advance; see `quantize_params`."""


def quantize_params(
    params: Mapping[str, Any], recipe: Recipe | str | Format, **options: Any
) -> dict[str, Any]:
    """Returns the collection "quantized" of a model: quantised weights of every `MoE` in `params`.

    A layer that finds its weights in this collection does not quantise them again. Call this
    function whenever the parameters change. They change once in an optimiser step, whatever the
    number of microbatches and rematerialised passes:

        quantized = quantize_params(params, recipe)
        y, losses = model.apply({"params": params, "quantized": quantized}, x)

    The collection is a constant of the loss, so gradients go to `params`. In `nn.scan` over layers,
    use `variable_axes={"params": 0, "quantized": 0}`. Stacked parameters become stacked quantised
    weights. Parameters are not rounded to the `dtype` of a layer before they are quantised.

    Four kinds of layers read no quantised weights: layers without a recipe, with a recipe whose
    `forward` or `dgrad` is "bf16", with a `tensor_axis`, and with slices along `fsdp_axis` that are
    not a multiple of 128 features. Pass `params` without these layers.

    For layers without a recipe, pass a format in place of the recipe. The weights are then frozen,
    and each is a `jax_grouped_gemm.QuantizedArray`. Layers then do not read wi_0, wi_1 and wo, so
    "params" need not contain them. You can also make such a collection from a checkpoint, with
    `{"experts": {"wi_0": wi_0, "wi_1": wi_1, "wo": wo}}` under the path of each layer.

    Args:
      params: the collection "params" of a module, with or without partitioning metadata.
      recipe: recipe of the layers, or a format of `jax_grouped_gemm.quantize`.
      **options: options of `jax_grouped_gemm.quantize`, such as `group_size`.
    """
    params = nn.meta.unbox(params)
    if {"wi_0", "wi_1", "wo"} <= params.keys():
        matrices = params["wi_0"], params["wi_1"], params["wo"]
        if isinstance(recipe, str | Format):
            return {"experts": quantized_weights(*matrices, recipe, **options)}
        return {"experts": as_dict(quantize_mlp(*matrices, recipe))}
    inner = {
        name: quantize_params(value, recipe, **options)
        for name, value in params.items()
        if isinstance(value, Mapping)
    }
    return {name: value for name, value in inner.items() if value}


class TrainState(struct.PyTreeNode):
    """Parameters, an optimiser of `optim` and its state, with the interface of Flax's `TrainState`.

        state = TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=optim.adamw(1e-3, recipe=recipe)
        )

        def loss(params):
            y, losses = state.apply_fn(state.variables | {"params": params}, x)
            ...

        state = state.apply_gradients(grads=jax.grad(loss)(state.compute_params))

    Attributes:
      step: number of calls of `apply_gradients`.
      apply_fn: `model.apply`.
      params: the collection "params", without partitioning metadata.
      tx: the optimiser.
      opt_state: the state of the optimiser.
    """

    step: Any
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    params: Any
    tx: optim.Optimizer = struct.field(pytree_node=False)
    opt_state: optim.OptimizerState

    @classmethod
    def create(
        cls, *, apply_fn: Callable[..., Any], params: Any, tx: optim.Optimizer, **rest: Any
    ) -> TrainState:
        """Returns the state before the first step; `rest` are fields of a subclass."""
        params = nn.meta.unbox(params)
        return cls(
            step=jnp.zeros((), jnp.int32),
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=tx.init(params),
            **rest,
        )

    @property
    def variables(self) -> dict[str, Any]:
        """The collections "params" and "quantized" for `apply_fn`."""
        return {"params": self.params, QUANTIZED: _collection(self.opt_state.quantized)}

    @property
    def compute_params(self) -> Any:
        """The parameters to pass to `jax.grad`; see `optim.Optimizer.compute_params`."""
        return self.tx.compute_params(self.params)

    def apply_gradients(self, *, grads: Any, factor: Any = 1.0, **rest: Any) -> TrainState:
        """Returns the state after a step.

        Args:
          grads: gradients of `params`.
          factor: see `optim.Optimizer.step`.
          **rest: new values of other fields, such as those of a subclass.
        """
        params, opt_state = self.tx.step(self.params, grads, self.opt_state, factor=factor)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **rest)


def _collection(quantized: Any) -> dict[str, Any]:
    """Returns the collection "quantized" from an optimiser's quantised weights."""
    if isinstance(quantized, QuantizedMlp):
        return {"experts": as_dict(quantized)}
    if not isinstance(quantized, dict):
        return {}
    inner = {name: _collection(value) for name, value in quantized.items()}
    return {name: value for name, value in inner.items() if value}


class MoE(nn.Module):
    """Dropless gated MoE feed-forward layer: [..., D] -> ([..., D], `moe.AuxiliaryLosses`).

    Parameters, with their logical axes (MaxText's names):
      gate/kernel [D, E] ("embed", None), wi_0 and wi_1 [E, D, F] ("exp", "embed", "mlp"),
      wo [E, F, D] ("exp", "mlp", "embed"); with `biases` wi_0_bias and wi_1_bias [E, F]
      ("exp", "mlp") and wo_bias [E, D] ("exp", "embed"), with `gate_bias` gate/bias [E] (None,).

    The router runs in float32 whatever ``dtype`` is.

    Attributes:
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
      kernel_init: initialiser of wi_0, wi_1 and wo. If it names axes, as `nn.with_partitioning`
        does, they replace the logical axes above.
      gate_init: initialiser of the router, which may name axes too.
      bias_init: initialiser of all biases, which may name axes too.
      implementation: what computes the ragged matmuls, see `moe.dropless_mlp`.
      recipe: recipe of FP8 matmuls, see `moe.dropless_mlp`. Weights are quantised in each call, or
        in advance: see `quantize_params`.
      batch_invariant: see `moe.dropless_mlp` and `moe.expert_parallel`; the router's logits are
        batch invariant too.
      expert_axis: mesh axis, or axes, along which experts are divided, see `moe.expert_parallel`.
        With None the layer runs on one device. Parameters and checkpoints are the same in both
        cases. With an `expert_axis`, the layer sows the `moe.ExpertParallelStats` as
        "expert_parallel" in the collection "intermediates". Every layer sows its "routing" there.
      token_axes: mesh axes along which the first dimension of x is split, see `moe.dropless_mlp`
        and, with `expert_axis`, `moe.expert_parallel`.
      mesh, fsdp_axis, tensor_axis, strategy, chunks, buffer_factor, overlap, save: options of
        `moe.expert_parallel`, which only a layer with an `expert_axis` uses.
    """

    hidden_features: int
    num_experts: int
    top_k: int
    renormalize: bool = True
    activation: moe.ActivationLike = "silu"
    apply_router_weight_on_input: bool = False
    router: Callable[[jax.Array], moe.Routing] | None = None
    biases: bool = False
    gate_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: jax.lax.PrecisionLike = None
    kernel_init: Callable[..., jax.Array] = default_kernel_init
    gate_init: Callable[..., jax.Array] = default_gate_init
    bias_init: Callable[..., jax.Array] = jax.nn.initializers.zeros
    implementation: moe.Implementation = None
    recipe: Recipe | None = None
    batch_invariant: bool = False
    expert_axis: str | tuple[str, ...] | None = None
    token_axes: str | tuple[str, ...] | None = None
    mesh: jax.sharding.Mesh | None = None
    fsdp_axis: str | tuple[str, ...] | None = None
    tensor_axis: str | tuple[str, ...] | None = None
    strategy: str = "auto"
    chunks: int | str = "auto"
    buffer_factor: float | None = None
    overlap: bool | str = "auto"
    save: str = "auto"

    def __post_init__(self) -> None:
        check_sizes(
            hidden_features=self.hidden_features, num_experts=self.num_experts, top_k=self.top_k
        )
        check_options(self)
        super().__post_init__()

    @nn.compact
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
          ValueError: x has no features, or the collection "quantized" lacks a matrix.
        """
        if not x.shape[-1]:
            raise ValueError(f"MoE: x must have features, got {x.shape}")
        x = without_padding(x, mask)
        logits = nn.Dense(
            self.num_experts,
            use_bias=self.gate_bias,
            dtype=jnp.float32,
            param_dtype=self.param_dtype,
            precision=jax.lax.Precision.HIGHEST,
            kernel_init=_partitioned(self.gate_init, ("embed", None)),
            bias_init=_partitioned(self.bias_init, (None,)),
            dot_general=invariant_router_dot if self.batch_invariant else router_dot,
            name="gate",
        )(x)
        quantized: Any = self.get_variable(QUANTIZED, "experts")
        frozen: dict[str, Any] = {}
        if isinstance(quantized, Mapping):
            if "wi" not in quantized:
                if set(quantized) != {"wi_0", "wi_1", "wo"}:
                    raise ValueError(
                        f"MoE: experts of the collection {QUANTIZED!r} must be wi_0, wi_1 and wo, "
                        f"or wi and wo for a recipe, got {', '.join(quantized) or 'nothing'}"
                    )
                frozen, quantized = checked_weights(self, x.shape[-1], **quantized), None
            else:
                quantized = from_dict(quantized)
        every = parameters(self, x.shape[-1], self.kernel_init, self.bias_init)
        given = [
            frozen[name]
            if name in frozen
            else self.param(name, _partitioned(init, axes), shape, self.param_dtype)
            for name, init, shape, axes in every
        ]
        y, routing, stats = forward(self, x, logits, mask, given, quantized)
        self.sow("intermediates", "routing", routing)
        if stats is not None:
            self.sow("intermediates", "expert_parallel", stats)
        return y, moe.auxiliary_losses(routing, mask=mask)


def _partitioned(init: Callable[..., Any], axes: tuple[str | None, ...]) -> Callable[..., Any]:
    """Returns `init` with logical axes, unless its results already have axes."""

    def initialize(*args: Any) -> nn.meta.AxisMetadata:
        value = init(*args)
        boxed = isinstance(value, nn.meta.AxisMetadata)
        return value if boxed else nn.LogicallyPartitioned(value, axes)

    return initialize
