"""Ragged products: drop-in replacements for those of `jax.lax`, and `ragged_dot_accumulate`.

The abstract evaluation of `jax.lax` decides which arguments are valid, and the dtype of the result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    as_array,
    as_indices,
    canonical_dtype,
    canonical_offset,
    canonical_precision,
    check_ranks,
    checked_boolean,
    checked_implementation,
    evaluate_as_jax,
    run_group_checks,
    with_invariance,
)
from jax_grouped_gemm._src.meshes import as_sharded
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.weights import check_weights, product_of, with_arrays
from jax_grouped_gemm._src.ragged import dimension_numbers, primitive
from jax_grouped_gemm._src.ragged.dimension_numbers import DimensionNames, Mode
from jax_grouped_gemm._src.ragged.packed.api import packed_product
from jax_grouped_gemm._src.tile_choices import current_tiles


def ragged_dot(
    lhs: ArrayLike | QuantizedArray,
    rhs: ArrayLike | QuantizedArray,
    group_sizes: ArrayLike,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    transpose_rhs: bool = False,
    implementation: Implementation = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Multiplies each group of rows by its own matrix: [m, k] x [g, k, n] -> [m, n].

    The first `group_sizes[0]` rows of `lhs` are multiplied by `rhs[0]`, the next `group_sizes[1]`
    rows by `rhs[1]`, and so on. Rows that no group owns are exactly zero in the result and in the
    gradient of `lhs`, whatever they hold, NaN and infinity included.

    Args:
      lhs: [m, k], floating point, complex or integer; or, for two FP8 operands, a `QuantizedArray`
        of the format "fp8_1x128", "fp8_row" or "fp8_tensor".
      rhs: [g, k, n], or [g, n, k] with `transpose_rhs`; or a `QuantizedArray`, which has no
        gradient. Kernels read the layout "packed" directly if groups have few rows of bfloat16;
        otherwise each call dequantises rhs to the dtype of `lhs`. If both operands are in FP8, rhs
        must be in the layout "rows", in the format "fp8_128x128", "fp8_tensor", "fp8" or, with
        `transpose_rhs`, "fp8_row". Such a product has no gradient, and is bfloat16 by default.
        FP8 tensor cores read [g, n, k], so a call first copies [g, k, n] to transpose it.
      group_sizes: [G] of any integer dtype, rows per group. A negative size counts as zero. Running
        sums above m count as m. G equals g, or is at least g with `group_offset`.
      precision: as in `jax.lax.dot`, for float32 and wider. DEFAULT is as accurate as TF32. HIGH
        means HIGHEST, which never uses TF32 and is as accurate as float32. In either case, float32
        elements below 2^-27 of the largest element of their group lose bits. With
        "ANY_F8_ANY_F8_F32_FAST_ACCUM" and two FP8 operands, neither of them in "fp8_1x128" or
        "fp8_128x128", tensor cores add up all products and keep about 14 bits of each sum.
      preferred_element_type: dtype of the result, by default the promoted dtype of the operands.
        Accumulation is in float32 at least.
      group_offset: integer scalar or [1], possibly traced. `rhs[i]` belongs to the group
        `group_offset + i` of `group_sizes`. Rows of groups without a matrix are zero in the result.
      out_sharding: sharding of the result over explicit mesh axes, as in `jax.lax.ragged_dot`. XLA
        then decides what each device computes. Use `jax.shard_map` to decide it yourself.
      transpose_rhs: whether the last two dimensions of `rhs` are transposed. Costs no copy.
      implementation: None takes the CUDA kernels where they apply and the reference elsewhere;
        "cuda" requires the kernels; "xla", also called "reference", is pure JAX.
      batch_invariant: whether the bits of a row of the result, and of the gradient of `lhs`, are
        independent of the other rows of the call and of their number; see the context
        `batch_invariant`. If no kernel can run the call, lowering it for a GPU then raises.

    Returns:
      [m, n].

    Raises:
      TypeError: an argument has an unsuitable type, dtype or shape, as for `jax.lax.ragged_dot`.
      ValueError: `implementation`, `precision` or `out_sharding` is invalid; or `batch_invariant`
        comes with "xla", one scale for all rows, or a tile of `use_tiles` that splits sums.
      NotImplementedError: the kernels cannot run this call, but `implementation="cuda"` or
        `batch_invariant` requires them. Lowering raises it, with the reason.
    """
    implementation = with_invariance("ragged_dot", implementation, batch_invariant)
    transpose_rhs = checked_boolean("transpose_rhs", transpose_rhs)
    if isinstance(rhs, QuantizedArray):
        options: dict[str, Any] = dict(
            precision=precision,
            preferred_element_type=preferred_element_type,
            group_offset=group_offset,
            out_sharding=out_sharding,
            implementation=implementation,
        )
        return _of_quantized(lhs, rhs, group_sizes, transpose_rhs, options)
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    k_axis = 2 if transpose_rhs else 1
    dimension_numbers.check_k(lhs, rhs, str(jax.typeof(rhs)), k_axis)
    given = _numbers(k_axis), precision, preferred_element_type, group_offset
    if out_sharding is not None or (lhs.ndim, rhs.ndim) != (2, 3):
        return ragged_dot_general(
            lhs, rhs, group_sizes, *given, out_sharding, implementation=implementation
        )
    group_sizes, options, _ = _checked(lhs, rhs, group_sizes, *given, implementation)
    offset = canonical_offset(group_offset)
    run_group_checks(group_sizes, lhs.shape[0], offset, rhs.shape[0])
    return primitive.ragged_noncontracting(
        lhs,
        rhs,
        group_sizes,
        offset,
        transpose_lhs=False,
        transpose_rhs=transpose_rhs,
        **options,
    )


def _of_quantized(
    lhs: ArrayLike | QuantizedArray,
    rhs: QuantizedArray,
    group_sizes: ArrayLike,
    transpose_rhs: bool,
    options: dict[str, Any],
) -> jax.Array:
    """Computes `ragged_dot` with quantised matrices, and rows that may be quantised too."""
    if isinstance(lhs, QuantizedArray):
        product = product_of("ragged_dot", lhs, "rhs", rhs)
        return product(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, **options)
    refused = dict(transpose_rhs=transpose_rhs)
    instead = "quantise the matrices as [g, k, n]"
    check_weights("ragged_dot", dict(rhs=rhs), refused, instead=instead)
    x = as_array("lhs", lhs)
    dimension_numbers.check_k(x, rhs, f"{rhs.format} {list(rhs.shape)}")
    if (x.ndim, rhs.ndim) == (2, 3) and options["out_sharding"] is None:
        like, numbers = jax.ShapeDtypeStruct(rhs.shape, x.dtype), _numbers(1)
        names = "precision", "preferred_element_type", "group_offset", "implementation"
        sizes, params, _ = _checked(x, like, group_sizes, numbers, *map(options.get, names))
        offset = canonical_offset(options["group_offset"])
        run_group_checks(sizes, x.shape[0], offset, rhs.shape[0])
        return packed_product(x, rhs, sizes, offset, **params)

    def of_arrays(rhs: Any) -> jax.Array:
        return ragged_dot(x, rhs, group_sizes, **options)

    return with_arrays("ragged_dot", of_arrays, rhs, x=x, name="lhs")


def _numbers(k_axis: int) -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers((((1,), (k_axis,)), ((), ())), (0,), (0,))


def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Computes a ragged matmul in any of the three modes of `jax.lax.ragged_dot_general`.

    The kind of the ragged dimension of `lhs` selects the mode. The list has the shapes of `lhs`,
    `rhs`, `group_sizes` -> the result. In it, b are batch dimensions, and x are non-contracting
    dimensions of `lhs` before the ragged one. `group_sizes` may also be [g]:

    - Non-contracting: [b..., m..., k...], [g, b..., k..., n...], [b..., x..., g]
      -> [b..., m..., n...].
    - Contracting: [b..., m, k...], [b..., m, n...], [b..., g] -> [g, b..., k..., n...], where m
      is the ragged dimension.
    - Batch: a plain `jax.lax.dot_general`; the group sizes do not affect the result.

    The kernels take [..., m, k], [..., m, n] and [..., g, k, n] with the last two dimensions in
    either order. Operands with other orders of dimensions are transposed first.

    Args:
      lhs: array with exactly one ragged dimension.
      rhs: array with one group dimension in the non-contracting mode, else with none.
      group_sizes: integer array, see `ragged_dot`.
      ragged_dot_dimension_numbers: the contracting, batch, ragged and group dimensions.
      precision: see `ragged_dot`.
      preferred_element_type: see `ragged_dot`.
      group_offset: see `ragged_dot`. When contracting, result `i` is for group `group_offset + i`.
      out_sharding: see `ragged_dot`.
      implementation: see `ragged_dot`.

    Returns:
      An array of the same shape as the result of `jax.lax.ragged_dot_general`.

    Raises:
      TypeError, ValueError: see `ragged_dot`.
      NotImplementedError: the contracting mode has several contracting dimensions, or the batch
        mode has a `group_offset` or `implementation="cuda"`; see also `ragged_dot`.
    """
    if out_sharding is not None:

        def unsharded(lhs, rhs, group_sizes, group_offset):
            return ragged_dot_general(
                lhs,
                rhs,
                group_sizes,
                ragged_dot_dimension_numbers,
                precision,
                preferred_element_type,
                group_offset,
                implementation=implementation,
            )

        return as_sharded(
            out_sharding,
            unsharded,
            as_array("lhs", lhs),
            as_array("rhs", rhs),
            as_indices("group_sizes", group_sizes),
            None if group_offset is None else canonical_offset(group_offset),
        )
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    group_sizes, options, shape = _checked(
        lhs,
        rhs,
        group_sizes,
        ragged_dot_dimension_numbers,
        precision,
        preferred_element_type,
        group_offset,
        implementation,
    )
    names = DimensionNames.of(ragged_dot_dimension_numbers, lhs.ndim, rhs.ndim)
    if names.mode is Mode.BATCH:
        if group_offset is not None or implementation == "cuda":
            raise NotImplementedError(
                "a ragged batch dimension supports neither group_offset nor implementation='cuda'"
            )
        numbers = ragged_dot_dimension_numbers.dot_dimension_numbers
        asked = None if preferred_element_type is None else options["preferred_element_type"]
        return lax.dot_general(lhs, rhs, numbers, options["precision"], asked)
    offset = canonical_offset(group_offset)
    num_groups = rhs.shape[names.rhs.index("g")] if "g" in names.rhs else group_sizes.shape[-1]
    run_group_checks(group_sizes, lhs.shape[names.lhs.index("m")], offset, num_groups)
    if names.mode is Mode.CONTRACTING:
        of_any_rank, product = dimension_numbers.contracting, primitive.ragged_contracting
    else:
        of_any_rank, product = dimension_numbers.noncontracting, primitive.ragged_noncontracting
    return of_any_rank(product, lhs, rhs, group_sizes, offset, names, **options).reshape(shape)


def _checked(
    lhs: jax.Array,
    rhs: jax.Array | jax.ShapeDtypeStruct,
    group_sizes: ArrayLike,
    numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    group_offset: ArrayLike | None,
    implementation: Implementation,
) -> tuple[jax.Array, dict[str, Any], tuple[int, ...]]:
    """Returns the group sizes, the parameters of the primitive, and the shape of the result."""
    implementation = checked_implementation(implementation)
    if not isinstance(numbers, lax.RaggedDotDimensionNumbers):
        raise TypeError(
            "ragged_dot_dimension_numbers must be jax.lax.RaggedDotDimensionNumbers, got "
            f"{numbers!r}"
        )
    group_sizes = as_indices("group_sizes", group_sizes)
    precision = canonical_precision(precision)
    if preferred_element_type is not None:
        preferred_element_type = canonical_dtype("preferred_element_type", preferred_element_type)
    is_window = group_offset is not None
    result = evaluate_as_jax(
        lhs, rhs, group_sizes, numbers, precision, preferred_element_type, is_window
    )
    options = dict(
        preferred_element_type=result.dtype,
        precision=precision,
        implementation=implementation,
        **current_tiles().params("forward"),
    )
    return group_sizes, options, result.shape


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
    implementation: Implementation = None,
) -> jax.Array:
    """Returns [g, k, n] plus the product of [m, k] and [m, n] over the rows of each group.

    Matrix i of the result is `accumulator[i]` plus L^T R, where L and R are the rows of group i of
    `lhs` and `rhs`. L^T R is the weight gradient of `ragged_dot(lhs, w, group_sizes)` for the
    cotangent `rhs`, so this function can sum weight gradients over microbatches. The kernel adds
    products of bfloat16 or float16 to float32 accumulators in place. It writes no product to memory
    first, and does not touch the matrices of groups without rows. `explain` says if XLA adds
    instead. Donate the accumulator, or carry it through `jax.lax.scan`; otherwise XLA copies it.

    Args:
      accumulator: [g, k, n] of float32, float64, complex64 or complex128.
      lhs: [m, k], or [k, m] with `transpose_lhs`.
      rhs: [m, n], or [n, m] with `transpose_rhs`.
      group_sizes: [G] of any integer dtype, see `ragged_dot`. G equals g, or is at least g with
        `group_offset`.
      precision: see `ragged_dot`.
      group_offset: integer scalar or [1], possibly traced. `accumulator[i]` belongs to the group
        `group_offset + i` of `group_sizes`.
      transpose_lhs: whether the dimensions of `lhs` are transposed, which costs a copy.
      transpose_rhs: whether the dimensions of `rhs` are transposed, which costs a copy.
      implementation: see `ragged_dot`.

    Returns:
      [g, k, n] of the accumulator's dtype. Differentiable to any order.

    Raises:
      TypeError: an argument has an unsuitable type, dtype or shape.
      ValueError: `implementation` or `precision` is invalid.
      NotImplementedError: `implementation="cuda"`, but the kernels cannot run this call. Lowering
        raises it, with the reason.
    """
    implementation = checked_implementation(implementation)
    transpose_lhs = checked_boolean("transpose_lhs", transpose_lhs)
    transpose_rhs = checked_boolean("transpose_rhs", transpose_rhs)
    accumulator = as_array("accumulator", accumulator)
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    group_sizes = as_indices("group_sizes", group_sizes)
    precision = canonical_precision(precision)
    dtype = accumulator.dtype
    if not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize < 4:
        raise TypeError(
            f"accumulator must be of float32, float64, complex64 or complex128, got {dtype}: "
            "dtypes of fewer bits round away most of each product that is added"
        )
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        for name, x in dict(lhs=lhs, rhs=rhs).items():
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                raise TypeError(
                    f"accumulator must be complex where an operand is, got {dtype} and "
                    f"{name} of {x.dtype}"
                )
    check_ranks(lhs=(lhs, 2), rhs=(rhs, 2), group_sizes=(group_sizes, 1))
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
        most = "at most " if is_window else ""
        raise TypeError(
            f"accumulator must have the shape [{most}{g}, {k}, {n}] of the "
            f"product, got accumulator {jax.typeof(accumulator)}, lhs {jax.typeof(lhs)}, rhs "
            f"{jax.typeof(rhs)} and group_sizes {jax.typeof(group_sizes)}"
        )
    offset = canonical_offset(group_offset)
    run_group_checks(group_sizes, lhs.shape[int(transpose_lhs)], offset, groups)
    return primitive.ragged_accumulate(
        accumulator,
        lhs,
        rhs,
        group_sizes,
        offset,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        precision=precision,
        implementation=implementation,
        **current_tiles().params("wgrad"),
    )
