"""Chooses bf16 in place of a recipe, where bf16 is predicted to be faster.

The choice decides what is traced, before the device is known, so it follows from shapes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_grouped_gemm._src import fallback
from jax_grouped_gemm._src.device import duration
from jax_grouped_gemm._src.fp8.prediction import KIND, Cost, Dot, Layer
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.plan import FLOATS_16, Kernel, Plan

BF16 = Kernel("bf16", lhs=FLOATS_16)
"""Products in 16 bits; each has its own plan."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A computation with a recipe, for training or for the forward pass alone."""

    of: Dot | Layer
    recipe: Recipe
    training: bool
    given: bool = False  # whether weights are quantised before the call

    op = "recipe_in_bf16"

    def terms(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the terms of the times in FP8 and in bf16."""
        fp8, bf16 = Cost(given=self.given), Cost(given=self.given)
        self.of.in_fp8(self.recipe, fp8, training=self.training)
        self.of.in_bf16(bf16, training=self.training)
        return fp8.terms, bf16.terms

    def seconds(self) -> tuple[float, float, bool]:
        """Returns the predicted seconds in FP8 and in bf16, and whether to take bf16."""
        return fallback.compared(KIND, *self.terms())

    def plan(self) -> Plan[Choice]:
        """Returns the plan that `explain` shows for this choice."""
        fp8, bf16, _ = self.seconds()
        return Plan(self, BF16, f"predicted to take {duration(bf16)}, and {duration(fp8)} in FP8")

    def __str__(self) -> str:
        what = "with its gradients" if self.training else "forward alone"
        return f"{self.of}, {what}{', weights quantised before' * self.given}"


def bf16_choice(choice: Choice, dtypes: Iterable[Any], implementation: Any) -> Choice | None:
    """Returns `choice` if bf16 may run and is predicted to be faster, otherwise None.

    Args:
      choice: the computation.
      dtypes: dtypes of the operands. bf16 needs all operands to have one 16-bit dtype.
      implementation: the caller's choice. If it is "cuda" or "xla", the recipe is kept.
    """
    found, recipe = {np.dtype(x).name for x in dtypes}, choice.recipe
    products = (recipe.forward, recipe.dgrad, recipe.wgrad)[: 3 if choice.training else 1]
    if len(found) > 1 or not found <= set(BF16.lhs) or "fp8" not in products:
        return None
    is_open = fallback.is_open(implementation) and choice.of.is_known
    return choice if is_open and choice.seconds()[2] else None
