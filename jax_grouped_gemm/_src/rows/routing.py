"""Routes tokens to experts, and computes the losses that keep a router balanced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import (
    as_array,
    as_indices,
    checked_boolean,
    checked_choice,
    checked_int,
    checked_real,
)
from jax_grouped_gemm._src.arrays import at_least_float32, is_static

ShareOf = Literal["choices", "tokens"]
Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"] | Callable[[jax.Array], jax.Array]


def _log_sqrt_softplus(x: jax.Array) -> jax.Array:
    # Far below zero, softplus is exp(x) (1 - exp(x) / 2), which underflows, so use its logarithm.
    is_far = x < -20
    near = jnp.log(jax.nn.softplus(jnp.where(is_far, 0, x)))
    return jnp.where(is_far, x - jnp.exp(x) / 2, near) / 2


# These functions return logarithms of scores (up to a constant for each token), because scores of
# logits far below zero underflow.
LOG_SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": lambda logits: logits,
    "sigmoid": jax.nn.log_sigmoid,
    "sqrt_softplus": _log_sqrt_softplus,
}
SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    # Do not use `sqrt`, because its slope is infinite at zero.
    "sqrt_softplus": lambda logits: jnp.exp(_log_sqrt_softplus(logits)),
}


class Routing(NamedTuple):
    """The experts that every token visits, and their weights."""

    logits: jax.Array  # [..., E], at least float32
    experts: jax.Array  # [..., k] int32, best expert first, all different
    weights: jax.Array  # [..., k], dtype of the logits


class AuxiliaryLosses(NamedTuple):
    """Unweighted router losses, scalars in the dtype of the router logits."""

    load_balancing: jax.Array
    router_z: jax.Array


register_namedtuple_serialization(Routing, serialized_name="jax_grouped_gemm.moe.Routing")
register_namedtuple_serialization(
    AuxiliaryLosses, serialized_name="jax_grouped_gemm.moe.AuxiliaryLosses"
)


def route(
    logits: jax.Array,
    top_k: int,
    *,
    renormalize: bool = True,
    scoring: Scoring = "softmax",
    correction_bias: jax.Array | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    scale: ArrayLike = 1.0,
) -> Routing:
    """Chooses ``top_k`` experts for each token from router logits [..., E].

    With ``renormalize`` the k weights of a token sum to one. They are a softmax over the chosen
    logits, which equals softmax, top-k, then division by the sum (Mixtral, Qwen3, GPT-OSS). Without
    ``renormalize``, weights are the chosen entries of the softmax over all experts (Switch, OLMoE).

    Other models have these options:

    - Llama 4: ``scoring="sigmoid", renormalize=False``
    - DeepSeek-V2: ``renormalize=False, num_groups=8, top_groups=3, scale=16.0``
    - DeepSeek-V3: ``scoring="sigmoid", correction_bias=bias, num_groups=8, top_groups=4,
      scale=2.5`` (arXiv:2412.19437, section 2.1.2)

    Logits of 16 bits are converted to float32 first, because rounding could choose other experts.

    Args:
      logits: [..., E], floating point.
      top_k: number of experts for each token.
      renormalize: whether a token's weights are divided by their sum. For a named scoring the
        division uses logarithms, so that weights sum to one even if all logits are far below zero.
      scoring: the function from logits to scores: "softmax" over the experts, "sigmoid",
        "sqrt_softplus", or any elementwise function. Weights are the scores of the chosen experts.
      correction_bias: [E], added to the scores to choose experts, but not to the weights.
      num_groups: number of groups into which consecutive experts are divided.
      top_groups: number of groups from which a token chooses its experts: the groups whose best
        expert has the largest score or, with `correction_bias`, whose two best experts have the
        largest sum.
      scale: a number that multiplies all final weights.

    Returns:
      The logits [..., E], and the experts and weights [..., k] of every token.

    Raises:
      TypeError: logits, correction_bias or the result of scoring have an unsuitable dtype or shape,
        scale is not a real number, or top_k, num_groups or top_groups is not an integer.
      ValueError: top_k, num_groups or top_groups do not fit the number of experts, or no scoring
        has this name.
    """
    logits = as_array("logits", logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating) or not logits.ndim:
        raise TypeError(
            f"route: logits must be [..., E], floating point, got {logits.dtype} of shape "
            f"{logits.shape}"
        )
    num_experts = logits.shape[-1]
    top_k = checked_int("top_k", top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"route: top_k must be between 1 and the number of experts {num_experts} "
            f"(logits {logits.shape}), got {top_k}"
        )
    checked_boolean("renormalize", renormalize)
    if not callable(scoring) and not (isinstance(scoring, str) and scoring in SCORES):
        raise ValueError(f"scoring must be callable or one of {sorted(SCORES)}, got {scoring!r}")
    logits = logits.astype(at_least_float32(logits.dtype))
    scale = _checked_scale(scale, logits.dtype)
    # Named scorings increase with the logits. So logits choose the same experts, and have fewer
    # ties than rounded scores.
    given = _checked_scores(scoring(logits), logits) if callable(scoring) else logits
    criterion = given
    if correction_bias is not None:
        bias = as_array("correction_bias", correction_bias)
        if bias.shape != (num_experts,) or not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(
                f"route: correction_bias must be [E] = ({num_experts},), floating point, got "
                f"{bias.dtype} of shape {bias.shape}"
            )
        criterion = given if callable(scoring) else SCORES[scoring](logits)
        criterion += jnp.expand_dims(bias.astype(logits.dtype), range(logits.ndim - 1))
    if num_groups is not None or top_groups is not None:
        best_of_group = 1 if correction_bias is None else 2
        criterion = _within_groups(criterion, top_k, num_groups, top_groups, best_of_group)
    _, experts = jax.lax.top_k(criterion, top_k)

    def chosen(x):
        return jnp.take_along_axis(x, experts, axis=-1)

    if renormalize and not callable(scoring):
        # Clip minus infinity, which masked experts have, because differences of infinities are NaN.
        picked = jnp.maximum(chosen(LOG_SCORES[scoring](logits)), jnp.finfo(logits.dtype).min)
        weights = jax.nn.softmax(picked, axis=-1)
    else:
        weights = chosen(given if callable(scoring) else SCORES[scoring](logits))
        if renormalize:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
    return Routing(logits, experts, weights * scale)


def _checked_scale(scale: Any, dtype: Any) -> jax.Array | float:
    """Returns `scale` as a number or a scalar of `dtype`, so that it keeps the weights' dtype."""
    if not isinstance(scale, jax.Array | np.ndarray):
        return checked_real("route: scale", scale)
    is_real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    if scale.shape or not is_real:
        raise TypeError(
            f"route: scale must be a real number, got {scale.dtype} of shape {scale.shape}"
        )
    return jnp.asarray(scale).astype(dtype)


def _checked_scores(scores: Any, logits: jax.Array) -> jax.Array:
    """Returns the result of a scoring function in the dtype of the logits."""
    scores = as_array("route: what scoring returns", scores)
    if scores.shape != logits.shape or not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(
            f"route: scoring must return floating point scores of the shape of the logits "
            f"{logits.shape}, got {scores.dtype} of shape {scores.shape}"
        )
    return scores.astype(logits.dtype)


def _within_groups(
    criterion: jax.Array, top_k: int, num_groups: Any, top_groups: Any, best_of_group: int
) -> jax.Array:
    """Returns `criterion` in a token's best `top_groups` groups, minus infinity elsewhere."""
    num_experts = criterion.shape[-1]
    num_groups = checked_int("num_groups", num_groups)
    top_groups = checked_int("top_groups", top_groups)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(
            f"route: num_groups must divide the number of experts {num_experts}, got {num_groups}"
        )
    size = num_experts // num_groups
    if not 1 <= top_groups <= num_groups or top_groups * size < top_k:
        raise ValueError(
            f"route: top_groups must be between 1 and num_groups = {num_groups} and leave at least "
            f"top_k = {top_k} experts in groups of {size}, got {top_groups}"
        )
    grouped = criterion.reshape(*criterion.shape[:-1], num_groups, size)
    best = jax.lax.top_k(grouped, min(best_of_group, size))[0].sum(axis=-1)
    _, kept = jax.lax.top_k(best, top_groups)
    is_kept = jax.nn.one_hot(kept, num_groups, dtype=bool).any(axis=-2)
    return jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(criterion.shape)


def check_routing(function: str, routing: Routing) -> None:
    """Raises a `TypeError` unless `routing` is a result of `route`, with matching shapes."""
    if not isinstance(routing, Routing):
        raise TypeError(
            f"{function}: routing must be a moe.Routing, as moe.route returns, got "
            f"{type(routing).__name__}"
        )
    for name, x in routing._asdict().items():
        as_array(f"{function}: routing.{name}", x)
    if not jnp.issubdtype(routing.experts.dtype, jnp.integer):
        raise TypeError(
            f"{function}: routing.experts must be integers, got dtype {routing.experts.dtype}"
        )
    logits, experts, weights = (x.shape for x in routing)
    if not experts or experts != weights or logits[:-1] != experts[:-1]:
        raise TypeError(
            f"{function}: routing must have logits [..., E], experts and weights [..., k], got "
            f"{logits}, {experts} and {weights}"
        )


def mask_tokens(routing: Routing, mask: ArrayLike) -> Routing:
    """Returns a routing whose padding tokens visit no expert: experts are -1, and weights 0.

    Layers do no work for padding tokens, whose results and gradients are zero. `group_sizes` of
    `sort_by_expert` then counts real tokens only. No group owns the rows of padding tokens, so
    `jax_grouped_gemm.check_groups` needs ``unowned_rows=True``.

    Args:
      routing: the result of `route`.
      mask: booleans [...] in the leading dimensions of the logits, False for padding tokens.

    Raises:
      TypeError: `routing` is not a `Routing`, or `mask` has an unsuitable dtype or shape.
    """
    check_routing("mask_tokens", routing)
    is_real = checked_mask("mask_tokens", mask, "logits", routing.logits)[..., None]
    # Convert to int32, because in an unsigned dtype -1 would be a large index.
    experts = jnp.where(is_real, as_indices("routing.experts", routing.experts), -1)
    return routing._replace(experts=experts, weights=jnp.where(is_real, routing.weights, 0))


def checked_mask(function: str, mask: ArrayLike, name: str, operand: jax.Array) -> jax.Array:
    """Returns `mask` as an array; raises a `TypeError` unless it has a boolean for each token.

    Tokens are the rows of `operand` [..., n], whose `name` is for messages.
    """
    mask = as_array(f"{function}: mask", mask)
    if mask.dtype != bool or mask.shape != operand.shape[:-1]:
        raise TypeError(
            f"{function}: mask must be bool {operand.shape[:-1]}, the leading dimensions of "
            f"{name} {operand.shape}, got {mask.dtype} of shape {mask.shape}"
        )
    return mask


def count_tokens(routing: Routing, mask: jax.Array | None = None) -> jax.Array:
    """Returns the number of tokens in the mask that choose each expert, int32 [E]."""
    # Compare and count in one fused reduction, because a bincount is a scatter-add with many
    # conflicts at E addresses.
    experts = jnp.arange(routing.logits.shape[-1], dtype=jnp.int32)
    chosen = jnp.expand_dims(as_indices("routing.experts", routing.experts), -1)
    # Do not reshape, because tokens may be split along explicit mesh axes.
    experts = jnp.expand_dims(experts, range(chosen.ndim - 1))
    is_chosen = chosen == experts
    if mask is not None:
        is_chosen &= mask[..., None, None]
    return jnp.sum(is_chosen, axis=range(chosen.ndim - 1), dtype=jnp.int32)


def load_balancing_loss(
    routing: Routing, *, share_of: ShareOf = "choices", mask: ArrayLike | None = None
) -> jax.Array:
    """Returns E * sum_e f_e p_e, which is smallest if the router uses all experts equally.

    Here f_e is the share of choices of expert e, and p_e is its mean probability: p is the softmax
    of the logits, whatever the scoring. The loss is one for a balanced router, E for a router that
    sends everything to one expert, and zero if there are no tokens. Gradients flow through p only.
    The formulas are equations 4 to 6 of Switch Transformers (arXiv:2101.03961), with f counted over
    all k choices. Hugging Face's models use the share of tokens that choose an expert, which is k
    times as large. Use ``share_of="tokens"`` with the loss coefficients of their configurations.

    Args:
      routing: the result of `route`.
      share_of: "choices" or "tokens".
      mask: booleans [...] in the leading dimensions of the logits, False for padding tokens. The
        loss ignores padding tokens, and their gradients are zero.

    Raises:
      TypeError: `routing` is not a `Routing`, or `mask` has an unsuitable dtype or shape.
      ValueError: `share_of` is invalid.
      NotImplementedError: `routing` has 2^31 choices or more.
    """
    check_routing("load_balancing_loss", routing)
    checked_choice("share_of", share_of, get_args(ShareOf))
    logits, mask = _with_mask("load_balancing_loss", routing, mask)
    is_known = is_static(*routing.experts.shape)
    if is_known and routing.experts.size > np.iinfo(np.int32).max:
        raise NotImplementedError(
            f"load_balancing_loss: routing.experts {routing.experts.shape} has "
            f"{routing.experts.size} choices, beyond the limit 2^31 - 1 of int32 counts"
        )
    num_experts = logits.shape[-1]
    counts = count_tokens(routing, mask)
    per_token = routing.experts.shape[-1] if share_of == "choices" else 1
    share = counts / _at_least_one(per_token * _num_tokens(logits, mask))
    return num_experts * jnp.sum(share * _mean(jax.nn.softmax(logits, axis=-1), logits, mask))


def router_z_loss(routing: Routing, *, mask: ArrayLike | None = None) -> jax.Array:
    """Returns the mean squared logsumexp, which keeps logits small (ST-MoE, arXiv:2202.08906).

    Args:
      routing: the result of `route`.
      mask: see `load_balancing_loss`.
    """
    check_routing("router_z_loss", routing)
    logits, mask = _with_mask("router_z_loss", routing, mask)
    return _mean(jax.nn.logsumexp(logits, axis=-1) ** 2, logits, mask)


def auxiliary_losses(
    routing: Routing, *, share_of: ShareOf = "choices", mask: ArrayLike | None = None
) -> AuxiliaryLosses:
    """Returns both router losses. Add them to the task's loss with weights of about 1e-2 and 1e-3.

    Args:
      routing: the result of `route`.
      share_of, mask: see `load_balancing_loss`.
    """
    check_routing("auxiliary_losses", routing)
    balance = load_balancing_loss(routing, share_of=share_of, mask=mask)
    return AuxiliaryLosses(balance, router_z_loss(routing, mask=mask))


def _with_mask(
    function: str, routing: Routing, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits, zero for tokens outside the mask, and the mask as a checked array."""
    logits = routing.logits
    if mask is None:
        return logits, None
    mask = checked_mask(function, mask, "logits", logits)
    if is_static(*mask.shape) and mask.size > np.iinfo(np.int32).max:
        raise NotImplementedError(
            f"{function}: mask {mask.shape} has {mask.size} tokens, beyond the limit 2^31 - 1 of "
            "int32 counts"
        )
    # Mask before the loss, because the gradient of a masked NaN would be zero times NaN.
    return jnp.where(mask[..., None], logits, 0), mask


def _num_tokens(logits: jax.Array, mask: jax.Array | None) -> int | jax.Array:
    return math.prod(logits.shape[:-1]) if mask is None else jnp.sum(mask, dtype=jnp.int32)


def _at_least_one(count: int | jax.Array) -> int | jax.Array:
    return max(count, 1) if isinstance(count, int) else jnp.maximum(count, 1)


def _mean(x: jax.Array, logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns the mean over tokens in the mask; zero if there are none."""
    axes = tuple(range(logits.ndim - 1))
    if mask is not None:
        x = jnp.where(jnp.expand_dims(mask, range(mask.ndim, x.ndim)), x, 0)
    count = _at_least_one(_num_tokens(logits, mask))
    if isinstance(count, int):
        return x.sum(axis=axes) / float(count)  # JAX takes no int past int32
    return x.sum(axis=axes) / jnp.asarray(count, x.dtype)
