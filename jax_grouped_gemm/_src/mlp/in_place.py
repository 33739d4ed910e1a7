"""Which products of an expert MLP read the rows of tokens where they are (docs/notes/moe.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jax_grouped_gemm._src.activations import Activation
from jax_grouped_gemm._src.arrays import cdiv, is_static
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import MlpOperands, PairedWeightsOperands
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.plan import DEFAULT_TILE

# Columns of hidden in a tile. Reading tokens in place is faster than copies up to two: a cluster
# computes both from the same rows, and a tile that has all columns is the only one that reads its
# rows. For more than two, weights are read more often.
COLUMNS_OF_TILE = 128
TILES_IN_PLACE = 2

# Columns of hidden up to which both products that need rows of dy read them in place: each block
# loads its own rows.
DY_COLUMNS = 768

# Columns up to which the gradients of the weights of gate and up read rows of x in place: one tile
# has all columns of a result. With more columns each block loads its own rows, which is faster for
# groups of few rows in the mean.
CONTRACTED_COLUMNS = 256
FEW_ROWS_COLUMNS, FEW_ROWS = 768, 256


def in_forward(problem: MlpProblem[MlpOperands]) -> bool:
    """Whether the product of large groups is faster on tokens in place than on copies."""
    experts, epilogue = problem.operands.experts, Epilogue.of(problem.params["activation"])
    return (
        epilogue is not None
        and epilogue.is_sigmoid
        and experts.has_up
        and not experts.has_biases
        and cdiv(experts.hidden_columns, COLUMNS_OF_TILE) <= TILES_IN_PLACE
    )


def in_gradients(operands: MlpOperands, params: Mapping[str, Any]) -> bool:
    """Whether the gradient of hidden and that of wo are faster on dy in place than on copies."""
    experts, wgrad = operands.experts, params["tile_choices"].wgrad
    return (
        operands.rows.inverse is not None
        and has_plain_gradient(params["activation"])
        and experts.has_up
        and not experts.has_biases
        and experts.hidden_columns <= DY_COLUMNS
        and wgrad in (None, DEFAULT_TILE)
    )


def in_weight_gradients(operands: PairedWeightsOperands) -> bool:
    """Whether gradients of the weights of gate and up are faster on x in place than on copies."""
    columns, rows = operands.d0.shape[1], operands.rows.num_rows
    groups = operands.groups.sizes.shape[0]
    has_few_rows = is_static(rows, groups) and rows <= FEW_ROWS * groups
    return columns <= (FEW_ROWS_COLUMNS if has_few_rows else CONTRACTED_COLUMNS)


def has_plain_gradient(activation: Activation) -> bool:
    """Whether the kernel that reads rows of dy in place has the gradient: gate sigmoid(a gate)."""
    epilogue = Epilogue.of(activation)
    return epilogue is not None and epilogue == Epilogue(epilogue.alpha, 0.0, math.inf, 0.0)
