"""The MLP of experts with a recipe: the fused layer, or a composition for other recipes."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_grouped_gemm._src.fp8.api import SOURCE_DTYPES
from jax_grouped_gemm._src.fp8.recipe import Recipe, checked_recipe
from jax_grouped_gemm._src.fp8.training import fp8_ragged_dot
from jax_grouped_gemm._src.mlp import composed
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.fp8 import layer
from jax_grouped_gemm._src.mlp.fp8.weights import checked_quantized
from jax_grouped_gemm._src.mlp.primitive import closes_over_traced
from jax_grouped_gemm._src.mlp.reference import row_weights
from jax_grouped_gemm._src.plan import using_tiles
from jax_grouped_gemm._src.ragged.reference import owned_rows


def mlp(
    function: str,
    options: Any,
    operands: dict[str, jax.Array],
    recipe: Recipe | None,
    quantized: Any,
    precision: Any,
    *,
    combines: bool = False,
) -> jax.Array:
    """`layer.mlp` of checked operands, its arguments checked further.

    Args:
      function: whose arguments they are.
      options: `mlp.primitive.Options`.
      operands: see `layer.mlp`.
      recipe: which products are in FP8.
      quantized: a `QuantizedMlp`, or its `wi` where there is no wo; None without.
      precision: None, as a recipe leaves nothing to it.
      combines: see `layer.mlp`.

    Raises:
      TypeError, ValueError: the recipe or what is quantised does not fit the rest.
    """
    if "count" in operands:
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
    for name in composed.FACTORS:
        if name in operands and operands[name].dtype not in SOURCE_DTYPES:
            raise TypeError(
                f"{function}: {name} must be bfloat16, float16 or float32 for a recipe, got "
                f"{operands[name].dtype}"
            )
    if quantized is not None:
        wi_0, wi_1, wo = (operands.get(name) for name in ("wi_0", "wi_1", "wo"))
        assert wi_0 is not None
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
            combines=combines,
        )
    y = _composed(options, operands, recipe)
    if not combines:
        return y
    rows = operands["rows"], operands.get("inverse")
    return token_rows.combine(y, *rows, num_tokens=operands["x"].shape[0])


def _composed(options, given, recipe) -> jax.Array:
    ragged_dot = functools.partial(
        fp8_ragged_dot, recipe=recipe, implementation=options.implementation
    )
    x, sizes, offset = (given[name] for name in ("x", "group_sizes", "group_offset"))
    if "rows" in given:
        x = token_rows.gather(x, given["rows"], given.get("inverse"))
    with using_tiles(options.tile_choices):
        owned = owned_rows(sizes, offset, given["wi_0"].shape[0], x.shape[0])
        weights = row_weights(given.get("weights"), owned, x)
        return composed.mlp(ragged_dot, options.activation, x, given, weights)
