"""A program that has taken bf16 in place of a recipe has an operation that does nothing.

`explain` finds the choice and its reason in it.
"""

from __future__ import annotations

import jax

from jax_grouped_gemm._src.fp8.choice.plan import Choice, plan_choice
from jax_grouped_gemm._src.op import Op


def noted(group_sizes: jax.Array, choice: Choice) -> jax.Array:
    """`group_sizes`, in a program in which `explain` finds the choice."""
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
