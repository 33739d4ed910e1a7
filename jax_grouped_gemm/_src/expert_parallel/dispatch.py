"""Tokens that travel in 8 bits, with their scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.expert_parallel import collectives
from jax_grouped_gemm._src.expert_parallel.group import Group
from jax_grouped_gemm._src.expert_parallel.options import Auto, Combine, Strategy
from jax_grouped_gemm._src.fp8.formats import BLOCK, Scaled
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.fp8.quantize.api import SOURCE_DTYPES
from jax_grouped_gemm._src.fp8.recipe import Recipe, checked_recipe
from jax_grouped_gemm._src.tile_choices import current_tiles


def checked_dispatch_recipe(function: str, recipe: Recipe | None, dtype: np.dtype) -> Recipe | None:
    """A recipe whose scales travel with their tokens, or None.

    Raises:
      TypeError: it is no recipe, or tokens are no floats that are quantised.
      ValueError: it has one scale for all tokens.
    """
    if recipe is None:
        return None
    if checked_recipe(recipe).scaling == "tensorwise":
        raise ValueError(
            f"{function}: dispatch_recipe must scale each row, or each 128 elements of one, got "
            f"scaling={recipe.scaling!r}"
        )
    if dtype not in SOURCE_DTYPES:
        raise TypeError(
            f"{function}: x must be bfloat16, float16 or float32 for a dispatch_recipe, got {dtype}"
        )
    return recipe


def check_dispatch_strategy(
    function: str, recipe: Recipe | None, strategy: Strategy | Auto
) -> None:
    """Raises a `ValueError` if tokens are to be quantised for a strategy that has no use for it."""
    if recipe is not None and strategy == "ragged_all_to_all":
        raise ValueError(f"{function}: dispatch_recipe is for strategy='all_gather'")


def gather_quantized(
    x: jax.Array, group: Group, combine: Combine, recipe: Recipe, implementation: Implementation
) -> tuple[jax.Array, Scaled]:
    """[T, D] of each device -> [sources * T, D] of all, rounded, and the same as it arrives.

    The derivative is that of a gather of x: gradients are neither rounded nor quantised.
    """
    quantizer = Fp8Products(recipe, implementation, current_tiles())
    none = jnp.zeros((), jnp.int32)  # sizes of groups, of which scales of rows know nothing
    values, scales = quantizer.quantize_rows(
        lax.stop_gradient(x), none, recipe.forward_dtype, plain=True
    )[0]
    # As bytes, since not every collective of every platform knows the type.
    received = collectives.gather(lax.bitcast_convert_type(values, jnp.uint8), group, combine)
    pair = Scaled(
        lax.bitcast_convert_type(received, values.dtype), collectives.gather(scales, group, combine)
    )

    @jax.custom_jvp
    def rounded(x, pair):
        return dequantized(pair).astype(x.dtype)

    @rounded.defjvp
    def _(primals, tangents):
        return rounded(*primals), collectives.gather(tangents[0], group, combine)

    return rounded(x, pair), pair


def dequantized(pair: Scaled) -> jax.Array:
    """Values times scales, in float32."""
    values, scales = pair.values.astype(jnp.float32), pair.scales
    if scales.shape[1] > 1:
        scales = jnp.repeat(scales, BLOCK, axis=1)[:, : values.shape[1]]
    return values * scales
