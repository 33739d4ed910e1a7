"""Which kernel runs a rank-k or rank-2k update, decided from static shapes alone."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.lists import fp64 as fp64_kernels
from jax_grouped_gemm._src.lists import kernels as list_kernels
from jax_grouped_gemm._src.lists.rank_k import plan_fp64 as rank_k_plan_fp64
from jax_grouped_gemm._src.plan import Plan, symbolic_sizes
from jax_grouped_gemm._src.tile_config import NUM_SMS, TileConfig

RANK_K_TILE = TileConfig(tile_m=128, tile_n=256, cluster=2)
# Of 16-bit operands, where results are so few or small that all are computed at a time.
FINE_TILE = TileConfig(tile_m=128, tile_n=128, cluster=2)
MAX_FINE_UNITS = NUM_SMS // FINE_TILE.cluster
# One launch has descriptors for so many.
MAX_FINE_STACKS = 4
# Squares of 64 x 64 of a CTA in a unit on the diagonal, see `csrc/scheduler/triangular_fine.h`.
SQUARE = 64
DIAGONAL_SQUARES = 5
TILE_K = 64
# What the change of tiles, and sums that are handed over, take beside the steps of a unit: see
# `csrc/scheduler/triangular.h`.
CHANGE_HALF_STEPS, EXCHANGE_HALF_STEPS = 4, 6


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape: `g` results of [n, n] from operands of [n, k]."""

    g: int
    n: int
    k: int


@dataclasses.dataclass(frozen=True)
class RankKProblem:
    """Static description of the updates of a list of stacks.

    Attributes:
      op: "rank_k" or "rank_2k".
      stacks: the shapes.
      dtype, result_dtype: element types.
      transpose: whether operands are stored [g, k, n].
      has_c: whether c is added, and kept in the other triangle.
      upper: whether the upper triangle is computed.
      symmetrize: whether the other triangle is the mirror image.
      hermitian: whether products are with the conjugate transpose.
    """

    op: str
    stacks: tuple[Stack, ...]
    dtype: np.dtype
    result_dtype: np.dtype
    transpose: bool
    has_c: bool
    upper: bool
    symmetrize: bool
    hermitian: bool

    @classmethod
    def of(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> RankKProblem:
        """The problem of a `rank_k` primitive with operands of the given abstract values."""
        count = params["num_problems"]
        operands = avals[count : 2 * count]
        n_axis, k_axis = (2, 1) if params["transpose"] else (1, 2)
        return cls(
            op="rank_2k" if params["has_b"] else "rank_k",
            stacks=tuple(Stack(x.shape[0], x.shape[n_axis], x.shape[k_axis]) for x in operands),
            dtype=operands[0].dtype,
            result_dtype=np.dtype(params["result_dtype"]),
            transpose=params["transpose"],
            has_c=params["has_c"],
            upper=params["upper"],
            symmetrize=params["symmetrize"],
            hermitian=params["hermitian"],
        )

    def __str__(self) -> str:
        shapes = ", ".join(
            str([s.g, s.k, s.n] if self.transpose else [s.g, s.n, s.k]) for s in self.stacks
        )
        triangle = "upper" if self.upper else "lower"
        form = f"{triangle} triangle, {'mirrored' if self.symmetrize else 'alone'}"
        c = ", with c" if self.has_c else ""
        return f"{self.op} {self.dtype} {shapes} -> {self.result_dtype}, {form}{c}"


def plan_rank_k(avals: Sequence[Any], params: Mapping[str, Any]) -> Plan:
    """Plans a `rank_k` from its operands' abstract values and its parameters."""
    problem = RankKProblem.of(avals, params)
    reason = list_kernels.unsupported_reason(problem, params) or symbolic_sizes(avals)
    if reason:
        return Plan(problem, "reference", reason)
    if all(0 in (stack.g, stack.n) for stack in problem.stacks):
        return Plan(problem, "zeros", "the results are empty")
    if problem.dtype in fp64_kernels.DTYPES:
        return rank_k_plan_fp64.plan(problem)
    addressable = _addressable_problem(problem)
    reason = _copy_reason(problem, addressable)
    stacks = [addressable.stacks[i] for i in launch_order(problem)]
    tile = _tile(addressable, stacks)
    if tile == FINE_TILE:
        clusters = sum(map(_num_fine_units, stacks))
        efficiency = _fine_efficiency(problem, stacks)
    else:
        units = _units(addressable, stacks)
        clusters = min(NUM_SMS // tile.cluster, len(units))
        efficiency = _efficiency(problem, units)
    terms = float32.num_terms(params["precision"]) if problem.dtype == jnp.float32 else 0
    return Plan(
        problem=problem,
        path="copied" if reason else "tma",
        reason=reason,
        kernel_problem=addressable,
        tile=tile,
        grid=clusters * tile.cluster,
        workspace_bytes=_workspace_bytes(addressable, terms) if terms else 0,
        terms=terms,
        efficiency=efficiency,
    )


def _tile(problem: RankKProblem, stacks: Sequence[Stack]) -> TileConfig:
    """The fine one if that is one tile for each multiprocessor, at most.

    A matrix of one tile is none of it: half of what a unit loads and multiplies would be nothing.
    """
    small = (
        problem.dtype != jnp.float32
        and len(stacks) <= MAX_FINE_STACKS
        and any(stack.n > FINE_TILE.tile_m for stack in stacks)
        and sum(map(_num_fine_units, stacks)) <= MAX_FINE_UNITS
    )
    return FINE_TILE if small else RANK_K_TILE


def launch_order(problem: RankKProblem) -> list[int]:
    """The stacks that have results, longest tiles first: short ones even out the end."""
    stacks = problem.stacks
    nonempty = (i for i, s in enumerate(stacks) if 0 not in (s.g, s.n))
    return sorted(nonempty, key=lambda i: -stacks[i].k)


def _addressable_problem(problem: RankKProblem) -> RankKProblem:
    """`problem` with every row of every array a multiple of what TMA can address."""
    per_row, per_result_row = list_kernels.row_multiples(problem)
    # No more than the rows of the results need, unless the operands have rows of n.
    n_multiple = per_row if problem.transpose else per_result_row
    k_multiple = 1 if problem.transpose else per_row
    stacks = tuple(
        Stack(s.g, _round_up(s.n, n_multiple), _round_up(max(s.k, 1), k_multiple))
        for s in problem.stacks
    )
    result_dtype = list_kernels.written_dtype(problem)
    return dataclasses.replace(problem, stacks=stacks, result_dtype=result_dtype)


def _workspace_bytes(problem: RankKProblem, terms: int) -> int:
    """Of the parts of float32 operands."""
    operands = _num_products(problem)
    stacks = [(s.g, s.n * s.k) for s in problem.stacks if 0 not in (s.g, s.n)]
    return float32.list_workspace_bytes(stacks * operands, terms)


def _copy_reason(problem: RankKProblem, addressable: RankKProblem) -> str:
    """Why TMA cannot address the arrays of `problem`, empty if it can."""
    of_what = " of float16 parts" if problem.dtype == jnp.float32 else ""
    return "; ".join(
        f"rows of {name}={getattr(stack, name)} elements are not a multiple of 16 bytes{of_what}"
        for stack, padded in zip(problem.stacks, addressable.stacks, strict=True)
        for name in "nk"
        if getattr(stack, name) != getattr(padded, name)
    )


@dataclasses.dataclass(frozen=True)
class Unit:
    """A tile for each CTA of a cluster, in halves of a step.

    A step of the narrow tiles on the diagonal is half a step of the others.
    """

    half_steps: int
    overhead: int = CHANGE_HALF_STEPS

    @property
    def cost(self) -> int:
        """How long it keeps a cluster busy."""
        return self.half_steps + self.overhead


def _units(problem: RankKProblem, stacks: Sequence[Stack]) -> list[Unit]:
    """The units of work of all stacks, in order."""
    halves = gains_by_halves(problem, stacks)
    return [unit for stack in stacks for unit in _stack_units(problem, stack, halves)]


def gains_by_halves(problem: RankKProblem, stacks: Sequence[Stack]) -> bool:
    """Whether both CTAs of a cluster take one narrow tile, half of its steps each."""
    if problem.dtype == jnp.float32 or len(stacks) > 1:
        return False
    return _end(problem, stacks[0], halves=True) < _end(problem, stacks[0], halves=False)


def _end(problem: RankKProblem, stack: Stack, halves: bool) -> int:
    """When the last cluster is done with a stack alone: `end_of` of `csrc/scheduler/triangular.h`.

    Clusters have a full unit more or one less.
    """
    (full, full_units), (narrow, narrow_units) = _unit_counts(problem, stack, halves)
    rounds, more = divmod(full_units, NUM_SMS // RANK_K_TILE.cluster)
    less_until = rounds * full.cost
    more_until = less_until + full.cost if more else 0
    end = max(less_until, more_until)
    while narrow_units > 0:
        if not more or less_until <= more_until:
            less_until += narrow.cost
            narrow_units -= NUM_SMS // RANK_K_TILE.cluster - more
            end = max(end, less_until)
        else:
            more_until += narrow.cost
            narrow_units -= more
            end = max(end, more_until)
    return end


def _stack_units(problem: RankKProblem, stack: Stack, halves: bool) -> list[Unit]:
    """The units of work of a stack, in order."""
    return [unit for kind, count in _unit_counts(problem, stack, halves) for unit in [kind] * count]


def _unit_counts(problem: RankKProblem, stack: Stack, halves: bool) -> list[tuple[Unit, int]]:
    """Full and narrow units of a stack, as `csrc/scheduler/triangular.h` lists them."""
    rows = math.ceil(stack.n / RANK_K_TILE.tile_m)
    upper_tiles, lower_tiles = (rows + 1) // 2, rows // 2
    wide, narrow = (upper_tiles, lower_tiles) if problem.upper else (lower_tiles, upper_tiles)
    off_diagonal = stack.g * (upper_tiles * (upper_tiles - 1) // 2)
    half_steps = _num_products(problem) * math.ceil(stack.k / TILE_K)
    full_units = off_diagonal + math.ceil(stack.g * wide / 2)
    full = Unit(2 * half_steps), full_units
    if not halves:
        return [full, (Unit(half_steps), math.ceil(stack.g * narrow / 2))]
    half = Unit(half_steps // 2, CHANGE_HALF_STEPS + EXCHANGE_HALF_STEPS)
    return [full, (half, stack.g * narrow)]


def _num_fine_units(stack: Stack) -> int:
    """Of clusters, as `csrc/scheduler/triangular_fine.h` counts them."""
    rows = math.ceil(stack.n / FINE_TILE.tile_m)
    diagonal, others = (rows + 1) // 2, (rows * (rows - 1) // 2 - rows // 2) // 2
    return stack.g * (diagonal + others)


def _fine_efficiency(problem: RankKProblem, stacks: Sequence[Stack]) -> float:
    """As `_efficiency`, of fine units, one for each cluster: those on the diagonal take longest."""
    steps = _num_products(problem) * max(math.ceil(stack.k / TILE_K) for stack in stacks)
    longest = DIAGONAL_SQUARES * steps
    return float(_useful(problem) / (longest * NUM_SMS * SQUARE**2 * TILE_K))


def _efficiency(problem: RankKProblem, units: Sequence[Unit]) -> float:
    """The share of the tensor cores' work that is useful while the longest cluster is busy.

    Each unit goes to the cluster that is free first, as in `csrc/scheduler/turns.h`.
    """
    clusters = NUM_SMS // RANK_K_TILE.cluster
    free_at = [(0, cluster) for cluster in range(clusters)]
    busy = [0] * clusters
    for unit in units:
        at, cluster = free_at[0]
        heapq.heapreplace(free_at, (at + unit.cost, cluster))
        busy[cluster] += unit.half_steps
    longest = max(busy)
    per_half_step = RANK_K_TILE.cluster * RANK_K_TILE.tile_m * RANK_K_TILE.tile_n * TILE_K / 2
    return float(_useful(problem) / (longest * clusters * per_half_step))


def _useful(problem: RankKProblem) -> float:
    """The products of two elements that the results need."""
    return sum(
        stack.g * stack.n * (stack.n + 1) / 2 * stack.k * _num_products(problem)
        for stack in problem.stacks
    )


def _num_products(problem: RankKProblem) -> int:
    return 2 if problem.op == "rank_2k" else 1


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
