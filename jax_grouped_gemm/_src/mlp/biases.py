"""Biases of experts, added to the rows of ragged products."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_grouped_gemm._src.arguments import as_indices, canonical_offset
from jax_grouped_gemm._src.arrays import at_least_float32, vary_over, varying_axes
from jax_grouped_gemm._src.meshes import placed
from jax_grouped_gemm._src.mlp.operands import Groups
from jax_grouped_gemm._src.ragged.primitive import ragged_noncontracting
from jax_grouped_gemm._src.ragged.reference import local_group_bounds
from jax_grouped_gemm._src.tile_choices import current_tiles


def with_bias(matmul, groups: Groups, rows, matrices, bias, weights=None) -> jax.Array:
    """Returns rows times their expert's matrix plus bias (times the row's weight), rounded once."""
    indices = dict(group_sizes=groups.sizes, group_offset=groups.offset)
    product = functools.partial(matmul, rows, matrices, **indices)
    if bias is None:
        return product()
    result = jnp.result_type(rows, matrices)
    dtype = at_least_float32(result)
    offset = canonical_offset(groups.offset)[0]
    added = bias_rows(bias.astype(dtype), groups.sizes, offset, rows.shape[0])
    if weights is not None:
        added *= weights.astype(dtype)[:, None]
    return (product(preferred_element_type=dtype) + added).astype(result)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def bias_rows(
    bias: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, num_rows: int
) -> jax.Array:
    """Returns the bias [g, n] of each row's expert: [num_rows, n], zero without a local expert."""
    if 0 in (num_rows, *bias.shape):
        return jnp.zeros((num_rows, bias.shape[1]), bias.dtype)
    starts, ends = local_group_bounds(group_sizes, group_offset, bias.shape[0], num_rows)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    owns = (starts[None] <= rows) & (rows < ends[None])
    local = jnp.argmax(owns, axis=1)
    whole = placed(bias, jax.typeof(bias).sharding.mesh, PartitionSpec())
    return jnp.where(owns.any(axis=1)[:, None], jnp.take(whole, local, axis=0, mode="clip"), 0)


@bias_rows.defjvp
def _bias_rows_jvp(num_rows, primals, tangents):
    # Write the tangent as a product with a column of ones, whose transpose is a ragged product. The
    # transpose of a gather would be a scatter-add, which is not reproducible on a GPU.
    bias, group_sizes, group_offset = primals
    ones = jnp.ones((num_rows, 1), bias.dtype)
    tangent = ragged_noncontracting(
        vary_over(ones, varying_axes(bias, group_sizes)),
        tangents[0][:, None],
        as_indices("group_sizes", group_sizes),
        canonical_offset(group_offset),
        transpose_lhs=False,
        transpose_rhs=False,
        preferred_element_type=bias.dtype,
        precision=lax.Precision.HIGHEST,
        implementation=None,
        **current_tiles().params("forward"),
    )
    return bias_rows(bias, group_sizes, group_offset, num_rows), tangent
