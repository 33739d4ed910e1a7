"""The MLP of experts with a recipe: the fused layer, or a composition for other recipes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jax_grouped_gemm._src.fp8.api import SOURCE_DTYPES
from jax_grouped_gemm._src.fp8.formats import Pair
from jax_grouped_gemm._src.fp8.recipe import Recipe, checked_recipe
from jax_grouped_gemm._src.fp8.training import fp8_ragged_dot
from jax_grouped_gemm._src.mlp import composed
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.fp8 import layer
from jax_grouped_gemm._src.mlp.fp8.weights import checked_quantized
from jax_grouped_gemm._src.mlp.operands import MlpOperands, Rows, named
from jax_grouped_gemm._src.mlp.primitive import Options, closes_over_traced
from jax_grouped_gemm._src.mlp.reference import row_weights
from jax_grouped_gemm._src.plan import using_tiles
from jax_grouped_gemm._src.ragged.reference import owned_rows


def mlp(
    function: str,
    options: Options,
    operands: MlpOperands,
    recipe: Recipe | None,
    quantized: Any,
    precision: Any,
    *,
    tokens: Pair | None = None,
    combines: bool = False,
) -> jax.Array:
    """`layer.mlp` of checked operands, its arguments checked further.

    Args:
      function: whose arguments they are.
      options: of the primitives.
      operands: see `layer.mlp`. Gate and up may be joined.
      recipe: which products are in FP8.
      quantized: a `QuantizedMlp`, or its `wi` where there is no wo; None without.
      precision: None, as a recipe leaves nothing to it.
      tokens: see `layer.mlp`.
      combines: see `layer.mlp`.

    Raises:
      TypeError, ValueError: the recipe or what is quantised does not fit the rest.
    """
    if operands.rows.count is not None:
        raise TypeError(
            f"{function}: a recipe takes no count of valid rows: the others hold anything, and "
            "scales are found of all rows"
        )
    if recipe is None:
        raise ValueError(f"{function}: quantized needs the recipe that it was made with")
    recipe = checked_recipe(recipe)
    if precision is not None:
        raise ValueError(
            f"{function}: recipe decides how the matmuls are computed, so that precision must be "
            f"None, got precision={precision!r}"
        )
    # Each half is quantised on its own, as `quantize_mlp` does.
    wi_0, wi_1 = operands.experts.halves
    operands = operands.with_experts(wi=None, wi_0=wi_0, wi_1=wi_1)
    for name, x in named(operands).items():
        if name in ("x", "wi_0", "wi_1", "wo") and x.dtype not in SOURCE_DTYPES:
            raise TypeError(
                f"{function}: {name} must be bfloat16, float16 or float32 for a recipe, got "
                f"{x.dtype}"
            )
    if quantized is not None:
        wo = operands.experts.wo
        quantized = checked_quantized(function, quantized, wi_0, wi_1, wo, recipe)
    if (recipe.forward, recipe.dgrad) == ("fp8", "fp8"):
        if closes_over_traced(options, operands):
            raise NotImplementedError(
                f"{function}: activation closes over traced values, such as arrays made under "
                "jax.jit, which a recipe with forward='fp8' and dgrad='fp8' cannot have; take "
                "Python numbers or NumPy arrays, or another recipe"
            )
        return layer.mlp(
            recipe,
            options.activation,
            operands,
            quantized,
            options.implementation,
            tokens=tokens,
            combines=combines,
        )
    y = _composed(options, operands, recipe)
    return token_rows.combine(y, operands.rows) if combines else y


def _composed(options: Options, given: MlpOperands, recipe: Recipe) -> jax.Array:
    ragged_dot = functools.partial(
        fp8_ragged_dot, recipe=recipe, implementation=options.implementation
    )
    rows = Rows(token_rows.on_rows(given.rows))
    with using_tiles(options.tile_choices):
        owned = owned_rows(*given.groups.indices, given.experts.count, rows.num_rows)
        weights = row_weights(given.weights, owned, rows.x)
        operands = dataclasses.replace(given, rows=rows, weights=weights)
        return composed.mlp(ragged_dot, options.activation, operands)
