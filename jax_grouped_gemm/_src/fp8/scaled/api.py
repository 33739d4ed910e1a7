"""Ragged products of FP8 operands and their scales; `quantize` defines an element's value."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    as_array,
    canonical_dtype,
    canonical_offset,
    check_group_count,
    checked_boolean,
    checked_choice,
    checked_group_sizes,
    checked_implementation,
    checked_int,
    run_group_checks,
    with_invariance,
)
from jax_grouped_gemm._src.arrays import cdiv, is_static
from jax_grouped_gemm._src.fp8.formats import (
    BLOCK,
    COLUMNS,
    GROUP,
    LHS_SCALINGS,
    MATRIX_BLOCKS,
    ROW_BLOCKS,
    ROWS,
    TENSOR,
    LhsScaling,
    Scaling,
    checked_fp8_dtype,
    row_blocks,
)
from jax_grouped_gemm._src.fp8.scaled import primitive
from jax_grouped_gemm._src.tile_choices import current_tiles


def scaled_ragged_dot(
    lhs: ArrayLike,
    lhs_scale: ArrayLike,
    rhs: ArrayLike,
    rhs_scale: ArrayLike,
    group_sizes: ArrayLike,
    *,
    lhs_scaling: LhsScaling = "1x128",
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike = jnp.bfloat16,
    group_offset: ArrayLike | None = None,
    fast_accumulation: bool = False,
    implementation: Implementation = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Multiplies ragged rows by matrices in FP8, with scales: [m, k] x [g, k, n] -> [m, n].

    Group sizes, empty groups, rows that no group owns and `group_offset` have the semantics of
    `ragged_dot`. Partial sums of 128 products are scaled and added up in float32. The product is
    not differentiable; see `fp8_ragged_dot`. `ragged_dot` of two `QuantizedArray`s computes the
    same.

    Args:
      lhs: [m, k], float8_e4m3fn or float8_e5m2.
      lhs_scale: [m, ceil(k / 128)], as `quantize_blockwise` returns scales, or the shape that
        `lhs_scaling` says; float32, or powers of two as float8_e8m0fnu.
      rhs: [g, k, n], or [g, n, k] with `transpose_rhs`, either FP8 dtype. FP8 tensor cores contract
        the last dimension of both operands, so [g, k, n] is transposed first, with a copy.
      rhs_scale: [g, ceil(k / 128), ceil(n / 128)] for blocks of 128 x 128, the last two exchanged
        with `transpose_rhs`; [g, n] for one scale for each column; [g] or [g, 1] for one scale for
        each matrix; [] or [1] for one scale for all matrices; float32 or float8_e8m0fnu.
      group_sizes: [G] of any integer dtype, rows per group.
      lhs_scaling: the elements of `lhs` that share a scale, and the layout of scales. "1x128": one
        scale for each block, in the shape above. "1xk": a scale for each row, [m, 1] or [m].
        "tensor": a single scale, [], [1] or [1, 1]. "1x128 column-major": a scale for each block,
        in the shape [ceil(k / 128), M], where M >= m is a multiple of 4 (DeepGEMM's layout on
        Hopper). All values except the default are deprecated, and will be removed in 0.4. Use the
        formats "fp8_1x128", "fp8_row" and "fp8_tensor" of `QuantizedArray` instead.
      transpose_rhs: whether the last two dimensions of `rhs` and its blocks are transposed.
      preferred_element_type: dtype of the result; the kernels write bfloat16, float16 or float32.
      group_offset: see `ragged_dot`.
      fast_accumulation: lets the tensor cores add up all products, with about 14 bits of each sum,
        as `use_fast_accum` of torch's `_scaled_mm` does. It requires scales that do not change
        along k: "1xk" or "tensor", and one scale for each column or matrix of `rhs`. Some shapes,
        such as those with few rows, have no kernel for it and keep float32 sums.
      implementation: see `ragged_dot`.
      batch_invariant: see `ragged_dot`.

    Returns:
      The product [m, n].

    Raises:
      TypeError: an operand has an unsuitable dtype, or shapes do not fit together.
      ValueError: `lhs_scaling`, `fast_accumulation` or `implementation` is invalid, or
        `batch_invariant` is given for one scale of all rows.
      NotImplementedError: see `ragged_dot`.
    """
    checked_choice("lhs_scaling", lhs_scaling, tuple(LHS_SCALINGS))
    if lhs_scaling != "1x128":
        warnings.warn(
            f"scaled_ragged_dot: lhs_scaling={lhs_scaling!r} is deprecated and will be removed in "
            "0.4: multiply QuantizedArrays of the formats 'fp8_1x128', 'fp8_row' or 'fp8_tensor' "
            "by ragged_dot",
            DeprecationWarning,
            stacklevel=2,
        )
    return scaled_product(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        lhs_scaling=LHS_SCALINGS[lhs_scaling],
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        group_offset=group_offset,
        fast_accumulation=fast_accumulation,
        implementation=with_invariance("scaled_ragged_dot", implementation, batch_invariant),
    )


def scaled_product(
    lhs: ArrayLike,
    lhs_scale: ArrayLike,
    rhs: ArrayLike,
    rhs_scale: ArrayLike,
    group_sizes: ArrayLike,
    *,
    lhs_scaling: Scaling,
    transpose_rhs: bool,
    preferred_element_type: DTypeLike,
    group_offset: ArrayLike | None,
    fast_accumulation: bool,
    implementation: Implementation,
) -> jax.Array:
    """Computes `scaled_ragged_dot` without warnings of deprecation."""
    lhs, rhs = _fp8_array("lhs", lhs, 2), _fp8_array("rhs", rhs, 3)
    transpose_rhs = checked_boolean("transpose_rhs", transpose_rhs)
    group_sizes = checked_group_sizes(group_sizes)
    m, k = lhs.shape
    g, *matrix = rhs.shape
    n = matrix[0 if transpose_rhs else 1]
    if matrix[1 if transpose_rhs else 0] != k:
        form = "[g, n, k]" if transpose_rhs else "[g, k, n]"
        raise TypeError(
            f"rhs must be {form} with k = {k} of lhs {lhs.shape}, got {rhs.shape} with "
            f"transpose_rhs={transpose_rhs}"
        )
    check_group_count("rhs", group_sizes, g, group_offset)
    lhs_scale = _lhs_scale(_scale_array("lhs_scale", lhs_scale), m, k, lhs_scaling)
    rhs_scale = _scale_array("rhs_scale", rhs_scale)
    rhs_scale, rhs_scaling = _rhs_scale(rhs_scale, g, k, n, transpose_rhs)
    if checked_boolean("fast_accumulation", fast_accumulation) and (
        lhs_scaling.block[1] is not None or rhs_scaling.block[0] is not None
    ):
        raise ValueError(
            "fast_accumulation must be False where scales change along k, as with "
            f"lhs_scaling={str(lhs_scaling)!r} and rhs scaled by {rhs_scaling}"
        )
    offset = canonical_offset(group_offset)
    run_group_checks(group_sizes, m, offset, g)
    return primitive.scaled_ragged_noncontracting(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        offset,
        transpose_rhs=transpose_rhs,
        lhs_scaling=lhs_scaling,
        rhs_scaling=rhs_scaling,
        fast_accumulation=fast_accumulation,
        preferred_element_type=canonical_dtype("preferred_element_type", preferred_element_type),
        implementation=checked_implementation(implementation),
        **current_tiles().params("forward"),
    )


def scaled_ragged_dot_contracting(
    lhs: ArrayLike,
    lhs_scale: ArrayLike,
    rhs: ArrayLike,
    rhs_scale: ArrayLike,
    group_sizes: ArrayLike,
    *,
    num_rows: int,
    num_groups: int | None = None,
    preferred_element_type: DTypeLike = jnp.float32,
    group_offset: ArrayLike | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """Contracts the rows of each group: [b, k, 128] x [b, n, 128] -> [g, k, n].

    This is the cotangent of weights.

    Operands have the transposed form that `quantize_ragged` returns: blocks of 128 rows of one
    group, with zeros after the group's last row. Partial sums of 128 rows are scaled and added up
    in float32. An empty group's matrix is exactly zero.

    Args:
      lhs: [b, k, 128], float8_e4m3fn or float8_e5m2. b is at least ceil(num_rows / 128) + min(G,
        num_rows), the most blocks that `num_rows` rows in G groups need.
      lhs_scale: float32 [b, k].
      rhs: [b, n, 128], either FP8 dtype.
      rhs_scale: float32 [b, n].
      group_sizes: [G] of any integer dtype, rows per group.
      num_rows: m, the rows of all groups.
      num_groups: g, how many matrices to compute. The default is G; g < G needs `group_offset`.
      preferred_element_type: dtype of the result.
      group_offset: matrix i belongs to the group `group_offset + i`.
      implementation: see `ragged_dot`.

    Returns:
      The products [g, k, n].

    Raises:
      TypeError, ValueError, NotImplementedError: see `scaled_ragged_dot`.
    """
    lhs, rhs = _fp8_array("lhs", lhs, 3), _fp8_array("rhs", rhs, 3)
    group_sizes = checked_group_sizes(group_sizes)
    num_rows = checked_int("num_rows", num_rows)
    if is_static(num_rows) and not 0 <= num_rows < 2**31:
        raise ValueError(f"num_rows must be from 0 to 2^31 - 1, got {num_rows}")
    num_groups = _checked_num_groups(num_groups, group_sizes.shape[0], group_offset)
    (b, k, _), (_, n, _) = lhs.shape, rhs.shape
    least = row_blocks(num_rows, group_sizes.shape[0])
    if b < least or (lhs.shape, rhs.shape) != ((b, k, BLOCK), (b, n, BLOCK)):
        raise TypeError(
            f"lhs [b, k, 128] and rhs [b, n, 128] must share a b of at least {least} for "
            f"num_rows={num_rows}, got {lhs.shape} and {rhs.shape}"
        )
    scales = []
    for name, scale, size in (("lhs_scale", lhs_scale, k), ("rhs_scale", rhs_scale, n)):
        scale = _scale_array(name, scale)
        if scale.shape != (b, size):
            raise TypeError(f"{name} must have shape {(b, size)}, got {scale.shape}")
        scales.append(scale)
    offset = canonical_offset(group_offset)
    run_group_checks(group_sizes, num_rows, offset, num_groups)
    return primitive.scaled_ragged_contracting(
        lhs,
        scales[0],
        rhs,
        scales[1],
        group_sizes,
        offset,
        num_rows=num_rows,
        num_groups=num_groups,
        preferred_element_type=canonical_dtype("preferred_element_type", preferred_element_type),
        implementation=checked_implementation(implementation),
        **current_tiles().params("forward"),
    )


def _checked_num_groups(num_groups: int | None, total: int, group_offset: Any) -> int:
    if num_groups is None:
        return total
    num_groups = checked_int("num_groups", num_groups)
    if not 0 <= num_groups <= total or (group_offset is None and num_groups != total):
        raise ValueError(
            f"num_groups must be the {total} of group_sizes, or fewer with group_offset, got "
            f"{num_groups}"
        )
    return num_groups


def _fp8_array(name: str, x: ArrayLike, rank: int) -> jax.Array:
    x = as_array(name, x)
    checked_fp8_dtype(f"the dtype of {name}", x.dtype)
    if x.ndim != rank:
        raise TypeError(f"{name} must have {rank} dimensions, got the shape {x.shape}")
    return x


def _scale_array(name: str, x: ArrayLike) -> jax.Array:
    if isinstance(x, float | np.floating):
        x = np.asarray(x, np.float32)
    x = as_array(name, x)
    if x.dtype == jnp.float8_e8m0fnu:
        return x.astype(jnp.float32)
    if x.dtype != jnp.float32:
        raise TypeError(f"{name} must be float32 or float8_e8m0fnu, got {x.dtype}")
    return x


def _lhs_scale(scale: jax.Array, m: int, k: int, scaling: Scaling) -> jax.Array:
    """Returns `scale` in the shape that the primitive takes for `scaling`."""
    blocks = cdiv(k, BLOCK)
    allowed: tuple[Any, ...]
    wanted: tuple[int, ...]
    if scaling == ROW_BLOCKS:
        allowed, wanted = ((m, blocks),), (m, blocks)
    elif scaling == ROWS:
        allowed, wanted = ((m, 1), (m,)), (m, 1)
    elif scaling == TENSOR:
        allowed, wanted = ((), (1,), (1, 1)), (1, 1)
    else:
        allowed, wanted = ((blocks, "M >= m, a multiple of 4"),), scale.shape
        fits = scale.ndim == 2 and scale.shape[0] == blocks
        if fits and scale.shape[1] >= m and scale.shape[1] % 4 == 0:
            allowed = (scale.shape,)
    if scale.shape not in allowed:
        raise TypeError(
            f"lhs_scale must have the shape {' or '.join(map(str, allowed))} with "
            f"lhs_scaling={str(scaling)!r}, got {scale.shape}; "
            f"lhs_scaling may be one of {tuple(LHS_SCALINGS)}"
        )
    return scale.reshape(wanted)


def _rhs_scale(
    scale: jax.Array, g: int, k: int, n: int, transpose_rhs: bool
) -> tuple[jax.Array, Scaling]:
    blocks = (g, cdiv(k, BLOCK), cdiv(n, BLOCK))
    if transpose_rhs:
        blocks = (g, blocks[2], blocks[1])
    if scale.shape == blocks:
        return scale, MATRIX_BLOCKS
    if scale.shape == (g, n):
        return scale.reshape((g, n, 1) if transpose_rhs else (g, 1, n)), COLUMNS
    if scale.shape in ((), (1,), (g,), (g, 1)):
        return jnp.broadcast_to(scale.reshape(-1, 1, 1), (g, 1, 1)), GROUP
    raise TypeError(
        f"rhs_scale must have shape {blocks}, {(g, n)}, {(g,)} or (), got {scale.shape}"
    )
