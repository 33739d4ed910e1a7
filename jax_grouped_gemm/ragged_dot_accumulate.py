"""Weight gradients that are added to those of earlier microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_grouped_gemm import primitives, tile_choice
from jax_grouped_gemm._arguments import (
    as_array,
    canonical_offset,
    canonical_precision,
    checked_implementation,
    to_int32,
)
from jax_grouped_gemm.ragged_dot import evaluate_as_jax


def ragged_dot_accumulate(
    accumulator: ArrayLike,
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: lax.PrecisionLike = None,
    group_offset: ArrayLike | None = None,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Adds a ragged product that contracts the rows, [m, k] and [m, n], to [g, k, n].

    `accumulator[i]` plus the product of the rows of group i of `lhs`, transposed, and those of
    `rhs`: the weight gradient of `ragged_dot(lhs, w, group_sizes)` for the cotangent `rhs`, summed
    up over microbatches. Products of bfloat16 or float16 are added to float32 accumulators in the
    kernel, where they are: none is written to memory to be read and added later, and groups
    without rows are neither read nor written. Donate the accumulator, or carry it through
    `jax.lax.scan`: otherwise XLA copies it first. `explain` says where the kernel cannot add.

    Args:
      accumulator: [g, k, n] of float32, float64, complex64 or complex128.
      lhs: [m, k], or [k, m] with `transpose_lhs`.
      rhs: [m, n], or [n, m] with `transpose_rhs`.
      group_sizes: [G] of any integer dtype, see `ragged_dot`. G equals g, or is at least g with
        `group_offset`.
      precision: see `ragged_dot`.
      group_offset: integer scalar or [1], possibly traced: `accumulator[i]` belongs to the group
        `group_offset + i` of `group_sizes`.
      transpose_lhs: whether the dimensions of `lhs` are swapped. Costs no copy.
      transpose_rhs: whether the dimensions of `rhs` are swapped. Costs no copy.
      implementation: see `ragged_dot`.

    Returns:
      [g, k, n] of the accumulator's dtype. Differentiable to any order.

    Raises:
      TypeError: an argument has an unsuitable type, dtype or shape.
      ValueError: `implementation`, `precision` or the shape of `group_offset` is invalid.
      NotImplementedError: `implementation="cuda"` and the kernels cannot run this; raised when the
        function is lowered, with the reason.
    """
    implementation = checked_implementation(implementation)
    accumulator = as_array("accumulator", accumulator)
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    group_sizes = as_array("group_sizes", group_sizes)
    precision = canonical_precision(precision)
    dtype = accumulator.dtype
    if not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize < 4:
        raise TypeError(
            f"accumulator must be of float32, float64, complex64 or complex128, got {dtype}: "
            "narrower sums would lose most of what is added to them"
        )
    _check_ranks(lhs, rhs, group_sizes)
    product = evaluate_as_jax(
        lhs,
        rhs,
        group_sizes,
        lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((int(transpose_lhs),), (int(transpose_rhs),)), ((), ())),
            lhs_ragged_dimensions=(int(transpose_lhs),),
            rhs_group_dimensions=(),
        ),
        precision,
        dtype,
        is_window=False,
    )
    is_window = group_offset is not None
    fits = accumulator.ndim == 3 and accumulator.shape[1:] == product.shape[1:]
    groups, num_groups = accumulator.shape[0] if accumulator.ndim else 0, product.shape[0]
    if not fits or groups > num_groups or (groups < num_groups and not is_window):
        g, k, n = product.shape
        raise TypeError(
            f"accumulator must have the shape [{'at most ' * is_window}{g}, {k}, {n}] of the "
            f"product, got accumulator {jax.typeof(accumulator)}, lhs {jax.typeof(lhs)}, rhs "
            f"{jax.typeof(rhs)} and group_sizes {jax.typeof(group_sizes)}"
        )
    return primitives.ragged_accumulate(
        accumulator,
        lhs,
        rhs,
        to_int32(group_sizes),
        canonical_offset(group_offset),
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        precision=precision,
        implementation=implementation,
        **tile_choice.current().params("wgrad"),
    )


def _check_ranks(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> None:
    for name, x, rank in (("lhs", lhs, 2), ("rhs", rhs, 2), ("group_sizes", group_sizes, 1)):
        if x.ndim != rank:
            raise TypeError(
                f"{name} must have {rank} dimension{'s' * (rank > 1)}, got {jax.typeof(x)}; "
                "jax.vmap adds others"
            )
