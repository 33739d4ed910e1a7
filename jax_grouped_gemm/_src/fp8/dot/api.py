"""`fp8_ragged_dot`: a differentiable ragged matmul in FP8."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

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
    checked_group_sizes,
    checked_implementation,
    run_group_checks,
    with_invariance,
)
from jax_grouped_gemm._src.arrays import align_varying
from jax_grouped_gemm._src.autodiff import once_differentiable
from jax_grouped_gemm._src.fp8.choice import Choice, bf16_choice
from jax_grouped_gemm._src.fp8.dot.primitive import may_be_split_later, weight_gradient
from jax_grouped_gemm._src.fp8.formats import Scaled, quantized_blocks
from jax_grouped_gemm._src.fp8.prediction import Dot
from jax_grouped_gemm._src.fp8.products import FP8_LHS, FP8_RHS, Fp8Products, in_16_bits, named
from jax_grouped_gemm._src.fp8.quantize.api import SOURCE_DTYPES, QuantizedWeights
from jax_grouped_gemm._src.fp8.recipe import Recipe, checked_recipe
from jax_grouped_gemm._src.note.primitive import noted
from jax_grouped_gemm._src.over_tokens import over_tokens
from jax_grouped_gemm._src.partition import Split, groups_split_like
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.ragged import primitive as ragged
from jax_grouped_gemm._src.ragged.api import ragged_dot
from jax_grouped_gemm._src.ragged.slices import sizes_in_slice
from jax_grouped_gemm._src.tile_choices import current_tiles, using_tiles


def fp8_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    *,
    recipe: Recipe = Recipe(),  # noqa: B008 - immutable
    quantized_rhs: QuantizedArray | QuantizedWeights | None = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    implementation: Implementation = None,
    batch_invariant: bool = False,
) -> jax.Array:
    """Quantises ragged rows and matrices to FP8 and multiplies them: [m, k] x [g, k, n] -> [m, n].

    Groups have the semantics of `ragged_dot`. Quantisation is not differentiated
    (straight-through): the cotangents are those of the matmul, computed from quantised operands as
    `recipe` says. Only first derivatives in reverse mode exist. Operands are kept for the backward
    pass in FP8. `checkpoint_policies.quantized_operands_saveable` saves them by name, so that
    rematerialisation does not quantise again. Over auto mesh axes of several devices, `lhs` itself
    is kept, and each device quantises its own rows in the backward pass.

    Args:
      lhs: [m, k], bfloat16, float16 or float32.
      rhs: [g, k, n], bfloat16, float16 or float32.
      group_sizes: [G] of any integer dtype, rows per group.
      recipe: see `Recipe`, which also says when the product is computed in bf16.
      quantized_rhs: the result of `quantize_weights(rhs)`, to quantise weights once for several
        calls, such as the steps of gradient accumulation. It may also be the result of
        `quantize(rhs, "fp8_128x128", layout="rows")`, which each call transposes. The gradient
        still goes to `rhs`.
      preferred_element_type: dtype of the result, by default the promoted dtype of lhs and rhs.
      group_offset: see `ragged_dot`.
      implementation: see `ragged_dot`. "cuda" and "xla" always compute as the recipe says, even if
        bf16 is faster.
      batch_invariant: see `ragged_dot`. The product is then computed as the recipe says, because
        whether bf16 is faster depends on the number of rows.

    Returns:
      The product [m, n].

    Raises:
      TypeError: an operand has an unsuitable dtype, or shapes do not fit together.
      ValueError: `implementation` is invalid.
      NotImplementedError: see `ragged_dot`; also raised for a second derivative.
    """
    lhs, rhs = as_array("lhs", lhs), as_array("rhs", rhs)
    group_sizes = checked_group_sizes(group_sizes)
    offset = canonical_offset(group_offset)
    _check_operands(lhs, rhs, group_sizes, group_offset)
    run_group_checks(group_sizes, lhs.shape[0], offset, rhs.shape[0])
    implementation = with_invariance("fp8_ragged_dot", implementation, batch_invariant)
    checked_recipe(recipe)
    if quantized_rhs is not None:
        quantized_rhs = _checked_quantized(quantized_rhs, rhs, recipe)
    out_dtype = jnp.result_type(lhs, rhs)
    if preferred_element_type is not None:
        out_dtype = canonical_dtype("preferred_element_type", preferred_element_type)
    product = _Product(
        recipe,
        checked_implementation(implementation),
        current_tiles(),
        out_dtype,
        lhs.dtype,
        rhs.dtype,
    )
    whole = (rhs, quantized_rhs, group_sizes, offset)
    # Over auto axes XLA decides whether rows are split, or columns or groups.
    on_device = functools.partial(_on_device, product, lhs.shape[0])
    return over_tokens("fp8_ragged_dot", on_device, (lhs,), whole, token_axes=())


def _on_device(product: _Product, num_rows: int, rows, whole, axes):
    """Returns the product of this device's rows."""
    (lhs,), (rhs, quantized_rhs, group_sizes, offset) = rows, whole
    if axes:
        group_sizes = sizes_in_slice(group_sizes, Split.of_rows(axes, num_rows))
    if quantized_rhs is None:
        of = Dot.of(lhs.shape[0], rhs.shape, group_sizes.shape[0])
        dtypes = lhs.dtype, rhs.dtype
        trained, alone = (
            bf16_choice(Choice(of, product.recipe, training), dtypes, product.implementation)
            for training in (True, False)
        )
        if trained:
            return product.products_in_16_bits(lhs, rhs, noted(group_sizes, trained), offset)
        product = dataclasses.replace(product, alone=alone)
    # Cast outside the custom derivative, so that JAX transposes the casts.
    leaves, tree = jax.tree.flatten((lhs, rhs, quantized_rhs, group_sizes, offset))
    return _dot(product, *jax.tree.unflatten(tree, align_varying(*leaves)))


@dataclasses.dataclass(frozen=True)
class _Product(Fp8Products):
    """The static part of one matmul, and its three products.

    Attributes:
      out_dtype, lhs_dtype, rhs_dtype: dtypes of the arrays.
      alone: the choice of bf16 for the product without its cotangents, or None.
    """

    out_dtype: np.dtype
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    alone: Choice | None = None

    def products_in_16_bits(self, lhs, rhs, group_sizes, offset):
        """Computes the ragged matmul of operands that are not quantised."""
        with using_tiles(self.tiles):
            return ragged_dot(
                in_16_bits(lhs),
                in_16_bits(rhs),
                group_sizes,
                preferred_element_type=self.out_dtype,
                group_offset=offset,
                implementation=self.implementation,
            )


class _Residuals(NamedTuple):
    """Operands kept for the backward pass: in FP8, or unquantised for a product in "bf16". lhs is
    unquantised too if the backward pass quantises it."""

    lhs: Scaled | jax.Array
    rhs: Scaled | jax.Array
    group_sizes: jax.Array
    offset: jax.Array


def _forward(product: _Product, lhs, rhs, quantized_rhs, group_sizes, offset, *, for_gradient):
    """Returns the result, and the quantised lhs and rhs for the backward pass."""
    recipe = product.recipe
    is_fp8 = recipe.forward == "fp8"
    in_blocks = recipe.wgrad == "fp8" and not may_be_split_later(lhs)
    lhs_rows, lhs_columns = product.quantize_rows(
        lhs,
        group_sizes,
        recipe.forward_dtype,
        plain=is_fp8,
        transposed=for_gradient and in_blocks,
    )
    if quantized_rhs is None:
        weights, weights_t = product.quantize_weights(
            rhs, plain=for_gradient and recipe.dgrad == "fp8", transposed=is_fp8
        )
    else:
        weights, weights_t = Scaled(*quantized_rhs[:2]), Scaled(*quantized_rhs[2:])
    if for_gradient:
        lhs_rows, lhs_columns = named((lhs_rows, lhs_columns), FP8_LHS)
        weights, weights_t = named((weights, weights_t), FP8_RHS)
    if is_fp8:
        out = product.rows_by_weights(
            "forward", lhs_rows, weights_t, group_sizes, offset, product.out_dtype
        )
    else:
        out = product.products_in_16_bits(lhs, rhs, group_sizes, offset)
    return out, lhs_columns, weights


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product: _Product, lhs, rhs, quantized_rhs, group_sizes, offset):
    if product.alone:
        return product.products_in_16_bits(lhs, rhs, noted(group_sizes, product.alone), offset)
    operands = (lhs, rhs, quantized_rhs, group_sizes, offset)
    return _forward(product, *operands, for_gradient=False)[0]


def _dot_forward(product: _Product, lhs, rhs, quantized_rhs, group_sizes, offset):
    lhs, rhs = once_differentiable("fp8_ragged_dot", (lhs, rhs))
    operands = (lhs, rhs, quantized_rhs, group_sizes, offset)
    out, lhs_columns, weights = _forward(product, *operands, for_gradient=True)
    kept = _Residuals(
        lhs=lhs_columns or (lhs if product.recipe.wgrad == "fp8" else in_16_bits(lhs)),
        rhs=weights if product.recipe.dgrad == "fp8" else in_16_bits(rhs),
        group_sizes=group_sizes,
        offset=offset,
    )
    return out, kept


def _dot_backward(product: _Product, kept: _Residuals, ct):
    recipe = product.recipe
    kept, ct = once_differentiable("fp8_ragged_dot", (kept, ct))
    groups = kept.group_sizes, kept.offset
    num_groups = jax.tree.leaves(kept.rhs)[0].shape[0]
    ct_rows, ct_columns = product.quantize_rows(
        ct,
        kept.group_sizes,
        recipe.gradient_dtype,
        plain=recipe.dgrad == "fp8",
        transposed=isinstance(kept.lhs, Scaled),
    )
    if isinstance(kept.rhs, Scaled):
        d_lhs = product.rows_by_weights("dgrad", ct_rows, kept.rhs, *groups, product.lhs_dtype)
    else:
        d_lhs = ragged.ragged_noncontracting(
            ct.astype(kept.rhs.dtype),
            kept.rhs,
            *groups,
            transpose_lhs=False,
            transpose_rhs=True,
            preferred_element_type=product.lhs_dtype,
            precision=None,
            implementation=product.implementation,
            **product.tiles.params("dgrad"),
        )
    if recipe.wgrad == "fp8" and isinstance(kept.lhs, jax.Array):
        d_rhs = weight_gradient(
            product, kept.lhs, ct, *groups, product.rhs_dtype, num_groups=num_groups
        )
    else:
        d_rhs = product.rows_by_rows(
            kept.lhs,
            ct_columns or ct,
            *groups,
            product.rhs_dtype,
            num_rows=ct.shape[0],
            num_groups=num_groups,
        )
    # Each device contracts all groups of its rows.
    d_rhs = groups_split_like(d_rhs, kept.rhs)
    return d_lhs, d_rhs, None, None, None


_dot.defvjp(_dot_forward, _dot_backward)


def _check_operands(lhs, rhs, group_sizes, group_offset):
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if x.dtype not in SOURCE_DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
    if lhs.ndim != 2 or rhs.ndim != 3 or rhs.shape[1] != lhs.shape[1]:
        raise TypeError(
            f"lhs must be [m, k] and rhs [g, k, n], got lhs {lhs.shape} and rhs {rhs.shape}"
        )
    check_group_count("rhs", group_sizes, rhs.shape[0], group_offset)


def _checked_quantized(quantized: Any, rhs: jax.Array, recipe: Recipe) -> QuantizedWeights:
    if isinstance(quantized, QuantizedArray) and quantized.format.name == "fp8_128x128":
        values, scales = quantized.values, quantized.scales
        quantized = QuantizedWeights(values, scales, values.mT, scales.mT)
    if not isinstance(quantized, QuantizedWeights):
        raise TypeError(
            "quantized_rhs must be QuantizedWeights, as quantize_weights returns them, or a "
            f"QuantizedArray of the format fp8_128x128, got {type(quantized).__name__}"
        )
    values, scales = quantized_blocks(*rhs.shape)
    wanted = {
        "values": (values, recipe.forward_dtype),
        "scales": (scales, jnp.float32),
        "values_t": ((*values[:1], *values[:0:-1]), recipe.forward_dtype),
        "scales_t": ((*scales[:1], *scales[:0:-1]), jnp.float32),
    }
    for name, (shape, dtype) in wanted.items():
        x = as_array(f"quantized_rhs.{name}", getattr(quantized, name))
        if (x.shape, x.dtype) != (shape, dtype):
            raise TypeError(
                "quantized_rhs must be quantize_weights(rhs) in recipe.forward_dtype, whose "
                f"{name} is {np.dtype(dtype)} of shape {shape}, got {x.dtype} of shape {x.shape}"
            )
    return quantized
