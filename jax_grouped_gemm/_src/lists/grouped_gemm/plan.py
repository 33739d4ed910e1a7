"""Which kernels run the products of a list of matrices, decided from static shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import cdiv, round_up
from jax_grouped_gemm._src.device import Target, predict
from jax_grouped_gemm._src.fallback import faster_reason
from jax_grouped_gemm._src.lists import fp64 as fp64_kernels
from jax_grouped_gemm._src.lists import kernels as list_kernels
from jax_grouped_gemm._src.lists.grouped_gemm import plan_fp64
from jax_grouped_gemm._src.lists.grouped_gemm import schedule as list_schedule
from jax_grouped_gemm._src.lists.grouped_gemm.problem import (
    Entry,
    GroupedGemmProblem,
    Scheduler,
    listed,
    xla_work,
)
from jax_grouped_gemm._src.lists.grouped_gemm.schedule import FULL_STEP_AREA, TILE_K, Shape
from jax_grouped_gemm._src.plan import (
    NOTHING,
    XLA,
    Plan,
    TileConfig,
    TiledKernel,
    symbolic_sizes,
    unaddressable_rows,
)

TILES = (
    TiledKernel(
        tile=TileConfig(tile_m=128, tile_n=256, cluster=2),
        record=("h200_lists.json", "random_24/grouped_gemm"),
    ),
    TiledKernel(
        tile=TileConfig(tile_m=128, tile_n=128, cluster=1),
        record=("h200_lists.json", "cutlass_24/grouped_gemm"),
    ),
)
"""The table for operands of 16 bits and float32, of which a launch takes the tile that is predicted
to be done first; `lists.fp64.KERNELS` is that for all others. `fallback` decides where XLA
computes instead."""

MAX_PROBLEMS = 79
"""Problems to a launch, whose descriptors are parameters of the kernel."""


# A launch of clusters takes 0.5 us longer than one of single CTAs, as an H200 measured.
CLUSTER_STEPS = 0.7


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    On the FP64 tensor cores a stack is a product for each of its matrices, and what is then too
    much for one launch takes a few, one after another.

    Attributes:
      problems: the indices of its problems, in the order in which the kernel has them.
      transpose_lhs, transpose_rhs: how the operands of all of them are stored.
      kernel: what computes them.
      clusters: how many clusters have work.
      schedule: int32 [rounds, clusters, 2], the problem of this launch and the unit of work of that
        problem that each cluster computes in each round, -1 where it has nothing left; None if the
        device searches for them, as it does where one round is all.
      steps: predicted time of the longest cluster, in mainloop steps of a full tile; on the FP64
        tensor cores, of the launch's own.
      balance: predicted mean over all clusters of the device, relative to the longest.
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

    `tile` and `grid` are those of the first launch, `workspace_bytes` the sum over all, and
    `utilization` the share of the tensor cores' work that is useful while the longest cluster of
    each launch is busy.

    Attributes:
      launches: one for at most `MAX_PROBLEMS` problems whose operands are stored alike, on the
        FP64 tensor cores for at most `plan_fp64.MAX_MATRICES`.
      order: the indices of all problems in the order in which the kernels have them: by falling k,
        if they are sorted. Problems without any work are not among them.
    """

    launches: tuple[Launch, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The problems of all launches, one after another; see the class."""
        return tuple(i for launch in self.launches for i in launch.problems)

    def describe_launch(self) -> str:
        """The words of `explain` for all launches."""
        # There is no other on the FP64 tensor cores.
        is_square = any(launch.kernel.schedule == "square" for launch in self.launches)
        scheduler = "device" if is_square else self.problem.scheduler
        launches = [f"launch {launch}" for launch in self.launches]
        summary = (
            f"scheduler {scheduler}, launches {len(launches)}, "
            f"workspace {self.workspace_bytes} bytes"
        )
        return "\n   ".join([summary, *launches])


def plan_grouped_gemm(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> GroupedGemmPlan:
    """Plans a `grouped_gemm` from its operands' abstract values and its parameters."""
    problem = GroupedGemmProblem.of(avals, params)
    reason = list_kernels.unsupported_reason(problem, params) or symbolic_sizes(avals)
    if reason:
        return GroupedGemmPlan(problem, XLA, reason)
    working = [i for i, entry in enumerate(problem.entries) if 0 not in entry.shape]
    if not working:
        return GroupedGemmPlan(problem, NOTHING, "there is nothing to multiply")
    is_fp64 = problem.dtype in fp64_kernels.DTYPES
    addressable = problem if is_fp64 else _addressable_problem(problem)
    reason = _copy_reason(problem, addressable, working)
    terms = float32.num_terms(params["precision"]) if problem.dtype == jnp.float32 else 0
    launches = tuple(_launches(addressable, working, terms, target))
    products = max(terms, 1)
    utilization = _utilization(problem, launches, target) * products
    operand_bytes, split_bytes = float32.bytes_of_split(problem.operand_bytes, terms)
    prediction = predict(
        problem.dtype,
        multiply_adds=problem.multiply_adds,
        utilization=utilization,
        num_bytes=operand_bytes + problem.result_bytes,
        target=target,
        products=products,
        split_bytes=split_bytes,
    )
    faster = faster_reason(
        xla_work(problem, terms),
        prediction,
        launches[0].tile,
        target,
        params["implementation"],
    )
    if faster:
        return GroupedGemmPlan(problem, XLA, faster)
    return GroupedGemmPlan(
        problem=problem,
        kernel=launches[0].kernel,
        reason=reason,
        kernel_problem=addressable,
        grid=launches[0].clusters * launches[0].tile.cluster,
        workspace_bytes=sum(launch.workspace_bytes for launch in launches),
        terms=terms,
        utilization=utilization,
        prediction=prediction,
        notes=(float32.described(terms),) if terms else (),
        launches=launches,
    )


def _addressable_problem(problem: GroupedGemmProblem) -> GroupedGemmProblem:
    """`problem` with every row of every array a multiple of what TMA can address."""
    operand_multiple, result_multiple = list_kernels.row_multiples(problem)

    def pad(entry: Entry) -> Entry:
        multiples = {"n": result_multiple}
        multiples["m" if entry.transpose_lhs else "k"] = operand_multiple
        multiples["k" if entry.transpose_rhs else "n"] = operand_multiple
        padded = {name: round_up(getattr(entry, name), x) for name, x in multiples.items()}
        return dataclasses.replace(entry, **padded)

    entries = tuple(map(pad, problem.entries))
    result_dtype = list_kernels.written_dtype(problem)
    return dataclasses.replace(problem, entries=entries, result_dtype=result_dtype)


def _copy_reason(
    problem: GroupedGemmProblem, addressable: GroupedGemmProblem, working: Sequence[int]
) -> str:
    """Why TMA cannot address the arrays of `problem`, empty if it can."""
    reasons = [
        reason
        for i in working
        for reason in unaddressable_rows(
            "mkn", problem.entries[i], addressable.entries[i], problem.dtype, f" of problem {i}"
        )
    ]
    return listed(reasons, "; ")


def _launches(
    problem: GroupedGemmProblem, working: Sequence[int], terms: int, target: Target
) -> list[Launch]:
    def stored(i: int) -> tuple[bool, bool]:
        return problem.entries[i].transpose_lhs, problem.entries[i].transpose_rhs

    is_fp64 = problem.dtype in fp64_kernels.DTYPES
    most = plan_fp64.MAX_MATRICES if is_fp64 else MAX_PROBLEMS
    launches = []
    for transposes, members in itertools.groupby(sorted(working, key=stored), key=stored):
        order = list(members)
        if problem.sort_problems:
            # Longest tiles first, as CUTLASS recommends: short ones even out the end.
            order.sort(key=lambda i: -problem.entries[i].k)
        # As few launches as there can be, and none of them much smaller than the others.
        count = cdiv(len(order), most)
        bounds = [len(order) * j // count for j in range(count + 1)]
        for begin, end in itertools.pairwise(bounds):
            part = tuple(order[begin:end])
            launches.append(_best_launch(problem, part, transposes, terms, target))
    return launches


def _best_launch(
    problem: GroupedGemmProblem,
    order: tuple[int, ...],
    transposes: tuple[bool, bool],
    terms: int,
    target: Target,
) -> Launch:
    shapes = tuple(problem.entries[i].shape for i in order)
    if problem.dtype in fp64_kernels.DTYPES:
        square, blocks, steps, balance = plan_fp64.simulated(shapes, problem.dtype, target)
        return Launch(order, *transposes, square, blocks, None, steps, balance)
    parts_bytes = 0
    if terms:
        operands = [(s.g, s.m * s.k) for s in shapes] + [(s.g, s.k * s.n) for s in shapes]
        parts_bytes = float32.list_workspace_bytes(operands, terms)
        # Every term takes the steps of a product.
        shapes = tuple(s._replace(k=terms * round_up(s.k, TILE_K)) for s in shapes)
    kernel, clusters, schedule, steps, balance = _simulated(
        shapes, problem.scheduler, problem.sort_problems, target
    )
    return Launch(order, *transposes, kernel, clusters, schedule, steps, balance, parts_bytes)


# One call is planned more than once: for `explain`, for lowering, for every layer of a model.
@functools.lru_cache(maxsize=256)
def _simulated(
    shapes: tuple[Shape, ...], scheduler: Scheduler, sort_problems: bool, target: Target
) -> tuple[TiledKernel, int, np.ndarray | None, float, float]:
    """The kernel to take, its clusters and schedule, the steps of the longest cluster, the balance.

    That is predicted to be done first: for lists of few tiles that of small ones, of which more
    multiprocessors get one.
    """
    choices = []
    for kernel in TILES:
        tile = kernel.tile
        most_clusters = max(target.multiprocessors // tile.cluster, 1)
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
        # In a single round there is nothing to deal out.
        if scheduler == "host_precomputed" and len(schedule) > 1:
            pairs = np.stack([units.problem[schedule], units.number[schedule]], axis=-1)
            table = np.where(schedule[..., None] < 0, -1, pairs).astype(np.int32)
        choices.append((kernel, clusters, table, float(busy.max()), float(balance)))
    return min(choices, key=lambda c: c[3] + CLUSTER_STEPS * (c[0].tile.cluster > 1))


def _utilization(problem: GroupedGemmProblem, launches: Sequence[Launch], target: Target) -> float:
    useful = sum(
        math.prod(problem.entries[i].shape) for launch in launches for i in launch.problems
    )

    def per_step(launch: Launch) -> int:
        if problem.dtype in fp64_kernels.DTYPES:
            return plan_fp64.multiply_adds_per_step(problem.dtype, launch.kernel, target)
        return target.multiprocessors * FULL_STEP_AREA * TILE_K

    return useful / sum(launch.steps * per_step(launch) for launch in launches)
