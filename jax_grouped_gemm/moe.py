"""Dropless mixture-of-experts (MoE) feed-forward layers as pure functions.

Every token is processed by its ``top_k`` best experts: there is no capacity, so no token is ever
dropped and no row is ever padded. Tokens are sorted by expert, and the experts' matrices meet them
in three ragged matmuls::

    logits = jnp.dot(x, gate, precision="highest")             # [..., D] -> [..., E]
    routing = moe.route(logits, top_k=2)                       # experts and weights [..., 2]
    y = moe.dropless_mlp(x, routing, wi_0, wi_1, wo)           # [..., D] -> [..., D]
    loss = task_loss + 1e-2 * moe.load_balancing_loss(routing) + 1e-3 * moe.router_z_loss(routing)

Shapes: D embed, F hidden, E experts, T tokens (all leading dimensions of ``x``), k = top_k.
Everything is deterministic, differentiable to any order in both modes, and works under jit, vmap,
scan, remat and shard_map.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.fp8.training import Recipe, fp8_ragged_dot
from jax_grouped_gemm._src.ragged.api import ragged_dot
from jax_grouped_gemm._src.varying import vary_over, varying_axes

Implementation = str | Callable[..., jax.Array] | None


class Routing(NamedTuple):
    """Which experts every token visits, and how much each of them counts."""

    logits: jax.Array  # [..., E], at least float32
    experts: jax.Array  # [..., k] int32, best expert first, all different
    weights: jax.Array  # [..., k], dtype of the logits


class ExpertOrder(NamedTuple):
    """The T*k (token, choice) pairs sorted by expert; ties keep the token order."""

    order: jax.Array  # [T*k] int32, the pair that sorted row i holds
    inverse: jax.Array  # [T*k] int32, the sorted row that holds pair i
    group_sizes: jax.Array  # [E] int32, number of rows of every expert


class AuxiliaryLosses(NamedTuple):
    """Unweighted router losses, scalars in the dtype of the router logits."""

    load_balancing: jax.Array
    router_z: jax.Array


def route(logits: jax.Array, top_k: int, *, renormalize: bool = True) -> Routing:
    """Choose ``top_k`` experts a token from router logits [..., E].

    With ``renormalize`` the k weights of a token sum to one: a softmax over the chosen logits,
    which equals softmax, top-k, then division by the sum (Mixtral, Qwen3). Without it they are the
    chosen entries of the softmax over all experts (Switch, OLMoE).

    Logits narrower than float32 are widened first: routing is cheap, and rounding it changes which
    experts are chosen.
    """
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"route: logits must be floating point, got {logits.dtype}")
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(
            f"route: top_k must be between 1 and the number of experts {logits.shape[-1]} "
            f"(logits {logits.shape}), got {top_k}"
        )
    logits = logits.astype(_accumulation_dtype(logits.dtype))
    chosen, experts = jax.lax.top_k(logits, top_k)
    normalizer = jax.nn.logsumexp(chosen if renormalize else logits, axis=-1, keepdims=True)
    return Routing(logits, experts, jnp.exp(chosen - normalizer))


def sort_by_expert(routing: Routing) -> ExpertOrder:
    """Order the (token, choice) pairs so that every expert owns one contiguous range of rows."""
    experts = routing.experts.reshape(-1)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    pairs = jnp.arange(order.size, dtype=jnp.int32)
    inverse = jnp.zeros_like(order).at[order].set(pairs, unique_indices=True)
    return ExpertOrder(order, inverse, _count_tokens(routing))


@jax.custom_jvp
def permute_rows(rows: jax.Array, permutation: jax.Array, inverse: jax.Array) -> jax.Array:
    """``rows[permutation]`` along axis 0, whose gradient is the gather ``ct[inverse]``.

    ``inverse`` must be the inverse of ``permutation``, both [rows.shape[0]]; this is not checked.
    """
    return jnp.asarray(rows).at[permutation].get(unique_indices=True, mode="promise_in_bounds")


@permute_rows.defjvp
def _permute_rows_jvp(primals, tangents):
    # JAX transposes a gather into a scatter-add, which is slow and, in general, not reproducible
    # on a GPU, and a scatter into a gather. A permutation is both, so the tangent map is written
    # as the scatter: reverse mode then runs gathers only.
    rows, permutation, inverse = primals
    tangent, _, _ = tangents
    permuted_tangent = (
        jnp.zeros_like(tangent)
        .at[inverse]
        .set(tangent, unique_indices=True, mode="promise_in_bounds")
    )
    return permute_rows(rows, permutation, inverse), permuted_tangent


def dispatch(x: jax.Array, expert_order: ExpertOrder) -> jax.Array:
    """Copy tokens [T, D] to their experts' rows [T*k, D], sorted by expert."""
    top_k = expert_order.order.size // x.shape[0]
    return permute_rows(jnp.repeat(x, top_k, axis=0), expert_order.order, expert_order.inverse)


def combine(rows: jax.Array, expert_order: ExpertOrder, top_k: int) -> jax.Array:
    """Sum the ``top_k`` rows of every token: [T*k, D] -> [T, D], the transpose of `dispatch`."""
    choices = permute_rows(rows, expert_order.inverse, expert_order.order)
    choices = choices.reshape(-1, top_k, rows.shape[-1])
    return choices.sum(axis=1, dtype=_accumulation_dtype(rows.dtype)).astype(rows.dtype)


# Only the two matmul results are kept for the backward pass: recomputing this elementwise step is
# free next to storing its three [T*k, F] float32 intermediates.
@functools.partial(jax.checkpoint, static_argnums=3)
def gated_activation(
    gate: jax.Array, up: jax.Array, weights: jax.Array, activation: Callable = jax.nn.silu
) -> jax.Array:
    """``activation(gate) * up * weights`` for gate, up [m, F] and weights [m], rounded once."""
    dtype = _accumulation_dtype(gate.dtype)
    hidden = activation(gate.astype(dtype)) * up.astype(dtype) * weights.astype(dtype)[:, None]
    return hidden.astype(gate.dtype)


def dropless_mlp(
    x: jax.Array,
    routing: Routing,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    precision: jax.lax.PrecisionLike = None,
    group_offset: jax.Array | None = None,
    implementation: Implementation = None,
    recipe: Recipe | None = None,
) -> jax.Array:
    """Gated expert MLPs: sum over a token's experts e of w_e * ((act(x wi_0) * (x wi_1)) wo).

    Args:
      x: tokens [..., D].
      routing: the result of `route` on logits [..., E] with the same leading dimensions.
      wi_0, wi_1: gate and up projections [E, D, F].
      wo: down projections [E, F, D].
      activation: elementwise function of the gate projection, computed in at least float32.
      precision: as in `jax.lax.ragged_dot`.
      group_offset: scalar, the first expert that the weights hold, when they hold only a slice of
        the experts. Other experts then contribute exactly zero, so under shard_map with
        ``group_offset = axis_index * experts_per_device`` the sum over devices (``jax.lax.psum``)
        is the whole layer.
      implementation: of the ragged matmuls: None, "cuda" or "reference" as in
        `jax_grouped_gemm.ragged_dot`, or any function with the signature of `jax.lax.ragged_dot`.
      recipe: computes the matmuls in FP8 with `jax_grouped_gemm.fp8_ragged_dot`, differentiable
        once; None computes them in the dtype of their operands.

    Returns:
      [..., D], in the dtype to which x and the weights promote.

    Raises:
      ValueError: shapes of the operands do not fit together, or a recipe is given together with a
        precision or with a function as the implementation.
    """
    _check_shapes(x, routing, wi_0, wi_1, wo, group_offset)
    # Inside shard_map the gradient of replicated tokens is summed over devices where they are cast
    # to vary. Here that sum carries [T, D]; left to the matmuls it would carry [T*k, D] twice.
    x = vary_over(x, varying_axes(x, wi_0, wi_1, wo))
    expert_order = sort_by_expert(routing)
    matmul = functools.partial(
        _ragged_dot(implementation, precision, recipe),
        group_sizes=expert_order.group_sizes,
        group_offset=group_offset,
    )
    rows = dispatch(x.reshape(-1, x.shape[-1]), expert_order)
    weights = permute_rows(routing.weights.reshape(-1), expert_order.order, expert_order.inverse)
    # The names that MaxText's remat policies use.
    gate = checkpoint_name(matmul(rows, wi_0), "mlpwi_0")
    up = checkpoint_name(matmul(rows, wi_1), "mlpwi_1")
    # The router weight scales a row before the down projection instead of after it: the product is
    # the same, and the backward pass needs no copy of the [T*k, D] result.
    hidden = gated_activation(gate, up, weights, activation)
    out = checkpoint_name(matmul(hidden, wo), "mlpwo")
    return combine(out, expert_order, routing.experts.shape[-1]).reshape(x.shape)


def load_balancing_loss(routing: Routing) -> jax.Array:
    """E * sum_e f_e p_e: f_e the share of choices, p_e the mean probability of expert e.

    One for a balanced router, E for a router that sends everything to one expert; gradients flow
    through p only. Equations 4 to 6 of Switch Transformers (arXiv:2101.03961), with f counted over
    all k choices.
    """
    num_experts = routing.logits.shape[-1]
    probabilities = jax.nn.softmax(routing.logits, axis=-1).reshape(-1, num_experts)
    share = _count_tokens(routing) / routing.experts.size
    return num_experts * jnp.sum(share * probabilities.mean(axis=0))


def router_z_loss(routing: Routing) -> jax.Array:
    """Mean squared log-partition of the router: keeps logits small (ST-MoE, arXiv:2202.08906)."""
    return jnp.mean(jax.nn.logsumexp(routing.logits, axis=-1) ** 2)


def auxiliary_losses(routing: Routing) -> AuxiliaryLosses:
    """Both router losses; multiply them by about 1e-2 and 1e-3 and add them to the task's loss."""
    return AuxiliaryLosses(load_balancing_loss(routing), router_z_loss(routing))


def _accumulation_dtype(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _count_tokens(routing: Routing) -> jax.Array:
    # Comparing and counting is one fused reduction; a bincount is a scatter-add that piles up on
    # E addresses.
    experts = jnp.arange(routing.logits.shape[-1], dtype=routing.experts.dtype)
    return jnp.sum(routing.experts.reshape(-1, 1) == experts, axis=0, dtype=jnp.int32)


def _ragged_dot(implementation, precision, recipe) -> Callable[..., jax.Array]:
    if recipe is not None:
        if callable(implementation) or precision is not None:
            raise ValueError(
                "dropless_mlp: recipe decides how the matmuls are computed, so that precision must "
                f"be None and implementation no function, got precision={precision!r} and "
                f"implementation={implementation!r}"
            )
        return functools.partial(fp8_ragged_dot, recipe=recipe, implementation=implementation)
    if callable(implementation):
        return functools.partial(implementation, precision=precision)
    return functools.partial(ragged_dot, precision=precision, implementation=implementation)


def _check_shapes(x, routing, wi_0, wi_1, wo, group_offset):
    if x.shape[:-1] != routing.experts.shape[:-1]:
        raise ValueError(
            "dropless_mlp: x and routing must have the same leading dimensions, got x "
            f"{x.shape} and routing.experts {routing.experts.shape}"
        )
    if wi_0.ndim != 3 or wi_0.shape[1] != x.shape[-1]:
        raise ValueError(
            f"dropless_mlp: wi_0 must be [E, D, F] with D = x.shape[-1] = {x.shape[-1]}, "
            f"got {wi_0.shape}"
        )
    experts, embed, hidden = wi_0.shape
    if wi_1.shape != wi_0.shape:
        raise ValueError(
            f"dropless_mlp: wi_1 must have the shape of wi_0 {wi_0.shape}, got {wi_1.shape}"
        )
    if wo.shape != (experts, hidden, embed):
        raise ValueError(
            f"dropless_mlp: wo must be [E, F, D] = {(experts, hidden, embed)} to match wi_0 "
            f"{wi_0.shape}, got {wo.shape}"
        )
    routed = routing.logits.shape[-1]
    if experts > routed or (group_offset is None and experts != routed):
        raise ValueError(
            f"dropless_mlp: the weights hold {experts} experts but the router has {routed} "
            f"(routing.logits {routing.logits.shape}); a smaller slice needs group_offset"
        )
