"""The weights of an expert MLP, quantised once for all of its products."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import register_namedtuple_serialization
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import Implementation, as_array, checked_implementation
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.fp8.quantize.api import SOURCE_DTYPES, QuantizedWeights
from jax_grouped_gemm._src.fp8.recipe import Recipe, checked_recipe
from jax_grouped_gemm._src.fp8.weight_formats import ROWS_128X128
from jax_grouped_gemm._src.mlp.operands import ExpertWeights
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.quantized.primitive import frozen
from jax_grouped_gemm._src.tile_choices import TileChoices, current_tiles


class QuantizedMlp(NamedTuple):
    """The matrices of experts in the layout that a layer's products read, in blocks of 128 x 128.

    `values` [..., k, n] with `scales` are for the gradients of rows, and `values_t` [..., n, k]
    with `scales_t` are for the forward products. Gate and up are one matrix `wi`. Its columns are
    the F columns of wi_0, zeros up to the next multiple of 128, and then the columns of wi_1 with
    zeros in the same way. The public name is deprecated, and will be removed in 0.4. Pass on what
    `quantize_mlp` returns.
    """

    wi: QuantizedWeights  # of [..., D, 2 F]
    wo: QuantizedWeights  # of [..., F, D]


register_namedtuple_serialization(QuantizedMlp, serialized_name="jax_grouped_gemm.QuantizedMlp")


def quantize_mlp(
    wi_0: ArrayLike,
    wi_1: ArrayLike | None,
    wo: ArrayLike,
    recipe: Recipe = Recipe(),  # noqa: B008 - immutable
    *,
    implementation: Implementation = None,
) -> QuantizedMlp:
    """Quantises the weights of `ragged_mlp` or `moe.dropless_mlp` for several calls.

    Weights change once in an optimiser step. Quantise them right after the update, and all
    microbatches use the result, in the forward and backward pass and in rematerialisation:

        quantized = jax_grouped_gemm.quantize_mlp(wi_0, wi_1, wo, recipe)
        y = moe.dropless_mlp(x, routing, wi_0, wi_1, wo, recipe=recipe, quantized=quantized)

    Gradients still go to `wi_0`, `wi_1` and `wo`. A layer reads their values only where it computes
    in bf16, see `Recipe`.

    Args:
      wi_0, wi_1: gate and up projections [..., D, F], bfloat16, float16 or float32; `wi_1` is None
        if a hidden layer has no up projection.
      wo: down projections [..., F, D].
      recipe: the recipe of the layer, with both the forward product and dgrad in FP8.
      implementation: what runs the quantisers, see `quantize_blockwise`.

    Raises:
      TypeError: an operand has an unsuitable dtype or shape.
      ValueError: `recipe` has forward or dgrad in bf16, or `implementation` is invalid.
    """
    recipe = checked_recipe(recipe)
    check_is_fused("quantize_mlp", recipe)
    given = {"wi_0": wi_0, "wo": wo} | ({} if wi_1 is None else {"wi_1": wi_1})
    arrays = {name: as_array(name, x) for name, x in given.items()}
    shape = arrays["wi_0"].shape
    for name, x in arrays.items():
        if x.dtype not in SOURCE_DTYPES:
            raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")
        expected = (*shape[:-2], shape[-1], shape[-2]) if name == "wo" else shape
        if x.ndim < 3 or x.shape != expected:
            raise TypeError(
                f"{name} must be {'[..., F, D]' if name == 'wo' else '[..., D, F]'}, {expected} as "
                f"wi_0 {shape}, got {x.shape}"
            )
    return _quantized(
        Fp8Products(recipe, checked_implementation(implementation), current_tiles()),
        arrays["wi_0"],
        arrays.get("wi_1"),
        arrays["wo"],
    )


def _quantized(products: Fp8Products, wi_0, wi_1, wo) -> QuantizedMlp:
    leading = wi_0.shape[:-2]

    def flat(x):
        return None if x is None else x.reshape(math.prod(leading), *x.shape[-2:])

    matrices = quantize_experts(products, *map(flat, (wi_0, wi_1, wo)), plain=True, transposed=True)
    return QuantizedMlp(
        *(
            QuantizedWeights(*(x.reshape(*leading, *x.shape[1:]) for form in both for x in form))
            for both in matrices
        )
    )


def quantize_experts(products: Fp8Products, wi_0, wi_1, wo, *, plain: bool, transposed: bool):
    """Returns (plain, transposed) of gate and up joined, and of down; None if not asked for."""
    forms = dict(plain=plain, transposed=transposed)
    down = None if wo is None else products.quantize_weights(wo, **forms)
    if wi_1 is None:
        return products.quantize_weights(wi_0, **forms), down
    return products.quantize_joined(wi_0, wi_1, **forms), down


def check_arrays(function: str, weights: ExpertWeights, recipe: Recipe) -> None:
    """Raises a `ValueError` unless a recipe can multiply by these `QuantizedArray`s directly."""
    check_is_fused(function, recipe)
    wanted = dataclasses.replace(ROWS_128X128, values=np.dtype(recipe.forward_dtype))
    for name, q in weights.quantized.items():
        if q.format != wanted:
            raise ValueError(
                f"{function}: with a recipe, {name} must be of the format {wanted} in the layout "
                f"'rows', got {q.format} in the layout {q.format.layout!r}"
            )


def of_arrays(weights: ExpertWeights, dtype: np.dtype) -> tuple[ExpertWeights, QuantizedMlp]:
    """Returns the `quantize_mlp` of weights that are `QuantizedArray`s of the layout "rows".

    Returns:
      zeros of `dtype` as matrices, which nothing reads, and the quantised matrices. Differentiating
      the quantised matrices raises an error (`frozen`).
    """

    def both_ways(*matrices: QuantizedArray) -> QuantizedWeights:
        parts = [frozen((q.values, q.scales)) for q in matrices]
        padding = -matrices[0].shape[-1] % BLOCK if len(matrices) > 1 else 0
        values = jnp.concatenate(
            [jnp.pad(x, ((0, 0), (0, 0), (0, padding))) for x, _ in parts], axis=-1
        )
        scales = jnp.concatenate([x for _, x in parts], axis=-1)
        return QuantizedWeights(values, scales, values.mT, scales.mT)

    given = weights.quantized
    wi = both_ways(*(q for name, q in given.items() if name != "wo"))
    unread = {name: jnp.zeros(q.shape, dtype) for name, q in given.items()}
    quantized: Any = QuantizedMlp(wi, both_ways(given["wo"])) if "wo" in given else wi
    return dataclasses.replace(weights, **unread), quantized


def check_is_fused(function: str, recipe: Recipe) -> None:
    """Raises a `ValueError` unless all products of rows are in FP8."""
    if (recipe.forward, recipe.dgrad) != ("fp8", "fp8"):
        raise ValueError(
            f"{function}: quantised weights are for recipes with forward='fp8' and dgrad='fp8', "
            f"got {recipe}"
        )


def checked_quantized(
    function: str,
    quantized: Any,
    wi_0: jax.Array,
    wi_1: jax.Array | None,
    wo: jax.Array | None,
    recipe: Recipe,
) -> QuantizedMlp:
    """Returns `quantized` if it has the shapes and dtypes of `quantize_mlp` of these weights.

    Without `wo`, `quantized` is the field `wi`, and both fields of the result are this `wi`.
    """
    check_is_fused(function, recipe)
    kind: Any = QuantizedMlp if wo is not None else QuantizedWeights
    if not isinstance(quantized, kind):
        raise TypeError(
            f"{function}: quantized must be a {kind.__name__}, as quantize_mlp returns it"
            f"{' in its wi' * (wo is None)}, got {type(quantized).__name__}"
        )
    if wo is None:
        quantized = QuantizedMlp(quantized, quantized)
    of = functools.partial(_quantized, Fp8Products(recipe, "xla", TileChoices()))
    wanted = jax.eval_shape(of, wi_0, wi_1, wi_0 if wo is None else wo)
    if wo is None:
        wanted = QuantizedMlp(wanted.wi, wanted.wi)
    for part, of_part in wanted._asdict().items():
        given = getattr(quantized, part)
        if not isinstance(given, QuantizedWeights):
            raise TypeError(
                f"{function}: quantized.{part} must be QuantizedWeights, as quantize_mlp returns "
                f"them, got {type(given).__name__}"
            )
        for field, want in of_part._asdict().items():
            x = as_array(f"{function}: quantized.{part}.{field}", getattr(given, field))
            if (x.shape, x.dtype) != (want.shape, want.dtype):
                raise TypeError(
                    f"{function}: quantized must be quantize_mlp of these weights and this recipe, "
                    f"whose {part}.{field} is {want.dtype} of shape {want.shape}, got {x.dtype} "
                    f"of shape {x.shape}"
                )
    return quantized
