"""The operations as compositions of ragged products: what every kernel must compute.

With the products of the reference, these compositions are pure JAX. With products by kernels, they
run the calls that no fused kernel takes. jvp and vmap always see these compositions.

Rounding: gate and up are rounded to the dtype of the operands before the activation. Hidden is
computed from the rounded values, in float32 at least, and rounded once. So fused, composed and
recomputed results agree except for the accuracy of the activation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.activations import Activation, hidden_layer
from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.arrays import at_least_float32, vary_over, varying_axes
from jax_grouped_gemm._src.mlp import composed
from jax_grouped_gemm._src.mlp.biases import bias_rows, with_bias
from jax_grouped_gemm._src.mlp.operands import (
    DownOperands,
    DownWeightsOperands,
    GradientOperands,
    Groups,
    MlpOperands,
    PairedOperands,
    PairedWeightsOperands,
    TangentOperands,
)
from jax_grouped_gemm._src.mlp.rows import combine, on_rows
from jax_grouped_gemm._src.ragged.primitive import ragged_contracting, ragged_noncontracting
from jax_grouped_gemm._src.ragged.reference import owned_rows
from jax_grouped_gemm._src.tile_choices import TileChoices


@dataclasses.dataclass(frozen=True)
class Products:
    """The ragged products of one MLP, with the options of its call."""

    precision: Any
    implementation: Implementation = "xla"
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
        """Multiplies [m, k] x [g, k, n] -> [m, n]; with `transpose_rhs`, a cotangent of rows."""
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
        """Contracts the rows of [m, k] and [m, n]: [num_groups, k, n], a cotangent of weights.

        The product uses at most `max_sms` multiprocessors if `is_limited`.
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
    """Returns the weights of rows, ones by default, and zero where no group owns the row."""
    weights = 1 if weights is None else weights
    return jnp.where(owned, weights, 0).astype(at_least_float32(like.dtype))


def gated_ragged_dot(
    given: MlpOperands, *, activation: Activation, residuals: bool, **options: Any
) -> list[jax.Array]:
    """Computes hidden [m, F] = weights * activation(x wi_0 + b0) * (x wi_1 + b1).

    Args:
      given: operands without `wo` and `bo`.
      activation: the activation of the hidden layer.
      residuals: whether gate and up are results too.
      **options: the fields of `Products`.

    Returns:
      hidden and, with `residuals`, gate and up. All are zero in rows that no local group owns.
    """
    x, product = on_rows(given.rows), Products(**options).rows
    gate, up = composed.projections(product, x, given.experts, given.groups)
    owned = owned_rows(*given.groups.indices, given.experts.count, x.shape[0])
    weights = row_weights(given.weights, owned, gate)
    hidden = composed.recomputed_hidden(activation, gate, up, weights)
    if not residuals:
        return [hidden]
    return [hidden, gate] if up is None else [hidden, gate, up]


def biased_ragged_dot(given: DownOperands, **options: Any) -> jax.Array:
    """Computes y [m, D] = hidden wo + weights bo, in float32 at least, and rounds once.

    `options` are the fields of `Products`.
    """
    hidden, wo, weights = given.hidden, given.wo, None
    if given.bo is not None:
        owned = owned_rows(*given.groups.indices, wo.shape[0], hidden.shape[0])
        weights = row_weights(given.weights, owned, hidden)
    return with_bias(Products(**options).rows, given.groups, hidden, wo, given.bo, weights)


def sums_of_groups(
    rows: jax.Array,
    weights: jax.Array | None,
    groups: Groups,
    *,
    num_groups: int,
    implementation: Implementation,
) -> jax.Array:
    """Adds up each group's rows [m, n] times `weights` [m]: [num_groups, n], float32 at least.

    The sums are a product of the rows with columns in the dtype of the rows. If rows have 16 bits,
    float32 weights are split into three columns. So rows are read once, without conversion.
    """
    dtype = rows.dtype
    weights = jnp.ones(rows.shape[:1], dtype) if weights is None else weights
    columns = [weights.astype(dtype)]
    if dtype.itemsize < 4:
        columns = []
        for _ in range(3 if weights.dtype != dtype else 1):
            # XLA may remove a conversion to the dtype and back, so round in another way.
            bits = jnp.finfo(dtype)
            part = lax.reduce_precision(weights, bits.nexp, bits.nmant)
            columns.append(part.astype(dtype))
            weights = weights - part
        # Pad to 16 bytes of columns, which TMA needs.
        columns += [jnp.zeros_like(columns[0])] * (16 // dtype.itemsize - len(columns))
    sums = ragged_contracting(
        vary_over(jnp.stack(columns, axis=1), varying_axes(rows)),
        rows,
        *groups.indices,
        num_groups=num_groups,
        transpose_lhs=False,
        transpose_rhs=False,
        preferred_element_type=at_least_float32(dtype),
        precision=lax.Precision.HIGHEST,
        implementation=implementation,
    )
    return sums.sum(axis=1)


def dots_with_biases(rows: jax.Array, biases: jax.Array, groups: Groups) -> jax.Array:
    """Returns each row's dot product [m] with its group's bias [g, n], zero for unowned rows."""
    dtype = at_least_float32(rows.dtype)
    sizes, offset = groups.indices
    added = bias_rows(biases.astype(dtype), sizes, offset[0], rows.shape[0])
    dots = jnp.sum(rows.astype(dtype) * added, axis=1)
    owned = owned_rows(sizes, offset, biases.shape[0], rows.shape[0])
    return jnp.where(owned, dots, 0)


def gated_ragged_dot_transpose(
    given: GradientOperands, *, activation: Activation, **options: Any
) -> list[jax.Array]:
    """Computes a hidden layer again, and its gradients from the gradient of its product with wo.

    Args:
      given: the operands.
      activation: the activation of the hidden layer.
      **options: the fields of `Products`.

    Returns:
      dgate, dup if there is an up, and hidden [m, F], and dweights float32 [m]. With dh = dy wo^T,
      rounded, dweights is the sum of dh * activation(gate) * up along a row. All are zero in rows
      that no local group owns.
    """
    gate, wo, indices = given.gate, given.wo, given.groups.indices
    dy = on_rows(given.rows)
    dh = Products(**options).rows(dy, wo, *indices, gate.dtype, transpose_rhs=True)
    owned = owned_rows(*indices, wo.shape[0], gate.shape[0])
    projected = [jnp.where(owned[:, None], x, 0) for x in (gate, given.up) if x is not None]
    weights = row_weights(given.weights, owned, gate)

    def of_projected(weights, gate, up=None):
        return hidden_layer(activation, gate, up, weights)

    hidden, vjp = jax.vjp(of_projected, weights, *projected)
    dweights, *gradients = vjp(dh)
    return [*gradients, hidden, dweights]


def paired_ragged_dot(given: PairedOperands, **options: Any) -> jax.Array:
    """Computes a0 w0^T + a1 w1^T [m, D] in float32, and rounds once."""
    dtype = given.a0.dtype
    indices = *given.groups.indices, at_least_float32(dtype)
    product = functools.partial(Products(**options).rows, transpose_rhs=True)
    both = product(given.a0, given.w0, *indices) + product(given.a1, given.w1, *indices)
    return both.astype(dtype)


def paired_weight_gradients(
    given: PairedWeightsOperands, *, num_groups: int, **options: Any
) -> list[jax.Array]:
    """Computes x^T d0 and x^T d1 of the rows of each group, both [num_groups, D, F].

    Args:
      given: the operands.
      num_groups: local groups.
      **options: the fields of `Products`.
    """
    x, indices = on_rows(given.rows), given.groups.indices
    product = functools.partial(Products(**options).weights, num_groups=num_groups, is_limited=True)
    return [product(x, d, *indices) for d in (given.d0, given.d1)]


def down_weight_gradient(
    given: DownWeightsOperands, *, num_groups: int, **options: Any
) -> jax.Array:
    """Computes hidden^T dy of the rows of each group, [num_groups, F, D].

    Args:
      given: the operands.
      num_groups: local groups.
      **options: the fields of `Products`.
    """
    products, dy = Products(**options), on_rows(given.rows)
    return products.weights(given.hidden, dy, *given.groups.indices, num_groups=num_groups)


def ragged_mlp_tangent(
    given: TangentOperands, *, activation: Activation, combines: bool = False, **options: Any
) -> jax.Array:
    """Computes the tangent of y = hidden wo + weights bo, linear in the operands' tangents.

    Args:
      given: the operands.
      activation: the activation of the hidden layer.
      combines: whether the rows of each token are summed up.
      **options: the fields of `Products`.

    Returns:
      [m, D], or [T, D] with `combines`.
    """
    dots, gate, rows, experts = given.dots, given.gate, given.primals.rows, given.primals.experts
    wo, indices = experts.wo, given.groups.indices
    assert wo is not None
    product = Products(**options).rows

    def on_its_rows(bias):
        """Returns the bias of each row, in float32 at least."""
        dtype = at_least_float32(gate.dtype)
        return bias_rows(bias.astype(dtype), indices[0], indices[1][0], gate.shape[0])

    def projected(matrix, matrix_dot, like):
        """Returns the tangent of x times a matrix."""
        terms = []
        if dots.x is not None:
            terms.append(product(on_rows(rows.of(dots.x)), matrix, *indices))
        if matrix_dot is not None:
            terms.append(product(on_rows(rows), matrix_dot, *indices))
        return sum(terms) if terms else jnp.zeros_like(like)

    owned = owned_rows(*indices, wo.shape[0], gate.shape[0])
    weights = row_weights(given.primals.weights, owned, gate)
    weights_dot = jnp.zeros_like(weights)
    if dots.weights is not None:
        weights_dot = row_weights(dots.weights, owned, gate)
    primals = [gate] if given.up is None else [gate, given.up]
    if experts.wi is not None:
        both = projected(experts.wi, dots.wi, jnp.concatenate(primals, axis=1))
        tangents = jnp.split(both, 2, axis=1)
    else:
        of_matrices = zip(experts.projections, (dots.wi_0, dots.wi_1), primals, strict=False)
        tangents = [projected(*x) for x in of_matrices]
    for i, bias_dot in enumerate((dots.b0, dots.b1)):
        if bias_dot is not None:
            tangents[i] += on_its_rows(bias_dot).astype(gate.dtype)

    def of_projected(weights, gate, up=None):
        return hidden_layer(activation, gate, up, weights)

    hidden, hidden_dot = jax.jvp(of_projected, (weights, *primals), (weights_dot, *tangents))
    out = product(hidden_dot, wo, *indices)
    if dots.wo is not None:
        out += product(hidden, dots.wo, *indices)
    if dots.bo is not None:
        out += (weights[:, None] * on_its_rows(dots.bo)).astype(out.dtype)
    if experts.bo is not None and dots.weights is not None:
        out += (weights_dot[:, None] * on_its_rows(experts.bo)).astype(out.dtype)
    return combine(out, rows) if combines else out
