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
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.activations import Activation, hidden_layer
from jax_grouped_gemm._src.arrays import at_least_float32, vary_over, varying_axes
from jax_grouped_gemm._src.mlp import composed
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.biases import bias_rows, with_bias
from jax_grouped_gemm._src.plan import TileChoices
from jax_grouped_gemm._src.ragged.primitive import ragged_contracting, ragged_noncontracting
from jax_grouped_gemm._src.ragged.reference import owned_rows


@dataclasses.dataclass(frozen=True)
class Products:
    """The ragged products of one MLP, with the options of its call."""

    precision: Any
    implementation: str | None = "reference"
    tile_choices: TileChoices = TileChoices()
    zeroes_unowned: bool = True
    max_sms: int | None = None

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
            zeroes_unowned=self.zeroes_unowned,
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
        is_limited: bool = False,
    ) -> jax.Array:
        """[m, k] with [m, n] -> [num_groups, k, n], a cotangent of weights.

        With `is_limited` it fills `max_sms` multiprocessors at most.
        """
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
            max_sms=self.max_sms if is_limited else None,
            **self.tile_choices.params("wgrad"),
        )


def row_weights(weights, owned, like) -> jax.Array:
    """Router weights, ones by default, and zero where no group owns the row."""
    weights = 1 if weights is None else weights
    return jnp.where(owned, weights, 0).astype(at_least_float32(like.dtype))


def gated_ragged_dot(
    *operands: jax.Array,
    names: Sequence[str],
    activation: Activation,
    residuals: bool,
    **options: Any,
) -> list[jax.Array]:
    """hidden [m, F] = weights * activation(x wi_0 + b0) * (x wi_1 + b1).

    Args:
      *operands: those of `names`: x [m, D], or [T, D] with rows [m] and perhaps inverse [T, k] and
        count [1]; wi_0 and, unless a hidden layer has no gate, wi_1 [g, D, F], or wi [g, D, 2 F] of
        both; the biases b0 and b1 [g, F], if there are any; weights [m], if they are not ones;
        group_sizes int32 [G] and group_offset int32 [1].
      names: of the operands.
      activation: of the hidden layer.
      residuals: whether gate and up are results too.
      **options: of `Products`.

    Returns:
      hidden and, with `residuals`, gate and up. All are zero in rows that no local group owns.
    """
    given = dict(zip(names, operands, strict=True))
    x = token_rows.on_rows(given["x"], given)
    sizes, offset = given["group_sizes"], given["group_offset"]
    gate, up = composed.projections(Products(**options).rows, x, given)
    num_groups = given["wi" if "wi" in given else "wi_0"].shape[0]
    weights = row_weights(
        given.get("weights"), owned_rows(sizes, offset, num_groups, x.shape[0]), gate
    )
    hidden = composed.recomputed_hidden(activation, gate, up, weights)
    if not residuals:
        return [hidden]
    return [hidden, gate] if up is None else [hidden, gate, up]


def biased_ragged_dot(*operands: jax.Array, names: Sequence[str], **options: Any) -> jax.Array:
    """y [m, D] = hidden wo + weights bo, added up in float32 at least and rounded once.

    Args:
      *operands: those of `names`: hidden [m, F]; wo [g, F, D]; bo [g, D] and weights [m], if there
        are any; group_sizes and group_offset.
      names: of the operands.
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


def sums_of_groups(
    rows: jax.Array,
    weights: jax.Array | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    num_groups: int,
    implementation: str | None,
) -> jax.Array:
    """The sum of each group's rows [m, n], times `weights` [m]: [num_groups, n], float32 at least.

    A product with the weights as columns of the rows' dtype, so that rows are read once and as they
    are: their parts, which add up to as much of them as float32 has.
    """
    dtype = rows.dtype
    weights = jnp.ones(rows.shape[:1], dtype) if weights is None else weights
    columns = [weights.astype(dtype)]
    if dtype.itemsize < 4:
        columns = []
        for _ in range(3 if weights.dtype != dtype else 1):
            # Not a conversion there and back, which XLA may leave out.
            bits = jnp.finfo(dtype)
            part = lax.reduce_precision(weights, bits.nexp, bits.nmant)
            columns.append(part.astype(dtype))
            weights = weights - part
        # As many as TMA can address.
        columns += [jnp.zeros_like(columns[0])] * (16 // dtype.itemsize - len(columns))
    sums = ragged_contracting(
        vary_over(jnp.stack(columns, axis=1), varying_axes(rows)),
        rows,
        group_sizes,
        group_offset,
        num_groups=num_groups,
        transpose_lhs=False,
        transpose_rhs=False,
        preferred_element_type=at_least_float32(dtype),
        precision=lax.Precision.HIGHEST,
        implementation=implementation,
    )
    return sums.sum(axis=1)


def dots_with_biases(
    rows: jax.Array, biases: jax.Array, group_sizes: jax.Array, group_offset: jax.Array
) -> jax.Array:
    """<row, bias of its group> of rows [m, n] and biases [g, n]: [m], zero for rows of no group."""
    dtype = at_least_float32(rows.dtype)
    added = bias_rows(biases.astype(dtype), group_sizes, group_offset[0], rows.shape[0])
    dots = jnp.sum(rows.astype(dtype) * added, axis=1)
    owned = owned_rows(group_sizes, group_offset, biases.shape[0], rows.shape[0])
    return jnp.where(owned, dots, 0)


def gated_ragged_dot_transpose(
    *operands: jax.Array, names: Sequence[str], activation: Activation, **options: Any
) -> list[jax.Array]:
    """The gradients of a hidden layer, which is computed again, from that of its product with wo.

    Args:
      *operands: those of `names`: dy [m, D]; wo [g, F, D]; gate and, if there is one, up [m, F];
        weights float32 [m], if they are not ones; group_sizes and group_offset.
      names: of the operands.
      activation: of the hidden layer.
      **options: of `Products`.

    Returns:
      dgate, dup if there is an up, and hidden [m, F], and dweights float32 [m]. With dh = dy wo^T,
      rounded, dweights is the sum of dh * activation(gate) * up along a row. All are zero in rows
      that no local group owns.
    """
    given = dict(zip(names, operands, strict=True))
    gate, wo = given["gate"], given["wo"]
    sizes, offset = given["group_sizes"], given["group_offset"]
    dh = Products(**options).rows(given["dy"], wo, sizes, offset, gate.dtype, transpose_rhs=True)
    owned = owned_rows(sizes, offset, wo.shape[0], gate.shape[0])
    projected = [jnp.where(owned[:, None], given[x], 0) for x in ("gate", "up") if x in given]
    weights = row_weights(given.get("weights"), owned, gate)

    def of_projected(weights, gate, up=None):
        return hidden_layer(activation, gate, up, weights)

    hidden, vjp = jax.vjp(of_projected, weights, *projected)
    dweights, *gradients = vjp(dh)
    return [*gradients, hidden, dweights]


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


def paired_weight_gradients(
    *operands: jax.Array, names: Sequence[str], num_groups: int, **options: Any
) -> list[jax.Array]:
    """x^T d0 and x^T d1 of the rows of each group, both [num_groups, D, F].

    Args:
      *operands: those of `names`: x [T, D] with rows [m] and perhaps inverse [T, k] and count [1],
        or x [m, D]; d0 and d1 [m, F]; group_sizes and group_offset.
      names: of the operands.
      num_groups: local groups.
      **options: of `Products`.
    """
    given = dict(zip(names, operands, strict=True))
    x = token_rows.on_rows(given["x"], given)
    indices = given["group_sizes"], given["group_offset"]
    product = functools.partial(Products(**options).weights, num_groups=num_groups, is_limited=True)
    return [product(x, given[name], *indices) for name in ("d0", "d1")]


def ragged_mlp_tangent(
    *operands: jax.Array, names: Sequence[str], activation: Activation, **options: Any
) -> jax.Array:
    """The tangent of y = hidden wo + weights bo, linear in those of all factors and biases.

    Args:
      *operands: those of `names`: the tangents, whose names end in "_dot"; x [T, D] with rows [m]
        and perhaps inverse [T, k] and count [1], or x [m, D]; wi_0, wi_1, wi, wo, bo, gate, up,
        weights, group_sizes and group_offset as above.
      names: of the operands.
      activation: of the hidden layer.
      **options: of `Products`.

    Returns:
      [m, D].
    """
    given = dict(zip(names, operands, strict=True))
    gate, wo = given["gate"], given["wo"]
    indices = given["group_sizes"], given["group_offset"]
    product = Products(**options).rows

    def bias(name):
        """The bias of that name of each row, in float32 at least."""
        dtype = at_least_float32(gate.dtype)
        return bias_rows(given[name].astype(dtype), indices[0], indices[1][0], gate.shape[0])

    def projected(name, like):
        """The tangent of x times the weights of that name."""
        terms = []
        if "x_dot" in given:
            dx = token_rows.on_rows(given["x_dot"], given)
            terms.append(product(dx, given[name], *indices))
        if f"{name}_dot" in given:
            terms.append(
                product(token_rows.on_rows(given["x"], given), given[f"{name}_dot"], *indices)
            )
        return sum(terms) if terms else jnp.zeros_like(like)

    owned = owned_rows(*indices, wo.shape[0], gate.shape[0])
    weights = row_weights(given.get("weights"), owned, gate)
    weights_dot = jnp.zeros_like(weights)
    if "weights_dot" in given:
        weights_dot = row_weights(given["weights_dot"], owned, gate)
    primals = [given[name] for name in ("gate", "up") if name in given]
    if "wi" in given:
        tangents = jnp.split(projected("wi", jnp.concatenate(primals, axis=1)), 2, axis=1)
    else:
        tangents = [projected(f"wi_{i}", like) for i, like in enumerate(primals)]
    for i, name in enumerate(("b0_dot", "b1_dot")):
        if name in given:
            tangents[i] += bias(name).astype(gate.dtype)

    def of_projected(weights, gate, up=None):
        return hidden_layer(activation, gate, up, weights)

    hidden, hidden_dot = jax.jvp(of_projected, (weights, *primals), (weights_dot, *tangents))
    out = product(hidden_dot, wo, *indices)
    if "wo_dot" in given:
        out += product(hidden, given["wo_dot"], *indices)
    if "bo_dot" in given:
        out += (weights[:, None] * bias("bo_dot")).astype(out.dtype)
    if "bo" in given and "weights_dot" in given:
        out += (weights_dot[:, None] * bias("bo")).astype(out.dtype)
    return out
