"""Plans sorts and moves of rows, from static shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import cdiv, is_static
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    FLOATS,
    FLOATS_8,
    NOTHING,
    XLA,
    Formats,
    Kernel,
    Plan,
    choose,
    operand_reason,
)
from jax_grouped_gemm._src.sizes import MOST_ROW_BATCHES, too_large, too_large_operands

MOST_EXPERTS = 16384
"""The most experts for which a thread block has a counter for each expert."""

PAIRS_OF_A_SORT_IN_ONE_BLOCK = 4096
PAIRS_OF_A_BLOCK = 1024
MOST_BLOCKS = 128
COUNTS_OF_ALL_BLOCKS = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sort(Kernel):
    """A way to sort. The problem that it takes is the number of pairs.

    Attributes:
      blocks: returns the number of thread blocks for numbers of pairs and of experts.
    """

    blocks: Callable[[int, int], int]


def _several_blocks(pairs: int, num_experts: int) -> int:
    """Returns the fastest number of thread blocks. Each block reads the counts of all blocks."""
    by_counts = max(8, COUNTS_OF_ALL_BLOCKS // (num_experts + 1))
    return min(cdiv(pairs, PAIRS_OF_A_BLOCK), MOST_BLOCKS, by_counts)


SORTS = (
    Sort(
        "two_launches",
        record=("h200_moe_quack.json", "qwen3_30b/moe_forward"),
        blocks=_several_blocks,
    ),
    Sort(
        "one_launch",
        record=("h200_moe_decode.json", "qwen3_30b_16/moe_forward"),
        blocks=lambda pairs, num_experts: 1,
        pays=lambda pairs, target: pairs <= PAIRS_OF_A_SORT_IN_ONE_BLOCK,
    ),
)
"""The table of kernels for sorts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move(Kernel):
    """A way to move rows of the formats `lhs`. Sums are in float32.

    Attributes:
      columns: number of columns of a row that are moved at a time.
    """

    lhs: Formats = FLOATS
    columns: int = 1


GATHERS = (
    Move("by_row"),
    Move("by_token", pays=lambda row_of_pair, target: row_of_pair.shape[-1] != 0),
)
"""The table for gathers. "by_token" reads each token once, but needs to know the rows of each
token. The problem is `row_of_pair`."""

COPIES = *GATHERS, *(dataclasses.replace(x, lhs=FLOATS_8, columns=2) for x in GATHERS)
"""The table for gathers without weights, which also copy FP8."""

MOVES = {
    "gather_rows": GATHERS,
    "combine_rows": (Move("combine_rows"),),
    "row_dots": (Move("row_dots"),),
}
"""The table of each primitive that moves rows."""

RANKS = {
    "gather_rows": (2, 1, 2, 2, 1),
    "combine_rows": (2, 1, 2, 2, 1),
    "row_dots": (2, 2, 1, 2, 1),
}
"""Ranks of the operands of primitives that move rows, without the batch dimension."""


@dataclasses.dataclass(frozen=True)
class RowsProblem:
    """Static description of one operation on rows.

    Attributes:
      op: name of the primitive.
      results: results of the primitive.
      divisor: parameter of a move, see `reference`.
    """

    op: str
    results: tuple[jax.ShapeDtypeStruct, ...]
    divisor: int = 1

    def __str__(self) -> str:
        return f"{self.op} -> {', '.join(f'{x.dtype}{list(x.shape)}' for x in self.results)}"


RowsPlan = Plan[RowsProblem]


def plan_sort(avals: Sequence[Any], params: Mapping[str, Any], target: Any = None) -> RowsPlan:
    """Returns the plan of a `sort_by_expert` from its operand's aval and its parameters."""
    (experts,) = avals
    *batch, n = experts.shape
    num_experts = params["num_experts"]
    pairs = jax.ShapeDtypeStruct((*batch, n), jnp.int32)
    results = (pairs, pairs, jax.ShapeDtypeStruct((*batch, num_experts), jnp.int32))
    reason = _no_kernel_reason(avals, params, batch)
    if not reason and not 1 <= num_experts <= MOST_EXPERTS:
        reason = f"the kernel sorts by 1 to {MOST_EXPERTS} experts, got {num_experts}"
    sort = SORTS[0] if reason else choose(SORTS, n, target)
    grid = 0 if reason else sort.blocks(n, num_experts)
    problem = RowsProblem("sort_by_expert", results)
    return _plan(problem, reason, 0 in experts.shape, sort, grid)


def plan_move(
    op: str, avals: Sequence[Any], params: Mapping[str, Any], target: Any = None
) -> RowsPlan:
    """Returns the plan of the operation `op` from its operands' avals and its parameters."""
    batch = max((x.shape[:-rank] for x, rank in zip(avals, RANKS[op], strict=True)), key=len)
    x, dtype, table = avals[0], avals[0].dtype, MOVES[op]
    if op == "gather_rows" and 0 in avals[3].shape:
        table = COPIES
    kernels = [kernel for kernel in table if dtype.name in kernel.lhs] or table
    of_dtype = operand_reason(kernels[0], dtype.name, "rows")
    reason = _no_kernel_reason(avals, params, batch) or of_dtype
    if not reason and x.shape[-1] % kernels[0].columns:
        reason = f"rows of {dtype} are copied {kernels[0].columns} columns at a time"
    kernel = choose(kernels, avals[2], target)
    # If an operand in `needed` has no elements, there is nothing to read.
    if op == "gather_rows":
        shape, needed = (avals[1].shape[-1], x.shape[-1]), avals[:1]
    elif op == "combine_rows":
        shape, needed = (avals[2].shape[-2], x.shape[-1]), avals[:3:2]
    else:
        shape, needed = avals[3].shape[-2:], avals[:2]
        dtype = jnp.promote_types(dtype, jnp.float32)
    result = jax.ShapeDtypeStruct((*batch, *shape), dtype)
    nothing = any(0 in x.shape for x in (*needed, result))
    return _plan(RowsProblem(op, (result,), params["divisor"]), reason, nothing, kernel)


def _plan(problem, reason, nothing, kernel, grid=0) -> RowsPlan:
    """Returns the plan: with XLA if there is a `reason`, without a kernel if there is `nothing` to
    read or to write, and otherwise with `kernel`."""
    if reason:
        return Plan(problem, XLA, reason)
    if nothing:
        return Plan(problem, NOTHING, "there is nothing to move")
    return Plan(problem, kernel, kernel_problem=problem, grid=grid)


def _no_kernel_reason(avals, params, batch) -> str:
    """Returns why no kernel can run, for reasons that all operations share, or an empty string."""
    if params["implementation"] == "xla":
        return AS_ASKED
    if not all(is_static(*x.shape) for x in avals):
        return "a dimension is symbolic, and kernels are planned for static sizes"
    if batch and batch[0] > MOST_ROW_BATCHES:
        return f"a launch has at most {MOST_ROW_BATCHES} batches, got {batch[0]}"
    if reason := too_large_operands(avals):
        return reason
    # `divisor` is the number of choices of each token.
    pairs = avals[0].shape[-2] * params["divisor"] if "divisor" in params else 0
    return too_large({"tokens times choices": pairs})
