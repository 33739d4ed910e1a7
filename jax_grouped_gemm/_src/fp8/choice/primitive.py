"""An operation that computes nothing, and marks programs that have bf16 in place of a recipe.

`explain` finds the choice and its reason in this operation.
"""

from __future__ import annotations

import jax

from jax_grouped_gemm._src.fp8.choice.plan import Choice, plan_choice
from jax_grouped_gemm._src.op import Op


def noted(group_sizes: jax.Array, choice: Choice) -> jax.Array:
    """Returns `group_sizes`, marked so that `explain` finds the choice."""
    return OP.bind(group_sizes, choice=choice, implementation=None)


OP = Op(
    name=Choice.op,
    operand_ranks=None,
    targets=(),
    avals=lambda sizes, **params: sizes,
    planner=plan_choice,
    composed=lambda sizes, **params: sizes,
    reference=lambda sizes, **params: sizes,
    is_matmul=False,
    is_listed=True,
    computes=False,
)

OP.def_batching(lambda operands, dims, **params: (OP.bind(*operands, **params), dims[0]))
