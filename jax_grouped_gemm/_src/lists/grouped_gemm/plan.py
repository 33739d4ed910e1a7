"""Plans the products of a list of matrices, from static shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import cdiv, round_up
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.lists import fp64
from jax_grouped_gemm._src.lists import schedule as list_schedule
from jax_grouped_gemm._src.lists.grouped_gemm.problem import GroupedGemmProblem, Scheduler, listed
from jax_grouped_gemm._src.lists.plan import PRODUCTS, plan_list
from jax_grouped_gemm._src.lists.schedule import FULL_STEP_AREA, TILE_K, Shape
from jax_grouped_gemm._src.plan import FLOATS, Plan, Table, TileConfig, TiledKernel, predict_problem

COMPILED = (
    TiledKernel(
        tile=TileConfig(tile_m=128, tile_n=256, cluster=2),
        lhs=FLOATS,
        out=FLOATS,
        record=("h200_lists.json", "random_24/grouped_gemm"),
    ),
    TiledKernel(
        tile=TileConfig(tile_m=128, tile_n=128, cluster=1),
        lhs=FLOATS,
        out=FLOATS,
        record=("h200_lists.json", "cutlass_24/grouped_gemm"),
    ),
    *fp64.SQUARES,
)
TILES = Table(COMPILED, PRODUCTS)
"""The kernel table. A launch takes the tile that is predicted to finish first."""

MAX_PROBLEMS = 79
"""The most problems of a launch. The kernel's parameters have no room for more descriptors."""

MAX_MATRICES = 128
"""The most products of a launch on the FP64 tensor cores: kMaxProblems of gemm_problem.h."""

# A launch of clusters takes this many steps (0.5 us on an H200) longer than one of single CTAs.
CLUSTER_STEPS = 0.7


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    On the FP64 tensor cores each matrix of a stack is a product. If there are too many for one
    launch, several launches run one after another.

    Attributes:
      problems: the indices of its problems, in the kernel's order.
      transpose_lhs, transpose_rhs: how the operands of these problems are stored.
      kernel: the kernel that computes them.
      clusters: number of clusters that have work.
      schedule: int32 [rounds, clusters, 2]: for each round and cluster, a problem of this launch
        and the unit of this problem that the cluster computes, -1 if the cluster has no unit left.
        None if the device searches for units, for example because there is only one round.
      steps: predicted time of the longest cluster, in mainloop steps of a full tile; on the FP64
        tensor cores, in steps of the launch's own tile.
      balance: predicted mean time of all clusters of the device, relative to the longest.
      parts_bytes: workspace for the parts of float32 operands.
    """

    problems: tuple[int, ...]
    transpose_lhs: bool
    transpose_rhs: bool
    kernel: TiledKernel
    clusters: int
    schedule: np.ndarray | None = dataclasses.field(repr=False, compare=False)
    steps: float
    balance: float
    parts_bytes: int = 0

    @property
    def tile(self) -> TileConfig:
        """Kernel configuration."""
        return self.kernel.tile

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the schedule, which is an operand of the kernel, and of the operands' parts."""
        return self.parts_bytes + (0 if self.schedule is None else self.schedule.nbytes)

    def __str__(self) -> str:
        form = "NT"[self.transpose_lhs] + "NT"[self.transpose_rhs]
        order = listed(self.problems)
        return (
            f"{form}, problems {order}: tile {self.tile.tile_m}x{self.tile.tile_n}, "
            f"cluster {self.tile.cluster}, grid {self.clusters * self.tile.cluster}, "
            f"workspace {self.workspace_bytes} bytes, longest cluster {self.steps:.0f} steps, "
            f"predicted balance {self.balance:.0%}"
        )


@dataclasses.dataclass(frozen=True)
class GroupedGemmPlan(Plan[GroupedGemmProblem]):
    """How the products of a list run on a device of compute capability 9.0.

    `tile` and `grid` are those of the first launch; `workspace_bytes` is the sum over all launches.
    `utilization` is the useful work, divided by the work that the tensor cores of all
    multiprocessors could do until the cluster with the most steps has ended.

    Attributes:
      launches: a launch has at most `MAX_PROBLEMS` problems, whose operands have the same layout.
        On the FP64 tensor cores it has at most `MAX_MATRICES` matrices.
      order: the indices of all problems in the order in which the kernels compute them: by
        decreasing k, if they are sorted. Problems without any work are left out.
    """

    launches: tuple[Launch, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The problems of all launches, one after another; see the class."""
        return tuple(i for launch in self.launches for i in launch.problems)

    def describe_launch(self) -> str:
        """Describes all launches, for `explain`."""
        # The FP64 tensor cores have only one scheduler.
        is_square = any(launch.kernel.schedule == "square" for launch in self.launches)
        scheduler = "device" if is_square else self.problem.scheduler
        launches = [f"launch {launch}" for launch in self.launches]
        sizes = f"launches {len(launches)}, workspace {self.workspace_bytes} bytes"
        return "\n   ".join([f"scheduler {scheduler}, {sizes}", *launches])


def plan_grouped_gemm(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> GroupedGemmPlan:
    """Plans a `grouped_gemm` from its operands' abstract values and its parameters."""
    problem = GroupedGemmProblem.of(avals, params)
    return plan_list(GroupedGemmPlan, problem, TILES, avals, params, target, _launch)


def _launch(
    problem: GroupedGemmProblem,
    addressable: GroupedGemmProblem,
    kernels: Sequence[TiledKernel],
    target: Target,
) -> GroupedGemmPlan:
    def stored(i: int) -> tuple[bool, bool]:
        return problem.entries[i].transpose_lhs, problem.entries[i].transpose_rhs

    most = MAX_MATRICES if isinstance(kernels[0], fp64.Square) else MAX_PROBLEMS
    launches = []
    for _, members in itertools.groupby(sorted(problem.working, key=stored), key=stored):
        order = list(members)
        if problem.sort_problems:
            # Take long tiles first, as CUTLASS recommends, so that short tiles even out the end.
            order.sort(key=lambda i: -addressable.entries[i].k)
        # Make as few launches as possible, and none much smaller than another.
        count = cdiv(len(order), most)
        bounds = [len(order) * j // count for j in range(count + 1)]
        for part in itertools.starmap(slice, itertools.pairwise(bounds)):
            launches.append(_best_launch(addressable, tuple(order[part]), tuple(kernels), target))

    def multiply_adds(launch: Launch) -> float:
        per_step = target.multiprocessors * FULL_STEP_AREA * TILE_K
        if isinstance(launch.kernel, fp64.Square):
            per_step = launch.kernel.multiply_adds_per_step(problem.dtype, target)
        return launch.steps * per_step

    useful = problem.multiply_adds / sum(map(multiply_adds, launches))
    kernel, utilization = launches[0].kernel, useful * max(problem.terms, 1)
    return GroupedGemmPlan(
        problem,
        kernel,
        kernel_problem=addressable,
        grid=launches[0].clusters * kernel.tile.cluster,
        workspace_bytes=sum(launch.workspace_bytes for launch in launches),
        utilization=utilization,
        prediction=predict_problem(problem, kernel, utilization, target),
        launches=tuple(launches),
    )


def _best_launch(
    problem: GroupedGemmProblem,
    order: tuple[int, ...],
    kernels: tuple[TiledKernel, ...],
    target: Target,
) -> Launch:
    first = problem.entries[order[0]]
    shapes, terms = tuple(problem.entries[i].shape for i in order), problem.terms
    parts_bytes = 0
    if terms:
        operands = [(s.g, s.m * s.k) for s in shapes] + [(s.g, s.k * s.n) for s in shapes]
        parts_bytes = float32.list_workspace_bytes(operands, terms)
        # Each of the `terms` products of parts takes as many steps as a 16-bit product.
        shapes = tuple(s._replace(k=terms * round_up(s.k, TILE_K)) for s in shapes)
    of_list = problem.scheduler, problem.sort_problems, problem.dtype
    found = simulated(shapes, *of_list, kernels, target)
    return Launch(order, first.transpose_lhs, first.transpose_rhs, *found, parts_bytes)


# Cache results: one call is planned for `explain`, for lowering, and for every layer of a model.
@functools.lru_cache(maxsize=256)
def simulated(
    shapes: tuple[Shape, ...],
    scheduler: Scheduler,
    sort_problems: bool,
    dtype: np.dtype,
    kernels: tuple[TiledKernel, ...],
    target: Target,
) -> tuple[TiledKernel, int, np.ndarray | None, float, float]:
    """Returns the kernel to take, its clusters, schedule, longest cluster's steps and balance.

    This kernel is predicted to finish first. For lists of few tiles it has small tiles,
    so that more multiprocessors have work.
    """
    if isinstance(kernels[0], fp64.Square):
        runs = functools.partial(_runs, shapes, dtype)
        square, blocks, steps, balance = fp64.simulated(kernels, runs, dtype, target)
        return square, blocks, None, steps, balance
    choices = []
    for kernel in kernels:
        tile = kernel.tile
        most_clusters = target.clusters(tile.cluster)
        units = list_schedule.list_units(shapes, tile)
        clusters = min(most_clusters, len(units.cost))
        if scheduler == "host_precomputed" and sort_problems:
            schedule = list_schedule.longest_first(units.cost, clusters)
        else:
            is_device = scheduler == "device"
            schedule = list_schedule.in_turn(len(units.cost), clusters, serpentine=is_device)
        busy = list_schedule.busy_steps(schedule, units.cost)
        balance = busy.sum() / most_clusters / busy.max()
        table = None
        # A single round needs no schedule.
        if scheduler == "host_precomputed" and len(schedule) > 1:
            pairs = np.stack([units.problem[schedule], units.number[schedule]], axis=-1)
            table = np.where(schedule[..., None] < 0, -1, pairs).astype(np.int32)
        choices.append((kernel, clusters, table, float(busy.max()), float(balance)))
    return min(choices, key=lambda c: c[3] + CLUSTER_STEPS * (c[0].tile.cluster > 1))


def _runs(shapes: Sequence[Shape], dtype: np.dtype, side: int) -> list[fp64.Runs]:
    """Returns the runs of each launch, one for a shape, as in `csrc/scheduler/product_runs.h`.

    A launch has the next `MAX_MATRICES` matrices of the list.
    """
    bounds = np.cumsum([0, *(shape.g for shape in shapes)])
    return [
        [
            (fp64.num_steps(dtype, s.k), int(g) * cdiv(s.m, side) * cdiv(s.n, side))
            for s, g in zip(shapes, np.diff(bounds.clip(first, first + MAX_MATRICES)), strict=True)
            if g
        ]
        for first in range(0, int(bounds[-1]), MAX_MATRICES)
    ]
