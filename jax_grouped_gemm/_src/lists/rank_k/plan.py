"""Which kernel runs a rank-k or rank-2k update, decided from static shapes alone."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import cdiv, round_up
from jax_grouped_gemm._src.device import Target, predict
from jax_grouped_gemm._src.fallback import faster_reason
from jax_grouped_gemm._src.lists import fp64 as fp64_kernels
from jax_grouped_gemm._src.lists import kernels as list_kernels
from jax_grouped_gemm._src.lists.rank_k.plan_fp64 import plan_fp64
from jax_grouped_gemm._src.lists.rank_k.problem import (
    RankKProblem,
    Stack,
    launch_order,
    xla_work,
)
from jax_grouped_gemm._src.lists.rank_k.tile_costs import fine_is_sooner, num_fine_units
from jax_grouped_gemm._src.plan import (
    NOTHING,
    XLA,
    Plan,
    TileConfig,
    TiledKernel,
    choose,
    runnable,
    symbolic_sizes,
    unaddressable_rows,
)

RankKPlan = Plan[RankKProblem]

RANK_K_TILE = TileConfig(tile_m=128, tile_n=256, cluster=2)
FINE_TILE = TileConfig(tile_m=128, tile_n=128, cluster=2)
# One launch has descriptors for so many.
MAX_FINE_STACKS = 4
# Squares of 64 x 64 of a CTA in a unit on the diagonal, see `csrc/scheduler/triangular_fine.h`.
SQUARE = 64
DIAGONAL_SQUARES = 5
TILE_K = 64
# Half steps of a change of tiles, and of handing sums over, beside the steps of a unit: see
# `csrc/scheduler/triangular.h`.
CHANGE_HALF_STEPS, EXCHANGE_HALF_STEPS = 4, 6


def plan_rank_k(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> RankKPlan:
    """Plans a `rank_k` from its operands' abstract values and its parameters.

    A kernel runs wherever one can if the implementation is "cuda", else where it is faster.
    """
    plan = _plan_of_kernel(avals, params, target)
    if plan.prediction is None:
        return plan
    _, kernel = plan.launched
    reason = faster_reason(
        xla_work(plan.problem, plan.terms),
        plan.prediction,
        kernel.tile,
        target,
        params["implementation"],
    )
    return Plan(plan.problem, XLA, reason) if reason else plan


def _plan_of_kernel(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> RankKPlan:
    problem = RankKProblem.of(avals, params)
    reason = list_kernels.unsupported_reason(problem, params) or symbolic_sizes(avals)
    if reason:
        return Plan(problem, XLA, reason)
    if all(0 in (stack.g, stack.n) for stack in problem.stacks):
        return Plan(problem, NOTHING, "the results are empty")
    if problem.dtype in fp64_kernels.DTYPES:
        if problem.has_diagonal or problem.op == "symm_product":
            what = "adds a diagonal" if problem.has_diagonal else "computes A B^T alone"
            return Plan(problem, XLA, f"no kernel of {problem.dtype} {what}")
        return plan_fp64(problem, target)
    addressable = _addressable_problem(problem)
    reason = _copy_reason(problem, addressable)
    stacks = [addressable.stacks[i] for i in launch_order(problem)]
    kernel = choose(runnable(TILES, addressable), addressable, target)
    if kernel.schedule == "fine":
        clusters = sum(map(num_fine_units, stacks))
        utilization = _fine_utilization(problem, stacks, target)
    else:
        units = _units(addressable, stacks, target)
        clusters = min(num_clusters(target), len(units))
        utilization = _utilization(problem, units, target)
    terms = float32.num_terms(params["precision"]) if problem.dtype == jnp.float32 else 0
    operand_bytes, split_bytes = float32.bytes_of_split(problem.operand_bytes, terms)
    return Plan(
        problem=problem,
        kernel=kernel,
        reason=reason,
        kernel_problem=addressable,
        grid=clusters * kernel.tile.cluster,
        workspace_bytes=_workspace_bytes(addressable, terms) if terms else 0,
        terms=terms,
        utilization=utilization,
        prediction=predict(
            problem.dtype,
            multiply_adds=problem.useful,
            utilization=utilization,
            num_bytes=operand_bytes + problem.result_bytes,
            target=target,
            products=max(terms, 1),
            split_bytes=split_bytes,
        ),
        notes=(float32.described(terms),) if terms else (),
    )


def num_clusters(target: Target) -> int:
    """How many clusters run at a time."""
    return max(target.multiprocessors // RANK_K_TILE.cluster, 1)


def most_fine_units(target: Target) -> int:
    """How many fine units an update may have: each is a cluster, and all run at a time."""
    return num_clusters(target)


def _fine_runs(problem: RankKProblem) -> bool:
    return problem.dtype != jnp.float32 and len(launch_order(problem)) <= MAX_FINE_STACKS


def _fine_pays(problem: RankKProblem, target: Target) -> bool:
    """Whether it is one tile for each multiprocessor, at most.

    Or fewer cycles for many small results. A matrix of one tile is none of it: half of what a unit
    loads and multiplies would be nothing.
    """
    stacks = [problem.stacks[i] for i in launch_order(problem)]
    if all(s.n <= FINE_TILE.tile_m for s in stacks):
        return False
    units = sum(map(num_fine_units, stacks))
    return units <= most_fine_units(target) or fine_is_sooner(problem, stacks, num_clusters(target))


TILES = (
    TiledKernel(
        tile=RANK_K_TILE,
        schedule="triangular",
        record=("h200_rank_k.json", "8x2048x2048/syrk"),
    ),
    TiledKernel(
        tile=FINE_TILE,
        schedule="fine",
        record=("h200_rank_k.json", "64x256x1024/syrk"),
        runs=_fine_runs,
        pays=_fine_pays,
    ),
)
"""The table for operands of 16 bits and float32; `lists.fp64.KERNELS` is that for all others.
`fallback` decides where XLA computes instead."""


def _addressable_problem(problem: RankKProblem) -> RankKProblem:
    """`problem` with every row of every array a multiple of what TMA can address."""
    per_row, per_result_row = list_kernels.row_multiples(problem)
    # No more than the rows of the results need, unless the operands have rows of n.
    n_multiple = per_row if problem.transpose else per_result_row
    k_multiple = 1 if problem.transpose else per_row
    stacks = tuple(
        Stack(s.g, round_up(s.n, n_multiple), round_up(max(s.k, 1), k_multiple))
        for s in problem.stacks
    )
    result_dtype = list_kernels.written_dtype(problem)
    return dataclasses.replace(problem, stacks=stacks, result_dtype=result_dtype)


def _workspace_bytes(problem: RankKProblem, terms: int) -> int:
    """Bytes of the parts of float32 operands."""
    operands = problem.num_factors
    stacks = [(s.g, s.n * s.k) for s in problem.stacks if 0 not in (s.g, s.n)]
    return float32.list_workspace_bytes(stacks * operands, terms)


def _copy_reason(problem: RankKProblem, addressable: RankKProblem) -> str:
    """Why TMA cannot address the arrays of `problem`, empty if it can."""
    pairs = zip(problem.stacks, addressable.stacks, strict=True)
    reasons = (unaddressable_rows("nk", *pair, problem.dtype) for pair in pairs)
    return "; ".join(itertools.chain(*reasons))


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


def _units(problem: RankKProblem, stacks: Sequence[Stack], target: Target) -> list[Unit]:
    """The units of work of all stacks, in order."""
    halves = gains_by_halves(problem, stacks, target)
    return [unit for stack in stacks for unit in _stack_units(problem, stack, halves)]


def gains_by_halves(problem: RankKProblem, stacks: Sequence[Stack], target: Target) -> bool:
    """Whether both CTAs of a cluster take one narrow tile, half of its steps each."""
    if problem.whole_tiles or problem.op == "symm_product":
        return False
    if problem.dtype == jnp.float32 or len(stacks) > 1:
        return False
    with_halves, without = (_end(problem, stacks[0], target, halves) for halves in (True, False))
    return with_halves < without


def _end(problem: RankKProblem, stack: Stack, target: Target, halves: bool) -> int:
    """When the last cluster is done with a stack alone: `end_of` of `csrc/scheduler/triangular.h`.

    Clusters have a full unit more or one less.
    """
    (full, full_units), (narrow, narrow_units) = _unit_counts(problem, stack, halves)
    clusters = num_clusters(target)
    rounds, more = divmod(full_units, clusters)
    less_until = rounds * full.cost
    more_until = less_until + full.cost if more else 0
    end = max(less_until, more_until)
    while narrow_units > 0:
        if not more or less_until <= more_until:
            less_until += narrow.cost
            narrow_units -= clusters - more
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
    rows = cdiv(stack.n, RANK_K_TILE.tile_m)
    upper_tiles, lower_tiles = (rows + 1) // 2, rows // 2
    wide, narrow = (upper_tiles, lower_tiles) if problem.upper else (lower_tiles, upper_tiles)
    off_diagonal = stack.g * (upper_tiles * (upper_tiles - 1) // 2)
    half_steps = problem.num_products * cdiv(stack.k, TILE_K)
    full_units = off_diagonal + cdiv(stack.g * wide, 2)
    full = Unit(2 * half_steps), full_units
    if not halves:
        return [full, (Unit(half_steps), cdiv(stack.g * narrow, 2))]
    half = Unit(half_steps // 2, CHANGE_HALF_STEPS + EXCHANGE_HALF_STEPS)
    return [full, (half, stack.g * narrow)]


def _fine_utilization(problem: RankKProblem, stacks: Sequence[Stack], target: Target) -> float:
    """The `_utilization` of fine units: those on the diagonal take longest."""
    steps = problem.num_products * max(cdiv(stack.k, TILE_K) for stack in stacks)
    rounds = cdiv(sum(map(num_fine_units, stacks)), num_clusters(target))
    longest = DIAGONAL_SQUARES * steps * rounds
    return float(problem.useful / (longest * target.multiprocessors * SQUARE**2 * TILE_K))


def _utilization(problem: RankKProblem, units: Sequence[Unit], target: Target) -> float:
    """The share of the tensor cores' work that is useful while the longest cluster is busy.

    Each unit goes to the cluster that is free first, as in `csrc/scheduler/turns.h`.
    """
    clusters = num_clusters(target)
    free_at = [(0, cluster) for cluster in range(clusters)]
    busy = [0] * clusters
    for unit in units:
        at, cluster = free_at[0]
        heapq.heapreplace(free_at, (at + unit.cost, cluster))
        busy[cluster] += unit.half_steps
    longest = max(busy)
    per_half_step = RANK_K_TILE.cluster * RANK_K_TILE.tile_m * RANK_K_TILE.tile_n * TILE_K / 2
    return float(problem.useful / (longest * clusters * per_half_step))
