"""Plans rank-k and rank-2k updates, from static shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.lists import fp64
from jax_grouped_gemm._src.lists.plan import PRODUCTS, plan_list
from jax_grouped_gemm._src.lists.rank_k.problem import RankKProblem, Stack, launch_order
from jax_grouped_gemm._src.lists.rank_k.tile_costs import fine_is_sooner, num_fine_units, wide_tiles
from jax_grouped_gemm._src.lists.schedule import TILE_K
from jax_grouped_gemm._src.plan import (
    FLOATS,
    FLOATS_16,
    Plan,
    Table,
    TileConfig,
    TiledKernel,
    choose,
    predict_problem,
)

RankKPlan = Plan[RankKProblem]

RANK_K_TILE = TileConfig(tile_m=128, tile_n=256, cluster=2)
FINE_TILE = TileConfig(tile_m=128, tile_n=128, cluster=2)
# The most stacks of a launch, whose parameters have no room for more descriptors.
MAX_FINE_STACKS = 4
# Squares of 64 x 64 that a CTA has in a diagonal unit, see `csrc/scheduler/triangular_fine.h`.
SQUARE = 64
DIAGONAL_SQUARES = 5
# Half steps to change tiles, and to hand sums over, in addition to the steps of a unit: see
# `csrc/scheduler/triangular.h`.
CHANGE_HALF_STEPS, EXCHANGE_HALF_STEPS = 4, 6


def plan_rank_k(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> RankKPlan:
    """Plans a `rank_k` from its operands' abstract values and its parameters.

    With implementation "cuda" a kernel runs wherever it can, otherwise only where it is faster.
    """
    problem = RankKProblem.of(avals, params)
    asked = params.get("tile")
    table = TILES._replace(compiled=[x for x in TILES.compiled if asked in (None, x.tile)])
    return plan_list(Plan, problem, table, avals, params, target, _launch)


def _launch(
    problem: RankKProblem, addressable: RankKProblem, kernels: Sequence[TiledKernel], target: Target
) -> RankKPlan:
    plan = functools.partial(Plan, problem, kernel_problem=addressable)
    stacks = [addressable.stacks[i] for i in launch_order(problem)]
    kernel = choose(kernels, addressable, target)
    if isinstance(kernel, fp64.Square):
        tiles = functools.partial(_runs, addressable)
        square, grid, steps, _ = fp64.simulated(kernels, tiles, problem.dtype, target)
        most = steps * square.multiply_adds_per_step(problem.dtype, target)
        utilization = problem.multiply_adds / most
        prediction = predict_problem(problem, square, utilization * square.rate, target)
        return plan(square, grid=grid, utilization=utilization, prediction=prediction)
    if kernel.schedule == "fine":
        clusters = sum(map(num_fine_units, stacks))
        utilization = _fine_utilization(problem, stacks, target)
    else:
        halves = gains_by_halves(addressable, stacks, target)
        runs = [run for stack in stacks for run in _unit_counts(addressable, stack, halves)]
        clusters = min(target.clusters(RANK_K_TILE.cluster), sum(count for _, count in runs))
        utilization = _utilization(problem, runs, target)
    workspace = 0
    if problem.terms:
        parts = [(s.g, s.n * s.k) for s in stacks] * problem.num_factors
        workspace = float32.list_workspace_bytes(parts, problem.terms)
    return plan(
        kernel,
        grid=clusters * kernel.tile.cluster,
        workspace_bytes=workspace,
        utilization=utilization,
        prediction=predict_problem(problem, kernel, utilization, target),
    )


def _runs(problem: RankKProblem, side: int) -> list[fp64.Runs]:
    """Returns runs of tiles, off the diagonal and on it (`csrc/scheduler/triangular_runs.h`)."""
    runs = []
    for stack in (problem.stacks[i] for i in launch_order(problem)):
        rows, steps = cdiv(stack.n, side), fp64.num_steps(problem.dtype, stack.k)
        runs.append((problem.num_products * steps, stack.g * (rows * (rows - 1) // 2)))
        runs.append((steps, stack.g * rows))
    return [runs]


def _fine_pays(problem: RankKProblem, target: Target) -> bool:
    """Whether fine tiles pay: all units run at once, or small results take fewer cycles.

    They do not pay for a matrix of one tile, where half of a unit's loads and products would be
    wasted.
    """
    stacks = [problem.stacks[i] for i in launch_order(problem)]
    if all(s.n <= FINE_TILE.tile_m for s in stacks):
        return False
    units, clusters = sum(map(num_fine_units, stacks)), target.clusters(FINE_TILE.cluster)
    return units <= clusters or fine_is_sooner(problem, stacks, clusters)


def _is_not_square(problem: RankKProblem) -> str:
    needs_more = problem.has_diagonal or problem.op == "symm_product"
    return f"no kernel of {problem.dtype} adds a diagonal or computes A B^T alone" * needs_more


COMPILED = (
    TiledKernel(
        tile=RANK_K_TILE,
        schedule="triangular",
        lhs=FLOATS,
        out=FLOATS,
        record=("h200_rank_k.json", "8x2048x2048/syrk"),
    ),
    TiledKernel(
        tile=FINE_TILE,
        schedule="fine",
        lhs=FLOATS_16,
        out=FLOATS,
        record=("h200_rank_k.json", "64x256x1024/syrk"),
        refuses=lambda x: "too many stacks" * (len(launch_order(x)) > MAX_FINE_STACKS),
        pays=_fine_pays,
    ),
    *(dataclasses.replace(kernel, refuses=_is_not_square) for kernel in fp64.SQUARES),
)
TILES = Table(COMPILED, PRODUCTS)
"""The kernel table."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """The time of a unit, which is a tile for each CTA of a cluster, in half steps.

    A step of a narrow tile on the diagonal takes half as long as a step of another tile.
    """

    half_steps: int
    overhead: int = CHANGE_HALF_STEPS

    @property
    def cost(self) -> int:
        """Time that the unit keeps a cluster busy."""
        return self.half_steps + self.overhead


def gains_by_halves(problem: RankKProblem, stacks: Sequence[Stack], target: Target) -> bool:
    """Whether it is faster to split a narrow tile's steps between both CTAs of a cluster."""
    if problem.whole_tiles or problem.op == "symm_product" or problem.terms or len(stacks) > 1:
        return False
    clusters = target.clusters(RANK_K_TILE.cluster)
    (with_halves, _), (without, _) = (
        _turns(_unit_counts(problem, stacks[0], halves), clusters) for halves in (True, False)
    )
    return with_halves < without


def _unit_counts(problem: RankKProblem, stack: Stack, halves: bool) -> list[tuple[Unit, int]]:
    """Returns full and narrow units, and their numbers, as in `csrc/scheduler/triangular.h`."""
    others, wide, narrow = wide_tiles(stack, problem.upper)
    half_steps = problem.num_products * cdiv(stack.k, TILE_K)
    full = Unit(2 * half_steps), stack.g * others + cdiv(stack.g * wide, 2)
    if not halves:
        return [full, (Unit(half_steps), cdiv(stack.g * narrow, 2))]
    half = Unit(half_steps // 2, CHANGE_HALF_STEPS + EXCHANGE_HALF_STEPS)
    return [full, (half, stack.g * narrow)]


def _fine_utilization(problem: RankKProblem, stacks: Sequence[Stack], target: Target) -> float:
    """Returns the `_utilization` of fine units. Units on the diagonal take longest."""
    steps = problem.num_products * max(cdiv(stack.k, TILE_K) for stack in stacks)
    rounds = cdiv(sum(map(num_fine_units, stacks)), target.clusters(FINE_TILE.cluster))
    longest = DIAGONAL_SQUARES * steps * rounds
    return float(problem.multiply_adds / (longest * target.multiprocessors * SQUARE**2 * TILE_K))


def _utilization(problem: RankKProblem, runs: Sequence[tuple[Unit, int]], target: Target) -> float:
    """Returns the useful share of the tensor cores' work while the longest cluster is busy."""
    clusters = target.clusters(RANK_K_TILE.cluster)
    _, longest = _turns(runs, clusters)
    per_half_step = RANK_K_TILE.cluster * RANK_K_TILE.tile_m * RANK_K_TILE.tile_n * TILE_K / 2
    return float(problem.multiply_adds / (longest * clusters * per_half_step))


def _turns(runs: Sequence[tuple[Unit, int]], clusters: int) -> tuple[int, int]:
    """Returns when the last cluster ends, and the half steps of the busiest cluster.

    Each unit goes to the cluster that is free first, as in `csrc/scheduler/turns.h`. Runs are equal
    units and their number. Neighbours that are free at the same time take equal units together.
    """
    # When clusters are free, the first of them, their number, and the half steps of each.
    free = [(0, 0, clusters, 0)]
    for unit, count in runs:
        while count:
            at, first, equal, busy = heapq.heappop(free)
            taking = min(equal, count)
            heapq.heappush(free, (at + unit.cost, first, taking, busy + unit.half_steps))
            if taking < equal:
                heapq.heappush(free, (at, first + taking, equal - taking, busy))
            count -= taking
    return max(at for at, *_ in free), max(busy for *_, busy in free)
