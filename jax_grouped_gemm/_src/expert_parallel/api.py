"""`expert_parallel_mlp`: a layer whose experts are divided among devices, inside shard_map."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.arguments import as_array, checked_boolean, checked_int, with_invariance
from jax_grouped_gemm._src.arrays import vary_over
from jax_grouped_gemm._src.autodiff import is_mapped_over_mesh_axis
from jax_grouped_gemm._src.expert_parallel import layer, prediction
from jax_grouped_gemm._src.expert_parallel.experts import LocalExperts
from jax_grouped_gemm._src.expert_parallel.group import Axes, AxisNames, Group
from jax_grouped_gemm._src.expert_parallel.layer import Choices, Schedule
from jax_grouped_gemm._src.expert_parallel.options import Auto, Combine, Save, Strategy, Wanted
from jax_grouped_gemm._src.expert_parallel.stats import ExpertParallelStats, group_stats
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.mlp.operands import ExpertWeights
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.weights import as_weights
from jax_grouped_gemm._src.rows.operands import (
    Biases,
    check_shapes,
    check_whole_routing,
    checked_biases,
)
from jax_grouped_gemm._src.rows.routing import Routing

FUNCTION = "expert_parallel_mlp"


def expert_parallel_mlp(
    x: jax.Array,
    routing: Routing,
    wi_0: jax.Array | QuantizedArray,
    wi_1: jax.Array | QuantizedArray | None,
    wo: jax.Array | QuantizedArray,
    *,
    expert_axis: AxisNames,
    tensor_axis: AxisNames | None = None,
    strategy: Strategy | Auto = "auto",
    chunks: int | Auto = "auto",
    buffer_factor: float | None = None,
    combine: Combine | Auto = "auto",
    overlap: bool | Auto = "auto",
    save: Save | Auto = "auto",
    max_sms: int | None = None,
    biases: Biases | None = None,
    activation: Any = "silu",
    apply_router_weight_on_input: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: Any = None,
    recipe: Recipe | None = None,
    quantized: QuantizedMlp | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, ExpertParallelStats]:
    """Computes `moe.dropless_mlp` with the experts divided among the devices of a mesh.

    Call it inside `jax.shard_map`, on each of N devices along `expert_axis`:

        def layer(x, gate, wi_0, wi_1, wo):
            routing = moe.route(x @ gate, top_k=2)
            y, stats = moe.expert_parallel_mlp(x, routing, wi_0, wi_1, wo, expert_axis="expert")
            return y, stats.max_over_mean

        specs = P("expert"), P(), P("expert"), P("expert"), P("expert")
        jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=(P("expert"), P()))

    With the strategy "all_gather", every device gathers the tokens of all devices and computes its
    experts for them. Partial results are added up on the device of each token. With the strategy
    "ragged_all_to_all", each row travels to its expert and back. That sends less data if tokens
    choose fewer experts than there are devices. Each device moves and multiplies only rows of its
    own experts. No row is dropped, and the host never waits: buffers have room for the worst case,
    and kernels do not read the unused end of a buffer, but write zeros to it.

    If tokens are replicated along a mesh axis of the layer (their type does not vary over it), they
    are not gathered along that axis, and a `psum` adds up the results along it.

    Args:
      x: this device's tokens [..., D]. All devices have the same number of tokens.
      routing: the result of `moe.route` for these tokens, on logits [..., E] of all E experts.
      wi_0, wi_1: this device's experts [E/N, D, F]. If `wi_1` is None, a hidden layer is
        activation(x wi_0). With `tensor_axis`, F is the size of this device's slice.
      wo: [E/N, F, D]. Each of the three may be a `jax_grouped_gemm.QuantizedArray`, see
        `moe.dropless_mlp`.
      expert_axis: the mesh axis, or axes, along which experts are divided, in order.
      tensor_axis: the mesh axis, or axes, along which hidden features are divided.
      strategy: "all_gather", "ragged_all_to_all", or "auto" for the one that is predicted to be
        faster, see `explain_expert_parallel`. "ragged_all_to_all" needs tokens that differ along
        `expert_axis` and along no other axis. It also needs GPUs of one process, because XLA by
        default runs this collective in one process only. On other platforms, and under
        `jax.vmap(spmd_axis_name=...)`, a reference that gathers takes its place. Under that `vmap`,
        "auto" is "all_gather".
      chunks: the number of parts into which tokens are divided. The layer computes one part after
        the other. The buffers for the worst case become smaller by this factor, but matrices are
        read, and their gradients added, once for each chunk. "auto" is one chunk, which is fastest.
      buffer_factor: None drops nothing. A number is the room for rows on a device, as a multiple of
        the rows of balanced experts. Rows beyond it are dropped and counted in `overflow`. A device
        drops the rows of its last experts first, and an expert drops the rows of its last tokens.
        With "all_gather" the tokens of all devices are in the order of the devices. If `combine` is
        "ppermute", a device's own tokens come first instead.
      combine: how partial results travel to the device that adds them up. "all_to_all" is one
        collective, "ppermute" one collective for each other device. Sums are in float32 at least,
        in a fixed order, and rounded once. The layer gathers tokens by the transpose of this
        collective, so that in the backward pass the collective itself adds up the gradients of
        tokens. "auto" is "ppermute" for two devices and with `overlap`, else "all_to_all".
      overlap: whether gradients of tokens travel while weight gradients are computed (True), or
        before that (False). True requires one chunk. "auto" is True for two devices, "ppermute" and
        one chunk. True is faster with copy engines, which `expert_parallel_compiler_options`
        requests from XLA. With NCCL's kernels no difference was measured.
      save: which form of the tokens is kept for the backward pass. "x" keeps the tokens of all
        devices. "rows" keeps the local rows, in buffers for the worst case. Both also keep gate and
        up, the products of the local rows with wi_0 and wi_1, which may have N times as many rows
        as in a layer on one device. "nothing" keeps none of these arrays: the backward pass gathers
        tokens again, and multiplies them by wi_0 and wi_1 again. "auto" is "rows" if copying tokens
        to rows again would take more than 1 % of a step and buffers have room for at most twice the
        rows of balanced experts. It is "x" in all other cases, and always with several chunks or a
        recipe.
      max_sms: the most multiprocessors that products use while gradients of tokens travel, so that
        NCCL's kernels can use the rest. None sets no limit; use None with copy engines. The limit
        does not apply to products in FP8.
      biases: biases of this device's experts, see `moe.dropless_mlp`. The bias of wo is the same
        on all devices along `tensor_axis`, and is added once.
      activation, apply_router_weight_on_input, precision, implementation, recipe: see
        `moe.dropless_mlp`.
      quantized: the result of `jax_grouped_gemm.quantize_mlp` for this device's experts, see
        `moe.dropless_mlp`; not with `tensor_axis`.
      batch_invariant: whether the bits of a token's result and of its gradient are independent of
        other tokens and of the number of devices, see `moe.dropless_mlp`. Each row then travels by
        itself, by "ragged_all_to_all", and the rows of a token are added up in the order of its
        choices, in float32 at least.

    Returns:
      y: [..., D] for this device's tokens, in the dtype to which x and the matrices promote.
      stats: the number of rows of each device, the largest of these numbers over their mean, and
        the number of dropped rows. They cost nothing if they are not used.

    Raises:
      TypeError: an operand is not an array, or shapes or dtypes of the operands do not fit
        together, such as E and the number of local experts.
      ValueError: the mesh lacks an axis, or an option is invalid; `batch_invariant` is
        given together with `buffer_factor`, `tensor_axis`, `combine` or the strategy "all_gather",
        or where "ragged_all_to_all" cannot run; or `quantized` is given with `tensor_axis` or
        without a recipe.
    """
    implementation = with_invariance(FUNCTION, implementation, batch_invariant)
    activation = as_activation(activation)
    checked_boolean("apply_router_weight_on_input", apply_router_weight_on_input)
    x, gate, down = as_array("x", x), as_weights("wi_0", wi_0), as_weights("wo", wo)
    up = None if wi_1 is None else as_weights("wi_1", wi_1)
    check_whole_routing(FUNCTION, routing)
    options = dict(strategy=strategy, chunks=chunks, combine=combine, overlap=overlap, save=save)
    options["batch_invariant"] = batch_invariant
    wanted = Wanted.checked(math.prod(x.shape[:-1]), **options, buffer_factor=buffer_factor)
    group = Group.of(expert_axis, tensor_axis, x, routing.experts, routing.weights)
    if wanted.batch_invariant:
        check_invariant(group.tensor)
    if quantized is not None and group.tensor:
        raise ValueError(
            f"{FUNCTION}: quantized must be None with tensor_axis, got {group.tensor}: gate and up "
            "are quantised as one matrix, which cannot be divided by hidden features"
        )
    check_shapes(FUNCTION, x, routing, gate, up, down, jnp.zeros((), jnp.int32))
    _check_experts(gate.shape[0], routing.logits.shape[-1], group)
    b0, b1, bo = checked_biases(FUNCTION, biases, x, gate, up, down)
    if bo is not None and group.tensor:
        bo = jnp.where(group.tensor_index() == 0, bo, 0)
    experts = LocalExperts(
        FUNCTION,
        ExpertWeights(wi_0=gate, wi_1=up, b0=b0, b1=b1, wo=down, bo=bo),
        apply_router_weight_on_input,
        activation,
        precision,
        implementation,
        recipe,
        quantized,
        max_sms=checked_limit(max_sms),
    )
    if not x.size:
        # XLA never finishes collectives without elements, so send nothing.
        nothing = vary_over(jnp.zeros((), jnp.int32), frozenset(group.every))
        y = x.astype(experts.weights.result_dtype(x))
        return y, group_stats(nothing, nothing, group)
    axes = frozenset(group.tokens)
    tokens = vary_over(x.reshape(-1, x.shape[-1]), axes)
    top_k = routing.experts.shape[-1]
    chosen = routing.experts
    every = math.prod(chosen.shape) * group.num_sources, routing.logits.shape[-1]
    experts, chosen = experts.by_plan(x, *every, chosen, are_copies=True)
    choices = Choices(
        vary_over(chosen.reshape(-1, top_k), axes),
        vary_over(routing.weights.reshape(-1, top_k), axes),
    )
    schedule = _schedule(group, tokens, experts, top_k, wanted)
    y, rows, kept = layer.run(tokens, choices, experts, group, schedule)
    return y.reshape(x.shape), group_stats(rows, kept, group)


def _schedule(
    group: Group,
    tokens: jax.Array,
    experts: LocalExperts,
    top_k: int,
    wanted: Wanted,
) -> Schedule:
    """Returns the options of a layer, with a predicted choice where `wanted` has "auto"."""
    differ = group.tokens == group.experts
    if wanted.strategy == "ragged_all_to_all" and not differ:
        raise ValueError(
            f"{FUNCTION}: strategy='ragged_all_to_all' needs tokens that differ along expert_axis "
            f"and no other axis, but these differ along {group.tokens or 'no axis of the layer'}"
        )
    can_exchange = differ and jax.process_count() == 1 and not is_mapped_over_mesh_axis()
    if wanted.batch_invariant and group.num_slices > 1 and not can_exchange:
        raise ValueError(
            f"{FUNCTION}: batch_invariant needs rows that travel to their experts, by the strategy "
            "'ragged_all_to_all': tokens must differ along expert_axis and no other axis, on GPUs "
            "of one process and outside of jax.vmap over a mesh axis"
        )
    shape = prediction.Shape(
        tokens.shape[0],
        tokens.shape[1],
        experts.weights.hidden_columns,
        experts.weights.count * group.num_slices,
        top_k,
        group.num_slices,
        tokens.dtype.itemsize,
        group.num_sources,
    )
    chosen = prediction.choose(
        shape,
        wanted,
        can_exchange=can_exchange,
        can_keep_rows=experts.recipe is None,
    )
    return Schedule(
        chosen.strategy,
        chosen.chunks,
        wanted.buffer_factor,
        chosen.combine,
        chosen.save,
        chosen.overlap,
    )


def check_invariant(tensor: Axes) -> None:
    """Raises a `ValueError` if devices along `tensor_axis` would add up parts of a sum."""
    if tensor:
        raise ValueError(
            f"{FUNCTION}: tensor_axis must be None with batch_invariant, got {tensor}: "
            "devices that have slices of hidden features add up parts of a sum"
        )


def checked_limit(max_sms: int | None) -> int | None:
    if max_sms is not None and checked_int("max_sms", max_sms) < 1:
        raise ValueError(f"{FUNCTION}: max_sms must be positive or None, got {max_sms}")
    return max_sms


def _check_experts(here: int, routed: int, group: Group) -> None:
    if here * group.num_slices != routed:
        axes = ", ".join(group.experts)
        raise TypeError(
            f"{FUNCTION}: the {group.num_slices} devices along {axes} hold {here} experts each, "
            f"but the router has {routed} experts; the devices must hold {routed} together, so the "
            "number of experts must be a multiple of the number of devices"
        )
