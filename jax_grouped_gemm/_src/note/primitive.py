"""An operation that computes nothing. It tells `explain` of a choice made while tracing.

Examples are bf16 in place of a recipe, and a layer that no fused kernel computes.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.plan import Plan


class Note(Protocol):
    """A choice. It is a parameter of a primitive, so it must be hashable."""

    def plan(self) -> Plan[Any]:
        """Returns the plan that `explain` shows for the choice."""


def noted(group_sizes: jax.Array, note: Note) -> jax.Array:
    """Returns `group_sizes`, marked so that `explain` finds the choice."""
    return OP.bind(group_sizes, note=note, implementation=None)


OP = Op(
    name="note",
    operand_ranks=None,
    targets=(),
    avals=lambda sizes, **params: sizes,
    planner=lambda avals, params, target: params["note"].plan(),
    composed=lambda sizes, **params: sizes,
    reference=lambda sizes, **params: sizes,
    is_matmul=False,
    is_listed=True,
    computes=False,
)

OP.def_batching(lambda operands, dims, **params: (OP.bind(*operands, **params), dims[0]))
