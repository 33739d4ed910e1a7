"""Dropless mixture-of-experts (MoE) feed-forward layers as pure functions.

The ``top_k`` best experts of every token process it. Experts have no capacity, so no token is ever
dropped and no row is ever padded. A layer sorts tokens by expert and multiplies them by the
experts' matrices in three ragged matmuls:

    logits = jnp.dot(x, gate, precision="highest")             # [..., D] -> [..., E]
    routing = moe.route(logits, top_k=2)                       # experts and weights [..., 2]
    y = moe.dropless_mlp(x, routing, wi_0, wi_1, wo)           # [..., D] -> [..., D]
    loss = task_loss + 1e-2 * moe.load_balancing_loss(routing) + 1e-3 * moe.router_z_loss(routing)

GPT-OSS has biases and clips the inputs of the activation. Llama 4 multiplies the input of its
experts by the router weights:

    routing = moe.route(logits + gate_bias, top_k=4)
    y = moe.dropless_mlp(x, routing, wi_0, wi_1, wo, biases=(b0, b1, bo), activation="swiglu_oai")

    routing = moe.route(logits, top_k=1, scoring="sigmoid", renormalize=False)
    y = moe.dropless_mlp(x, routing, wi_0, wi_1, wo, apply_router_weight_on_input=True)

Shapes: D embed, F hidden, E experts, T tokens (all leading dimensions of ``x``), k = top_k.
Everything is deterministic, differentiable to any order in forward and reverse mode, and works
under jit, vmap, scan, remat and shard_map.

Rounding: biases are added to gate and up, and the sums are rounded to the dtype of the operands.
The hidden layer, which includes the router weight, is computed from these rounded values in float32
at least, and rounded once. The hidden layer therefore has the same values whether it is kept,
recomputed or fused in a kernel, except for the accuracy of the activation in a kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src import arguments
from jax_grouped_gemm._src.activations import Activation as Activation
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.arguments import (
    as_array,
    canonical_offset,
    checked_boolean,
    checked_int,
    run_group_checks,
    with_invariance,
)
from jax_grouped_gemm._src.arrays import vary_over, varying_axes
from jax_grouped_gemm._src.expert_parallel.api import expert_parallel_mlp as expert_parallel_mlp
from jax_grouped_gemm._src.expert_parallel.compiler import (
    data_parallel_compiler_options as data_parallel_compiler_options,
)
from jax_grouped_gemm._src.expert_parallel.compiler import (
    expert_parallel_compiler_options as expert_parallel_compiler_options,
)
from jax_grouped_gemm._src.expert_parallel.explain import (
    ExpertParallelExplanation as ExpertParallelExplanation,
)
from jax_grouped_gemm._src.expert_parallel.explain import (
    explain_expert_parallel as explain_expert_parallel,
)
from jax_grouped_gemm._src.expert_parallel.mesh import expert_parallel as expert_parallel
from jax_grouped_gemm._src.expert_parallel.stats import ExpertParallelStats as ExpertParallelStats
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp import composed
from jax_grouped_gemm._src.mlp.api import ActivationLike as ActivationLike
from jax_grouped_gemm._src.mlp.experts import Experts
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.mlp.operands import ExpertWeights, Groups, Rows
from jax_grouped_gemm._src.mlp.reference import row_weights
from jax_grouped_gemm._src.over_tokens import AxisNames, over_tokens
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.weights import as_weights
from jax_grouped_gemm._src.ragged.reference import owned_rows
from jax_grouped_gemm._src.rows.api import combine as combine
from jax_grouped_gemm._src.rows.api import dispatch as dispatch
from jax_grouped_gemm._src.rows.api import gather_rows as gather_rows
from jax_grouped_gemm._src.rows.api import sort_by_expert as sort_by_expert
from jax_grouped_gemm._src.rows.operands import Biases, check_real, check_shapes, checked_biases
from jax_grouped_gemm._src.rows.operands import ExpertOrder as ExpertOrder
from jax_grouped_gemm._src.rows.permutation import permute_rows as permute_rows
from jax_grouped_gemm._src.rows.routing import AuxiliaryLosses as AuxiliaryLosses
from jax_grouped_gemm._src.rows.routing import Routing as Routing
from jax_grouped_gemm._src.rows.routing import auxiliary_losses as auxiliary_losses
from jax_grouped_gemm._src.rows.routing import check_routing
from jax_grouped_gemm._src.rows.routing import load_balancing_loss as load_balancing_loss
from jax_grouped_gemm._src.rows.routing import mask_tokens as mask_tokens
from jax_grouped_gemm._src.rows.routing import route as route
from jax_grouped_gemm._src.rows.routing import router_z_loss as router_z_loss

Implementation = arguments.Implementation | Callable[..., jax.Array]


def gated_activation(
    gate: jax.Array,
    up: jax.Array | None,
    weights: jax.Array | None,
    activation: ActivationLike = "silu",
) -> jax.Array:
    """Returns ``activation(gate) * up * weights``, rounded once.

    Args:
      gate: [m, F].
      up: [m, F], or None for experts without up, which compute ``activation(gate) * weights``.
      weights: [m], or None for ones.
      activation: see `dropless_mlp`.

    Returns:
      [m, F] in the dtype of `gate`, computed in float32 at least.

    Raises:
      TypeError: shapes or dtypes do not fit together, or `activation` is neither a name nor
        callable.
      ValueError: `activation` is not the name of an activation.
    """
    activation = as_activation(activation)
    gate = as_array("gate", gate)
    up = None if up is None else as_array("up", up)
    weights = None if weights is None else as_array("weights", weights)
    if gate.ndim != 2 or (up is not None and up.shape != gate.shape):
        raise TypeError(
            "gated_activation: gate and up must be [m, F], got gate "
            f"{gate.shape} and up {None if up is None else up.shape}"
        )
    if weights is not None and weights.shape != gate.shape[:1]:
        raise TypeError(
            f"gated_activation: weights must be [m] = {gate.shape[:1]}, got {weights.shape}"
        )
    for name, operand in (("up", up), ("weights", weights)):
        if operand is not None:
            check_real("gated_activation", name, operand, gate)
    return composed.recomputed_hidden(activation, gate, up, weights)


def deinterleave(gate_up: jax.Array, axis: int = -1) -> tuple[jax.Array, jax.Array]:
    """Splits gate and up projections that alternate along an axis, as in checkpoints of GPT-OSS.

    Args:
      gate_up: matrices [..., 2 F] or their biases, JAX or NumPy, in the order gate, up, gate, up,
        and so on.
      axis: the axis that has size 2 F.

    Returns:
      gate and up, [..., F] each: `wi_0` and `wi_1`, or their biases. Concatenated along the last
      axis they are the matrix of `gated_ragged_dot(..., concatenated=True)`.

    Raises:
      TypeError: `gate_up` is not an array, or `axis` is not one of its axes or has an odd size.
    """
    shape = getattr(gate_up, "shape", None)
    if shape is None:
        raise TypeError(f"deinterleave: gate_up must be an array, got {type(gate_up).__name__}")
    axis = checked_int("deinterleave: axis", axis)
    if not -len(shape) <= axis < len(shape) or shape[axis] % 2:
        raise TypeError(
            f"deinterleave: gate_up must have an axis {axis} of even size, got {tuple(shape)}"
        )
    before = (slice(None),) * (axis % len(shape))
    return gate_up[(*before, slice(0, None, 2))], gate_up[(*before, slice(1, None, 2))]


def dropless_mlp(
    x: jax.Array,
    routing: Routing,
    wi_0: jax.Array | QuantizedArray,
    wi_1: jax.Array | QuantizedArray | None,
    wo: jax.Array | QuantizedArray,
    *,
    biases: Biases | None = None,
    activation: ActivationLike = "silu",
    apply_router_weight_on_input: bool = False,
    precision: jax.lax.PrecisionLike = None,
    group_offset: jax.Array | None = None,
    implementation: Implementation = None,
    recipe: Recipe | None = None,
    quantized: QuantizedMlp | None = None,
    token_axes: AxisNames | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Computes expert MLPs: the sum over a token's experts e of w_e ((act(x wi_0) * (x wi_1)) wo).

    Args:
      x: tokens [..., D].
      routing: the result of `route` on logits [..., E] with the same leading dimensions.
      wi_0, wi_1: gate and up projections [E, D, F]. Without `wi_1` (None) a hidden layer is
        act(x wi_0).
      wo: down projections [E, F, D]. Each of the three may be a `jax_grouped_gemm.QuantizedArray`,
        which has no gradient. Gate and up must then have the same format. If x is bfloat16, kernels
        read the layout "packed" directly; otherwise each call dequantises the matrices to the
        dtype of x. With a recipe, all three may have the format "fp8_128x128" in the layout "rows",
        which FP8 products read directly.
      biases: biases for wi_0, wi_1 and wo, [E, F], [E, F] and [E, D], each of which may be None.
      activation: the function of gate and up, computed in at least float32: "silu", "gelu",
        "gelu_tanh", "relu" or "relu2" of the gate; "swiglu_oai" (GPT-OSS: both clipped at 7, gate
        sigmoid(1.702 gate) (up + 1)); "clamped_silu" (DeepSeek-V4: silu, both clipped at 10); a
        `moe.Activation` with other numbers; or an elementwise function of the gate.
      apply_router_weight_on_input: whether a router weight multiplies the expert's input, as in
        Llama 4, instead of the expert's result.
      precision: as in `jax.lax.ragged_dot`.
      group_offset: scalar, the index of the weights' first expert, if the weights are a slice of
        the experts. Other experts then contribute exactly zero. Under shard_map with
        ``group_offset = axis_index * experts_per_device``, the sum over devices (``jax.lax.psum``)
        is therefore the result of the whole layer.
      implementation: the implementation of the ragged matmuls: None, "cuda" or "xla" as in
        `jax_grouped_gemm.ragged_dot`, or a function with the signature of `jax.lax.ragged_dot`.
      recipe: recipe for matmuls in FP8, see `jax_grouped_gemm.ragged_mlp`. Tokens and the gradient
        of the result are then quantised once each. The layer has first derivatives in reverse mode
        only. It computes in bf16 if bf16 is predicted to be faster, see `jax_grouped_gemm.Recipe`.
        Without a recipe (None), matmuls are computed in the dtype of their operands.
      quantized: the result of `jax_grouped_gemm.quantize_mlp` for these weights and this recipe, to
        quantise weights once for several calls. Gradients still go to `wi_0`, `wi_1` and `wo`.
        Pass the real weights in these arguments, because the layer reads them if it computes in
        bf16.
      token_axes: the auto mesh axis, or axes, along which the first dimension of `x` is split,
        under `jax.jit` over a mesh. Each device then computes its own tokens with whole weights.
        Weights that are split are gathered. None takes the auto axes over which the first dimension
        can be divided evenly; () leaves the layer to XLA, which computes every token on every
        device. Explicit axes need no argument, because types have them. If experts are split,
        prefer `expert_parallel`, which sends tokens to the experts instead of gathering matrices.
      batch_invariant: whether the bits of a token's result and of its gradient are independent of
        the other tokens of the call and of their number, so that sampling and training agree: see
        `jax_grouped_gemm.batch_invariant`. With a recipe, everything is then computed in FP8.

    Returns:
      [..., D], in the dtype to which x and the weights promote.

    Raises:
      TypeError: an operand is not an array, or shapes or dtypes of operands do not fit together.
      ValueError: `activation` is not the name of an activation; or a recipe is given together with
        a precision, or with a function as the implementation; or `quantized` is given without a
        recipe; or `token_axes` names no auto axis of the mesh, or axes over which the first
        dimension of `x` cannot be divided evenly; or `batch_invariant` is given together with an
        implementation that is "xla" or a function.
      NotImplementedError: `activation` closes over traced values, and a recipe has forward and
        dgrad in FP8.
    """
    activation = as_activation(activation)
    implementation = with_invariance("dropless_mlp", implementation, batch_invariant)
    checked_boolean("apply_router_weight_on_input", apply_router_weight_on_input)
    x, gate, down = as_array("x", x), as_weights("wi_0", wi_0), as_weights("wo", wo)
    up = None if wi_1 is None else as_weights("wi_1", wi_1)
    check_routing("dropless_mlp", routing)
    check_shapes("dropless_mlp", x, routing, gate, up, down, group_offset)
    b0, b1, bo = checked_biases("dropless_mlp", biases, x, gate, up, down)
    experts = ExpertWeights(wi_0=gate, wi_1=up, b0=b0, b1=b1, wo=down, bo=bo)
    # Convert a Python number, because a function given as `implementation` gets the offset as an
    # array.
    offset = None if group_offset is None else jnp.asarray(group_offset)
    whole = experts, offset, quantized
    experts_of = functools.partial(
        Experts,
        "dropless_mlp",
        weights_on_input=apply_router_weight_on_input,
        activation=activation,
        precision=precision,
        implementation=implementation,
        recipe=recipe,
    )
    layer = functools.partial(_on_device, experts_of)
    return over_tokens("dropless_mlp", layer, (x, routing), whole, token_axes)


def _on_device(
    experts_of: Callable[..., Experts],
    tokens: tuple[jax.Array, Routing],
    whole: tuple[ExpertWeights, jax.Array | None, QuantizedMlp | None],
    _axes: tuple[str, ...],
) -> jax.Array:
    """Computes `dropless_mlp` for the tokens of a device."""
    (x, routing), (matrices, group_offset, quantized) = tokens, whole
    experts = experts_of(weights=matrices, quantized=quantized)
    rows_of_groups = math.prod(routing.experts.shape), routing.logits.shape[-1]
    experts, chosen = experts.by_plan(x, *rows_of_groups, routing.experts, are_copies=True)
    routing, of_rows = routing._replace(experts=chosen), experts.of_rows
    # Inside shard_map, gradients of replicated tokens are summed over devices where the tokens are
    # cast to vary. Cast here, so that the sum has [T, D] elements. The casts of the matmuls would
    # give two sums of [T*k, D].
    x = vary_over(x, varying_axes(x, *jax.tree.leaves(matrices)))
    expert_order = sort_by_expert(routing, implementation=of_rows)
    order, inverse, group_sizes = expert_order
    # Do not use -1, because `reshape` cannot infer a dimension of an array without elements.
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows, groups = Rows(flat, order // inverse.shape[1], inverse), Groups(group_sizes, group_offset)
    weights = permute_rows(routing.weights.reshape(-1), order, inverse.reshape(-1))
    indices = group_sizes, canonical_offset(group_offset)
    run_group_checks(group_sizes, order.shape[0], indices[1], matrices.count)
    if (y := experts.decoded(flat, routing, indices[1])) is not None:
        return y.reshape(x.shape)
    takes_tokens = experts.takes_tokens(rows, weights, groups)
    sums_rows = takes_tokens and experts.sums_rows(rows, weights, groups)
    if takes_tokens:
        out = experts.mlp(rows, weights, groups, combines=sums_rows)
    else:
        # Zero the weights of rows whose expert is not here, because zero times a NaN weight is NaN.
        owned = owned_rows(*indices, matrices.count, order.shape[0])
        weights = row_weights(weights, owned, weights)
        copies = dispatch(flat, expert_order, implementation=of_rows)
        out = experts.on_rows(copies, weights, groups)
    if not sums_rows:
        out = combine(checkpoint_name(out, "mlpwo"), expert_order, implementation=of_rows)
    return out.reshape(x.shape)
