"""bf16 in place of a recipe, where that is predicted to be faster.

The choice decides what is traced, before the device is known, so it follows from shapes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_grouped_gemm._src import fallback
from jax_grouped_gemm._src.device import Target, duration
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

    op = "recipe_in_bf16"

    def terms(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the terms of the times in FP8 and in bf16."""
        fp8, bf16 = Cost(), Cost()
        self.of.in_fp8(self.recipe, fp8, training=self.training)
        self.of.in_bf16(bf16, training=self.training)
        return fp8.terms(), bf16.terms()

    def seconds(self) -> tuple[float, float, bool]:
        """Returns the predicted seconds in FP8 and in bf16, and whether to take bf16."""
        return fallback.compared(KIND, *self.terms())

    def __str__(self) -> str:
        what = "with its gradients" if self.training else "forward alone"
        return f"{self.of}, {what}"


def bf16_choice(
    of: Dot | Layer, recipe: Recipe, dtypes: Iterable[Any], implementation: Any, *, training: bool
) -> Choice | None:
    """Returns the choice if it is bf16, otherwise None.

    Args:
      of: the computation.
      recipe: its recipe.
      dtypes: dtypes of the operands. bf16 needs all operands to have one 16-bit dtype.
      implementation: what the caller asks for. Asking for kernels or XLA means the recipe.
      training: whether gradients are computed too.
    """
    found = {np.dtype(x).name for x in dtypes}
    products = (recipe.forward, recipe.dgrad, recipe.wgrad)[: 3 if training else 1]
    if not fallback.is_open(implementation) or len(found) > 1 or "fp8" not in products:
        return None
    if not found <= set(BF16.lhs) or not of.is_known:
        return None
    choice = Choice(of, recipe, training)
    return choice if choice.seconds()[2] else None


def plan_choice(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> Plan[Choice]:
    """The plan that `explain` shows for a choice."""
    choice = params["choice"]
    fp8, bf16, _ = choice.seconds()
    reason = f"predicted to take {duration(bf16)}, and {duration(fp8)} in FP8"
    return Plan(choice, BF16, reason)
