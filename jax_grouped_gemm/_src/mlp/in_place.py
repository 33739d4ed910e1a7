"""Decides which products of an expert MLP read the rows of tokens in place (docs/notes/moe.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from jax_grouped_gemm._src.activations import Activation
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import MlpOperands, Rows
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.plan import DEFAULT_TILE

# Columns of hidden up to which gate and up are computed from tokens in place, the most that were
# measured. Rows without an `inverse` have a limit of their own, because their groups may have rows
# without a token, which are slow to load.
FORWARD_COLUMNS, FORWARD_COLUMNS_WITHOUT_INVERSE = 2880, 256

# Columns up to which gradients read rows of x and dy in place. With more columns, more tiles load
# the same rows, and issuing the loads takes longer than copying rows once. This was measured for
# 512, 768, 2048 and more columns.
GRADIENT_COLUMNS = 768


def in_forward(problem: MlpProblem[MlpOperands]) -> bool:
    """Whether the product of large groups is faster on tokens in place than on copies."""
    experts, epilogue = problem.operands.experts, Epilogue.of(problem.params["activation"])
    are_tokens = problem.operands.rows.inverse is not None
    return (
        epilogue is not None
        and epilogue.is_sigmoid
        and experts.has_up
        and not experts.has_biases
        and experts.hidden_columns
        <= (FORWARD_COLUMNS if are_tokens else FORWARD_COLUMNS_WITHOUT_INVERSE)
    )


Gather = Literal["", "before", "in place"]
"""How a kernel gets rows, see `MlpPlan.gather`."""


def gather(rows: Rows, reads_in_place: bool) -> Gather:
    """Returns how a kernel gets rows that it may read in place."""
    if rows.rows is None:
        return ""
    return "in place" if reads_in_place else "before"


def of_dy(operands: MlpOperands, params: Mapping[str, Any]) -> bool:
    """Whether the gradients of hidden and of wo read rows of dy in place."""
    experts, wgrad = operands.experts, params["tile_choices"].wgrad
    return (
        operands.rows.inverse is not None
        and has_plain_gradient(params["activation"])
        and experts.has_up
        and not experts.has_biases
        and wgrad in (None, DEFAULT_TILE)
        and experts.hidden_columns <= GRADIENT_COLUMNS
    )


def has_plain_gradient(activation: Activation) -> bool:
    """Whether the kernel that reads rows of dy in place has the gradient: gate sigmoid(a gate)."""
    epilogue = Epilogue.of(activation)
    return epilogue is not None and epilogue == Epilogue(epilogue.alpha, 0.0, math.inf, 0.0)
