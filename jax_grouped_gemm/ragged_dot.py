"""Drop-in replacements for `jax.lax.ragged_dot` and `jax.lax.ragged_dot_general`.

`jax.lax`'s own abstract evaluation decides which arguments are valid and the dtype of the result.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm import _dimension_numbers, tile_choice
from jax_grouped_gemm._arguments import (
    as_array,
    canonical_offset,
    canonical_precision,
    checked_implementation,
    to_int32,
)
from jax_grouped_gemm._dimension_numbers import DimensionNames, Mode


def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    *,
    transpose_rhs: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Ragged matmul [m, k] x [g, k, n] -> [m, n]: each group of rows times its own matrix.

    The first `group_sizes[0]` rows of `lhs` are multiplied by `rhs[0]`, the next `group_sizes[1]`
    rows by `rhs[1]`, and so on. Rows that no group owns are exactly zero in the result and in the
    gradient of `lhs`, whatever they hold, NaN and infinity included.

    Args:
      lhs: [m, k], floating point, complex or integer.
      rhs: [g, k, n], or [g, n, k] with `transpose_rhs`.
      group_sizes: [G] of any integer dtype, rows per group. A negative size counts as zero; where
        the running sum exceeds m it is cut at m. G equals g, or is at least g with `group_offset`.
      precision: as in `jax.lax.dot`, for float32 and wider. DEFAULT is as accurate as TF32. HIGH
        means HIGHEST, never TF32: as accurate as float32. `jax_grouped_gemm.float32` says how the
        kernels do both, and what becomes of elements much smaller than others of their group.
      preferred_element_type: dtype of the result, by default the promoted dtype of the operands.
        Accumulation is in float32 at least.
      group_offset: integer scalar or [1], possibly traced: `rhs[i]` belongs to the group
        `group_offset + i` of `group_sizes`; the rows of all other groups are zero.
      transpose_rhs: whether the last two dimensions of `rhs` are swapped. Costs no copy.
      implementation: None takes the CUDA kernels where they apply and the reference elsewhere;
        "cuda" insists on the kernels; "reference" is the pure JAX implementation.

    Returns:
      [m, n].

    Raises:
      TypeError: an argument has an unsuitable type, dtype or shape, as for `jax.lax.ragged_dot`.
      ValueError: `implementation`, `precision` or the shape of `group_offset` is invalid.
      NotImplementedError: `implementation="cuda"` and the kernels cannot run this; raised when the
        function is lowered, with the reason.
    """
    dimension_numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(0,),
    )
    return ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        dimension_numbers,
        precision,
        preferred_element_type,
        group_offset,
        implementation=implementation,
    )


def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Ragged matmul with any dimension order, in the three modes of `jax.lax.ragged_dot_general`.

    The kind of the ragged dimension of `lhs` selects the mode, with b batch dimensions, x the
    dimensions of the ragged one's kind that precede it, and `group_sizes` also allowed as [g]:

    1. Non-contracting: [b..., m..., k...], [g, b..., k..., n...], [b..., x..., g]
       -> [b..., m..., n...].
    2. Contracting: [b..., m, k...], [b..., m, n...], [b..., g] -> [g, b..., k..., n...], where m
       is the ragged dimension.
    3. Batch: a plain `jax.lax.dot_general`; the group sizes do not affect the result.

    The kernels take [..., m, k], [..., m, n] and [..., g, k, n] with their last two dimensions in
    either order; operands with other orders of dimensions are transposed first.

    Args:
      lhs: array with exactly one ragged dimension.
      rhs: array with one group dimension in mode 1 and none otherwise.
      group_sizes: integer array, see `ragged_dot`.
      ragged_dot_dimension_numbers: the contracting, batch, ragged and group dimensions.
      precision: see `ragged_dot`.
      preferred_element_type: see `ragged_dot`.
      group_offset: see `ragged_dot`. In mode 2, result `i` belongs to group `group_offset + i`.
      implementation: see `ragged_dot`.

    Returns:
      An array of the shape that `jax.lax.ragged_dot_general` gives.

    Raises:
      TypeError, ValueError: see `ragged_dot`.
      NotImplementedError: several contracting dimensions in mode 2, `group_offset` or
        `implementation="cuda"` in mode 3, and as for `ragged_dot`.
    """
    implementation = checked_implementation(implementation)
    if not isinstance(ragged_dot_dimension_numbers, lax.RaggedDotDimensionNumbers):
        raise TypeError(
            "ragged_dot_dimension_numbers must be jax.lax.RaggedDotDimensionNumbers, got "
            f"{ragged_dot_dimension_numbers!r}"
        )
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    group_sizes = as_array("group_sizes", group_sizes)
    precision = canonical_precision(precision)
    if preferred_element_type is not None:
        preferred_element_type = jax.dtypes.canonicalize_dtype(preferred_element_type)
    result = evaluate_as_jax(
        lhs,
        rhs,
        group_sizes,
        ragged_dot_dimension_numbers,
        precision,
        preferred_element_type,
        is_window=group_offset is not None,
    )
    names = DimensionNames.of(ragged_dot_dimension_numbers, lhs.ndim, rhs.ndim)
    if names.mode is Mode.BATCH:
        if group_offset is not None or implementation == "cuda":
            raise NotImplementedError(
                "a ragged batch dimension supports neither group_offset nor implementation='cuda'"
            )
        numbers = ragged_dot_dimension_numbers.dot_dimension_numbers
        return lax.dot_general(lhs, rhs, numbers, precision, preferred_element_type)
    is_contracting = names.mode is Mode.CONTRACTING
    product = (
        _dimension_numbers.contracting if is_contracting else _dimension_numbers.noncontracting
    )
    out = product(
        lhs,
        rhs,
        to_int32(group_sizes),
        canonical_offset(group_offset),
        names,
        preferred_element_type=result.dtype,
        precision=precision,
        implementation=implementation,
        **tile_choice.current().params("forward"),
    )
    return out.reshape(result.shape)


def evaluate_as_jax(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: np.dtype | None,
    is_window: bool,
) -> jax.ShapeDtypeStruct:
    """Shape and dtype that `jax.lax.ragged_dot_general` would return, with its errors.

    With `is_window`, rhs may have matrices for some of the groups only.
    """
    sizes_shape = group_sizes.shape
    if is_window and sizes_shape and dimension_numbers.rhs_group_dimensions:
        num_local_groups = rhs.shape[dimension_numbers.rhs_group_dimensions[0]]
        if num_local_groups > sizes_shape[-1]:
            raise TypeError(
                f"rhs has matrices for {num_local_groups} groups, more than group_sizes has: got "
                f"rhs {jax.typeof(rhs)} and group_sizes {jax.typeof(group_sizes)}"
            )
        sizes_shape = (*sizes_shape[:-1], num_local_groups)
    evaluate = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    # Without the mesh of the context: jax.lax infers no sharding over explicit axes.
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        try:
            return jax.eval_shape(
                evaluate,
                jax.ShapeDtypeStruct(lhs.shape, lhs.dtype),
                jax.ShapeDtypeStruct(rhs.shape, rhs.dtype),
                jax.ShapeDtypeStruct(sizes_shape, group_sizes.dtype),
            )
        except TypeError as error:
            raise TypeError(
                f"{error} Got lhs {jax.typeof(lhs)}, rhs {jax.typeof(rhs)} and group_sizes "
                f"{jax.typeof(group_sizes)}."
            ) from None
