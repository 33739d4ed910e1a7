"""The MLP of experts as separate products, whatever computes them: what the fused forms equal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.activations import Activation, hidden_layer
from jax_grouped_gemm._src.autodiff import recomputed
from jax_grouped_gemm._src.mlp.biases import with_bias

# The names that MaxText's remat policies use.
GATE, UP = "mlpwi_0", "mlpwi_1"

# Only gate and up are kept for the backward pass: computing this elementwise step again is free
# next to storing its three [m, F] float32 intermediates.
recomputed_hidden = recomputed(hidden_layer, static_argnums=0)

# The signature of `jax.lax.ragged_dot`.
RaggedDot = Callable[..., jax.Array]


FACTORS = ("x", "wi", "wi_0", "wi_1", "wo")


def promoted_dtype(operands: Mapping[str, jax.Array]) -> np.dtype:
    """The dtype to which x and the matrices promote, which is that of the result."""
    return np.dtype(jnp.result_type(*(operands[name] for name in FACTORS if name in operands)))


def promoted(operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`operands`, with x and the matrices in the dtype to which they promote."""
    dtype = promoted_dtype(operands)
    return {name: x.astype(dtype) if name in FACTORS else x for name, x in operands.items()}


def projections(
    ragged_dot: RaggedDot, x: jax.Array, given: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """gate and up [m, F] of rows [m, D], under their checkpoint names; up is None without wi_1.

    Args:
      ragged_dot: computes the products; its other arguments are bound already.
      x: rows, sorted by expert.
      given: wi_0 and perhaps wi_1 [g, D, F], or wi [g, D, 2 F] of both; perhaps b0 and b1 [g, F];
        group_sizes [G], and group_offset [1] or None.
    """
    product = _of_groups(ragged_dot, given)
    up = None
    if "wi" in given:
        gate, up = jnp.split(product(x, given["wi"], _both_biases(given)), 2, axis=1)
    else:
        gate = product(x, given["wi_0"], given.get("b0"))
        if "wi_1" in given:
            up = product(x, given["wi_1"], given.get("b1"))
    return checkpoint_name(gate, GATE), None if up is None else checkpoint_name(up, UP)


def mlp(
    ragged_dot: RaggedDot,
    activation: Activation,
    x: jax.Array,
    given: Mapping[str, Any],
    weights: jax.Array | None,
) -> jax.Array:
    """weights * (activation(x wi_0 + b0) * (x wi_1 + b1) wo + bo): [m, D], or hidden without wo.

    The router weight scales a row before the down projection instead of after it: the product is
    the same, and the backward pass needs no copy of the [m, D] result.

    Args:
      ragged_dot, x, given: see `projections`; given may have wo [g, F, D] and bo [g, D].
      activation: of the hidden layer.
      weights: [m], or None for ones.
    """
    given = promoted({**given, "x": x})
    hidden = recomputed_hidden(activation, *projections(ragged_dot, given["x"], given), weights)
    if "wo" not in given:
        return hidden
    return _of_groups(ragged_dot, given)(hidden, given["wo"], given.get("bo"), weights)


def _of_groups(ragged_dot: RaggedDot, given: Mapping[str, jax.Array]) -> RaggedDot:
    """Rows, matrices, a bias or None, and weights [m] of that bias or None, to rows."""
    groups = {name: given[name] for name in ("group_sizes", "group_offset")}
    return functools.partial(with_bias, ragged_dot, **groups)


def _both_biases(given: Mapping[str, jax.Array]) -> jax.Array | None:
    """The biases of gate and up as one [g, 2 F], None if there are none."""
    biases = [given.get(name) for name in ("b0", "b1")]
    known = [bias for bias in biases if bias is not None]
    if not known:
        return None
    zeros = jnp.zeros_like(known[0])
    return jnp.concatenate([zeros if bias is None else bias for bias in biases], axis=1)
