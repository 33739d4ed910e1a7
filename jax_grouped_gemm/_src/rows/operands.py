"""Checks the operands of the functions in `moe`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.export import register_namedtuple_serialization

from jax_grouped_gemm._src.arguments import as_array, check_floating, refuse_sharded
from jax_grouped_gemm._src.rows.routing import Routing, check_routing

Biases = tuple[jax.Array | None, jax.Array | None, jax.Array | None]
"""The biases of wi_0, wi_1 and wo: [E, F], [E, F] and [E, D]."""


class ExpertOrder(NamedTuple):
    """The T*k (token, choice) pairs sorted by expert; ties keep the token order."""

    order: jax.Array  # [T*k] int32, the pair that sorted row i holds
    inverse: jax.Array  # [T, k] int32, the sorted row that holds a token's choice
    group_sizes: jax.Array  # [E] int32, number of rows of every expert


register_namedtuple_serialization(ExpertOrder, serialized_name="jax_grouped_gemm.moe.ExpertOrder")


def check_whole_routing(function: str, routing: Routing) -> None:
    """Runs `check_routing`, and raises a `NotImplementedError` if explicit axes shard `routing`."""
    check_routing(function, routing)
    refuse_sharded(function, **{f"routing.{name}": x for name, x in routing._asdict().items()})


def checked_order(function: str, expert_order: ExpertOrder) -> tuple[jax.Array, jax.Array]:
    """Returns the order and its inverse; raises a `TypeError` if they are invalid."""
    if not isinstance(expert_order, ExpertOrder):
        raise TypeError(
            f"{function}: expert_order must be a moe.ExpertOrder, as moe.sort_by_expert returns, "
            f"got {type(expert_order).__name__}"
        )
    order, inverse = expert_order.order, expert_order.inverse
    if inverse.ndim != 2 or order.shape != (inverse.size,):
        raise TypeError(
            f"{function}: expert_order must have order [T*k] and inverse [T, k], got "
            f"{order.shape} and {inverse.shape}"
        )
    return order, inverse


def check_shapes(
    function: str,
    x: jax.Array,
    routing: Routing,
    wi_0: jax.Array,
    wi_1: jax.Array | None,
    wo: jax.Array,
    group_offset: jax.Array | None,
) -> None:
    """Raises a `TypeError` unless tokens, routing and matrices of a layer fit together."""
    factors = dict(x=x, wi_0=wi_0, wo=wo) | ({} if wi_1 is None else dict(wi_1=wi_1))
    check_floating(function, jnp.inexact, **factors)
    check_real(function, "routing.weights", routing.weights, *factors.values())
    if x.shape[:-1] != routing.experts.shape[:-1]:
        raise TypeError(
            f"{function}: x and routing must have the same leading dimensions, got x "
            f"{x.shape} and routing.experts {routing.experts.shape}"
        )
    if wi_0.ndim != 3 or wi_0.shape[1] != x.shape[-1]:
        raise TypeError(
            f"{function}: wi_0 must be [E, D, F] with D = x.shape[-1] = {x.shape[-1]}, "
            f"got {wi_0.shape}"
        )
    experts, embed, hidden = wi_0.shape
    if wi_1 is not None and wi_1.shape != wi_0.shape:
        raise TypeError(
            f"{function}: wi_1 must have the shape of wi_0 {wi_0.shape}, got {wi_1.shape}"
        )
    if wo.shape != (experts, hidden, embed):
        raise TypeError(
            f"{function}: wo must be [E, F, D] = {(experts, hidden, embed)} to match wi_0 "
            f"{wi_0.shape}, got {wo.shape}"
        )
    routed = routing.logits.shape[-1]
    if experts > routed or (group_offset is None and experts != routed):
        raise TypeError(
            f"{function}: the weights hold {experts} experts but the router has {routed} "
            f"(routing.logits {routing.logits.shape}); a smaller slice needs group_offset"
        )


def check_real(function: str, name: str, operand: jax.Array, *factors: jax.Array) -> None:
    """Raises a `TypeError` if only `operand` is complex: its imaginary part would be lost."""
    if jnp.iscomplexobj(operand) and not any(map(jnp.iscomplexobj, factors)):
        raise TypeError(
            f"{function}: {name} must be real if the other operands are real, got dtype "
            f"{operand.dtype}"
        )


def checked_biases(
    function: str,
    biases: Biases | None,
    x: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array | None,
    wo: jax.Array,
) -> list[jax.Array | None]:
    """Returns the biases of wi_0, wi_1 and wo; raises a `TypeError` if they do not fit."""
    if biases is None:
        return [None] * 3
    if not isinstance(biases, tuple | list) or len(biases) != 3:
        raise TypeError(
            f"{function}: biases must be a triple, for wi_0, wi_1 and wo, got "
            f"{type(biases).__name__}"
        )
    if wi_1 is None and biases[1] is not None:
        raise TypeError(f"{function}: biases[1] must be None where wi_1 is None")
    checked: list[jax.Array | None] = []
    for i, (bias, matrices) in enumerate(zip(biases, (wi_0, wi_1, wo), strict=True)):
        if bias is None or matrices is None:
            checked.append(None)
            continue
        bias = as_array(f"biases[{i}]", bias)
        factors = (a for a in (x, wi_0, wi_1, wo) if a is not None)
        check_real(function, f"biases[{i}]", bias, *factors)
        expected = matrices.shape[::2]
        if bias.shape != expected:
            raise TypeError(
                f"{function}: biases[{i}] must have shape {expected} to match "
                f"{matrices.shape}, got {bias.shape}"
            )
        checked.append(bias)
    return checked
