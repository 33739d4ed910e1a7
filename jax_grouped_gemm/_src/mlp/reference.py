"""The operations as compositions of ragged products: what every kernel must compute.

With the reference's products they are pure JAX. With the kernels' they run what no fused kernel
takes, and they are what jvp and vmap see.

Rounding: gate and up are rounded to the dtype of the operands before the activation. Hidden is
computed from those rounded values, in float32 at least, and rounded once. So what is fused, what is
not, and what is computed again agree but for the accuracy of the activation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_grouped_gemm._src.activations import Activation, hidden_layer
from jax_grouped_gemm._src.arithmetic import at_least_float32
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.moe.biases import with_bias
from jax_grouped_gemm._src.ragged.primitive import ragged_contracting, ragged_noncontracting
from jax_grouped_gemm._src.ragged.reference import local_group_bounds
from jax_grouped_gemm._src.tile_choices import TileChoices

# The names that MaxText's remat policies use.
GATE, UP = "mlpwi_0", "mlpwi_1"

# Of the elementwise step only gate and up are kept, not its float32 intermediates.
_hidden = jax.checkpoint(hidden_layer, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Products:
    """The ragged products of one MLP, with the options of its call."""

    precision: Any
    implementation: str | None = "reference"
    tile_choices: TileChoices = TileChoices()

    def rows(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        group_offset: jax.Array,
        preferred_element_type: np.dtype | None = None,
        *,
        transpose_rhs: bool = False,
    ) -> jax.Array:
        """[m, k] x [g, k, n] -> [m, n]; with `transpose_rhs`, a cotangent of rows."""
        return ragged_noncontracting(
            lhs,
            rhs,
            group_sizes,
            group_offset,
            transpose_lhs=False,
            transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type or jnp.result_type(lhs, rhs),
            precision=self.precision,
            implementation=self.implementation,
            **self.tile_choices.params("dgrad" if transpose_rhs else "forward"),
        )

    def weights(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        group_offset: jax.Array,
        *,
        num_groups: int,
    ) -> jax.Array:
        """[m, k] with [m, n] -> [num_groups, k, n], a cotangent of weights."""
        return ragged_contracting(
            lhs,
            rhs,
            group_sizes,
            group_offset,
            num_groups=num_groups,
            transpose_lhs=False,
            transpose_rhs=False,
            preferred_element_type=lhs.dtype,
            precision=self.precision,
            implementation=self.implementation,
            **self.tile_choices.params("wgrad"),
        )


def owned_rows(
    group_sizes: jax.Array, group_offset: jax.Array, num_groups: int, num_rows: int
) -> jax.Array:
    """Which rows a local group owns: booleans [num_rows]."""
    # Local groups follow each other without a gap; those that do not exist are 0 to 0.
    starts, ends = local_group_bounds(group_sizes, group_offset, num_groups, num_rows)
    first = jnp.min(jnp.where(ends > starts, starts, num_rows), initial=num_rows)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return (rows >= first) & (rows < jnp.max(ends, initial=0))


def row_weights(weights, owned, like) -> jax.Array:
    """Router weights, ones by default, and zero where no group owns the row."""
    weights = 1 if weights is None else weights
    return jnp.where(owned, weights, 0).astype(at_least_float32(like.dtype))


def on_rows(x: jax.Array, operands: Mapping[str, jax.Array]) -> jax.Array:
    """The rows of x [m, D], copies of tokens if `operands` has the rows of them."""
    if "rows" not in operands:
        return x
    return token_rows.gather(x, operands["rows"], operands.get("inverse"))


def gated_ragged_dot(
    *operands: jax.Array,
    names: Sequence[str],
    activation: Activation,
    residuals: bool,
    **options: Any,
) -> list[jax.Array]:
    """hidden [m, F] = weights * activation(x wi_0 + b0) * (x wi_1 + b1).

    Args:
      *operands: those of `names`: x [m, D], or [T, D] with rows [m] and perhaps inverse [T, k];
        wi_0 and, unless a hidden layer has no gate, wi_1 [g, D, F]; the biases b0 and b1 [g, F], if
        there are any; weights [m], if they are not ones; group_sizes int32 [G] and group_offset
        int32 [1].
      names: of the operands.
      activation: of the hidden layer.
      residuals: whether gate and up are results too.
      **options: of `Products`.

    Returns:
      hidden and, with `residuals`, gate and up. All are zero in rows that no local group owns.
    """
    given = dict(zip(names, operands, strict=True))
    x, wi_0, wi_1 = on_rows(given["x"], given), given["wi_0"], given.get("wi_1")
    sizes, offset = given["group_sizes"], given["group_offset"]
    matmul = functools.partial(
        with_bias, Products(**options).rows, group_sizes=sizes, group_offset=offset
    )
    gate = checkpoint_name(matmul(x, wi_0, given.get("b0")), GATE)
    up = None if wi_1 is None else checkpoint_name(matmul(x, wi_1, given.get("b1")), UP)
    owned = owned_rows(sizes, offset, wi_0.shape[0], x.shape[0])
    hidden = _hidden(activation, gate, up, row_weights(given.get("weights"), owned, gate))
    if not residuals:
        return [hidden]
    assert up is not None, "residuals are those of a gate and an up projection"
    return [hidden, gate, up]


def biased_ragged_dot(
    *operands: jax.Array, names: Sequence[str], activation: Activation | None = None, **options: Any
) -> jax.Array:
    """y [m, D] = hidden wo + weights bo, added up in float32 at least and rounded once.

    Args:
      *operands: those of `names`: hidden [m, F]; wo [g, F, D]; bo [g, D] and weights [m], if there
        are any; group_sizes and group_offset.
      names: of the operands.
      activation: none is applied.
      **options: of `Products`.
    """
    given = dict(zip(names, operands, strict=True))
    hidden, wo = given["hidden"], given["wo"]
    sizes, offset = given["group_sizes"], given["group_offset"]
    weights = None
    if "bo" in given:
        owned = owned_rows(sizes, offset, wo.shape[0], hidden.shape[0])
        weights = row_weights(given.get("weights"), owned, hidden)
    return with_bias(
        Products(**options).rows,
        hidden,
        wo,
        given.get("bo"),
        weights,
        group_sizes=sizes,
        group_offset=offset,
    )


def gated_ragged_dot_transpose(
    *operands: jax.Array, names: Sequence[str], activation: Activation, **options: Any
) -> list[jax.Array]:
    """The gradients of a hidden layer, which is computed again, from that of its product with wo.

    Args:
      *operands: those of `names`: dy [m, D]; wo [g, F, D]; gate and up [m, F]; weights float32 [m],
        if they are not ones; group_sizes and group_offset.
      names: of the operands.
      activation: of the hidden layer.
      **options: of `Products`.

    Returns:
      dgate, dup and hidden [m, F], and dweights float32 [m]. With dh = dy wo^T, rounded, dweights
      is the sum of dh * activation(gate) * up along a row. All are zero in rows that no local group
      owns.
    """
    given = dict(zip(names, operands, strict=True))
    gate, up, wo = given["gate"], given["up"], given["wo"]
    sizes, offset = given["group_sizes"], given["group_offset"]
    dh = Products(**options).rows(given["dy"], wo, sizes, offset, gate.dtype, transpose_rhs=True)
    owned = owned_rows(sizes, offset, wo.shape[0], gate.shape[0])
    gate, up = (jnp.where(owned[:, None], x, 0) for x in (gate, up))
    weights = row_weights(given.get("weights"), owned, gate)
    hidden, vjp = jax.vjp(functools.partial(hidden_layer, activation), gate, up, weights)
    dgate, dup, dweights = vjp(dh)
    return [dgate, dup, hidden, dweights]


def paired_ragged_dot(
    a0: jax.Array,
    a1: jax.Array,
    w0: jax.Array,
    w1: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    **options: Any,
) -> jax.Array:
    """a0 w0^T + a1 w1^T of [m, F] and [g, D, F] -> [m, D], added up in float32, rounded once."""
    indices = group_sizes, group_offset, at_least_float32(a0.dtype)
    product = functools.partial(Products(**options).rows, transpose_rhs=True)
    return (product(a0, w0, *indices) + product(a1, w1, *indices)).astype(a0.dtype)


def ragged_mlp_tangent(
    *operands: jax.Array, names: Sequence[str], activation: Activation, **options: Any
) -> jax.Array:
    """The tangent of y = hidden wo, linear in those of x, wi_0, wi_1, wo and weights.

    Args:
      *operands: those of `names`: the tangents, whose names end in "_dot"; x [T, D] with rows [m]
        and perhaps inverse [T, k], or x [m, D]; wi_0, wi_1, wo, gate, up, weights, group_sizes and
        group_offset as above.
      names: of the operands.
      activation: of the hidden layer.
      **options: of `Products`.

    Returns:
      [m, D].
    """
    given = dict(zip(names, operands, strict=True))
    gate, up, wo = given["gate"], given["up"], given["wo"]
    indices = given["group_sizes"], given["group_offset"]
    product = Products(**options).rows

    def projected(name, like):
        """The tangent of x times the weights of that name."""
        terms = []
        if "x_dot" in given:
            terms.append(product(on_rows(given["x_dot"], given), given[name], *indices))
        if f"{name}_dot" in given:
            terms.append(product(on_rows(given["x"], given), given[f"{name}_dot"], *indices))
        return sum(terms) if terms else jnp.zeros_like(like)

    owned = owned_rows(*indices, wo.shape[0], gate.shape[0])
    weights = row_weights(given.get("weights"), owned, gate)
    weights_dot = jnp.zeros_like(weights)
    if "weights_dot" in given:
        weights_dot = row_weights(given["weights_dot"], owned, gate)
    hidden, hidden_dot = jax.jvp(
        functools.partial(hidden_layer, activation),
        (gate, up, weights),
        (projected("wi_0", gate), projected("wi_1", up), weights_dot),
    )
    out = product(hidden_dot, wo, *indices)
    if "wo_dot" in given:
        out += product(hidden, given["wo_dot"], *indices)
    return out
