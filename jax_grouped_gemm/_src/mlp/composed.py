"""The MLP of experts as separate products, whose results are those of the fused kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.activations import Activation, hidden_layer
from jax_grouped_gemm._src.autodiff import recomputed
from jax_grouped_gemm._src.mlp.biases import with_bias
from jax_grouped_gemm._src.mlp.operands import ExpertWeights, Groups, MlpOperands

# The names that MaxText's remat policies use.
GATE, UP, RESULT = "mlpwi_0", "mlpwi_1", "mlpwo"

# Keep only gate and up for the backward pass: recomputing this elementwise step costs nothing
# compared to storing its three [m, F] float32 intermediates.
recomputed_hidden = recomputed(hidden_layer, static_argnums=0)

# The signature of `jax.lax.ragged_dot`.
RaggedDot = Callable[..., jax.Array]


def projections(
    ragged_dot: RaggedDot, x: jax.Array, experts: ExpertWeights, groups: Groups
) -> tuple[jax.Array, jax.Array | None]:
    """Returns gate and up (or None) [m, F] of rows [m, D], under their checkpoint names.

    Args:
      ragged_dot: computes the products; its other arguments are bound already.
      x: rows, sorted by expert.
      experts: the projections and their biases.
      groups: the groups of the rows.
    """
    product = functools.partial(with_bias, ragged_dot, groups, x)
    up = None
    if experts.wi is not None:
        gate, up = jnp.split(product(experts.wi, _both_biases(experts)), 2, axis=1)
    else:
        gate = product(experts.projections[0], experts.b0)
        if experts.wi_1 is not None:
            up = product(experts.wi_1, experts.b1)
    return checkpoint_name(gate, GATE), None if up is None else checkpoint_name(up, UP)


def mlp(ragged_dot: RaggedDot, activation: Activation, operands: MlpOperands) -> jax.Array:
    """Computes weights * (activation(x wi_0 + b0) * (x wi_1 + b1) wo + bo), hidden if wo is None.

    The router weight scales a row before the down projection instead of after it: the product is
    the same, and the backward pass needs no copy of the [m, D] result.

    Args:
      ragged_dot: see `projections`.
      activation: the activation of the hidden layer.
      operands: operands with the rows themselves, not with tokens.

    Returns:
      [m, D], or [m, F] without wo.
    """
    operands = operands.promoted()
    experts, groups, weights = operands.experts, operands.groups, operands.weights
    gate, up = projections(ragged_dot, operands.rows.x, experts, groups)
    hidden = recomputed_hidden(activation, gate, up, weights)
    if experts.wo is None:
        return hidden
    return with_bias(ragged_dot, groups, hidden, experts.wo, experts.bo, weights)


def _both_biases(experts: ExpertWeights) -> jax.Array | None:
    """Returns the biases of gate and up as one array [g, 2 F], or None if there are none."""
    biases = experts.b0, experts.b1
    known = [bias for bias in biases if bias is not None]
    if not known:
        return None
    zeros = jnp.zeros_like(known[0])
    return jnp.concatenate([zeros if bias is None else bias for bias in biases], axis=1)
