"""Whole mixture-of-experts layers in FP8, with weights quantised in each call or before."""

from collections.abc import Callable
from typing import Any

import jax

import jax_grouped_gemm as jgg
from benchmarks.harness.peer import JaxPeer, Role

RECIPES = {
    "blockwise": jgg.Recipe.blockwise(),
    "blockwise_bf16_wgrad": jgg.Recipe.blockwise(wgrad="bf16"),
}
TOLERANCE = 0.1
"""The relative error of a chain of products of operands with three bits of mantissa."""


class Fp8Layer(JaxPeer):
    """A layer with a recipe.

    Args:
      name: name of the recipe.
      function: function of the layer's operands, a recipe, and quantised weights or None.
      quantized: whether weights are quantised before the call, as in an optimiser step of many
        microbatches; otherwise each call quantises them.
      part_of: see `Call`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        quantized: bool,
        part_of: Callable[[str], str],
    ):
        recipe = RECIPES[name]

        def run(*operands):
            *operands, weights = operands
            return function(*operands, recipe=recipe, quantized=weights)

        super().__init__(
            f"fp8_{name}{'_quantized' * quantized}",
            Role.VARIANT,
            run,
            checked=True,
            part_of=part_of,
        )
        self.recipe = recipe
        self.quantized = quantized

    def arguments(self, *operands: jax.Array) -> tuple[Any, ...]:
        """Returns the operands of the function: the layer's, and quantised weights or None."""
        *_, wi_0, wi_1, wo, _ = operands
        if not self.quantized:
            return *operands, None
        return *operands, jax.jit(jgg.quantize_mlp, static_argnums=3)(wi_0, wi_1, wo, self.recipe)

    def prepare(self, problem, *operands):
        """Compiles the layer, and quantises the weights if `quantized`."""
        call = super().prepare(problem, *self.arguments(*operands))
        call.tolerance = TOLERANCE
        return call
