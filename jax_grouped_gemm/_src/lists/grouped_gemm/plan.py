"""Which kernels run the products of a list of matrices, decided from static shapes alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.lists import fp64 as fp64_kernels
from jax_grouped_gemm._src.lists import kernels as list_kernels
from jax_grouped_gemm._src.lists.grouped_gemm import (
    plan_fp64 as grouped_gemm_plan_fp64,
)
from jax_grouped_gemm._src.lists.grouped_gemm import (
    schedule as list_schedule,
)
from jax_grouped_gemm._src.lists.grouped_gemm.schedule import FULL_STEP_AREA, TILE_K, Shape
from jax_grouped_gemm._src.plan import Plan, symbolic_sizes
from jax_grouped_gemm._src.tile_config import NUM_SMS, TileConfig

TILES = (
    TileConfig(tile_m=128, tile_n=256, cluster=2),
    TileConfig(tile_m=128, tile_n=128, cluster=1),
)
MAX_PROBLEMS = 79
"""Problems to a launch, whose descriptors are parameters of the kernel."""

Scheduler = Literal["device", "host_precomputed"]
SCHEDULERS: tuple[Scheduler, ...] = ("device", "host_precomputed")

# A launch of clusters takes 0.5 us longer than one of single CTAs, as an H200 measured.
CLUSTER_STEPS = 0.7
LISTED = 4  # entries of a list that a description names


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stack of `g` products of [m, k] and [k, n], and how their operands are stored."""

    g: int
    m: int
    n: int
    k: int
    transpose_lhs: bool
    transpose_rhs: bool

    @property
    def shape(self) -> Shape:
        """Without the layouts."""
        return Shape(self.g, self.m, self.n, self.k)

    def __str__(self) -> str:
        def stored(rows, columns, transposed):
            shape = [self.g, columns, rows] if transposed else [self.g, rows, columns]
            return f"{shape}{'^T' * transposed}"

        lhs, rhs = (
            stored(self.m, self.k, self.transpose_lhs),
            stored(self.k, self.n, self.transpose_rhs),
        )
        return f"{lhs} x {rhs}"


@dataclasses.dataclass(frozen=True)
class GroupedGemmProblem:
    """Static description of the products of a list.

    Attributes:
      entries: the shapes, in the caller's order.
      dtype, result_dtype: element types.
      has_alpha, has_beta, has_c: which optional operands there are.
      alpha, beta: the numbers that missing scales stand for.
      scheduler, sort_problems: as for `grouped_gemm`.
    """

    entries: tuple[Entry, ...]
    dtype: np.dtype
    result_dtype: np.dtype
    has_alpha: bool
    has_beta: bool
    has_c: bool
    alpha: complex
    beta: complex
    scheduler: Scheduler
    sort_problems: bool
    op: str = "grouped_gemm"

    @classmethod
    def of(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> GroupedGemmProblem:
        """The problem of a `grouped_gemm` primitive with operands of the given abstract values."""
        count = params["num_problems"]
        first = count * params["has_alpha"]
        lhs, rhs = avals[first : first + count], avals[first + count : first + 2 * count]
        entries = []
        for a, b, a_transposed, b_transposed in zip(
            lhs, rhs, params["transpose_lhs"], params["transpose_rhs"], strict=True
        ):
            m, k = a.shape[1:][::-1] if a_transposed else a.shape[1:]
            n = b.shape[1 if b_transposed else 2]
            entries.append(Entry(a.shape[0], m, n, k, a_transposed, b_transposed))
        fields = ("has_alpha", "has_beta", "has_c", "alpha", "beta", "scheduler", "sort_problems")
        return cls(
            entries=tuple(entries),
            dtype=lhs[0].dtype,
            result_dtype=np.dtype(params["result_dtype"]),
            **{name: params[name] for name in fields},
        )

    def __str__(self) -> str:
        c = ", with c" if self.has_c else ""
        listed = _listed(self.entries)
        return f"{self.op} {self.dtype} {listed} -> {self.result_dtype}{c}"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    On the FP64 tensor cores a stack is a product for each of its matrices, and what is then too
    much for one launch takes a few, one after another.

    Attributes:
      problems: the indices of its problems, in the order in which the kernel has them.
      transpose_lhs, transpose_rhs: how the operands of all of them are stored.
      tile: kernel configuration.
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
    tile: TileConfig
    clusters: int
    schedule: np.ndarray | None = dataclasses.field(repr=False, compare=False)
    steps: float
    balance: float
    parts_bytes: int = 0

    @property
    def workspace_bytes(self) -> int:
        """Of the schedule, which is an operand of the kernel, and of the parts of operands."""
        return self.parts_bytes + (0 if self.schedule is None else self.schedule.nbytes)

    def __str__(self) -> str:
        form = "NT"[self.transpose_lhs] + "NT"[self.transpose_rhs]
        order = _listed(self.problems)
        return (
            f"{form}, problems {order}: tile {self.tile.tile_m}x{self.tile.tile_n}, "
            f"cluster {self.tile.cluster}, grid {self.clusters * self.tile.cluster}, "
            f"workspace {self.workspace_bytes} bytes, longest cluster {self.steps:.0f} steps, "
            f"predicted balance {self.balance:.0%}"
        )


@dataclasses.dataclass(frozen=True)
class GroupedGemmPlan(Plan):
    """How the products of a list run on a device of compute capability 9.0.

    `tile` and `grid` are those of the first launch, `workspace_bytes` the sum over all, and
    `efficiency` the share of the tensor cores' work that is useful while the longest cluster of
    each launch is busy.

    Attributes:
      launches: one for at most `MAX_PROBLEMS` problems whose operands are stored alike, on the
        FP64 tensor cores for at most `grouped_gemm_plan_fp64.MAX_MATRICES`.
      order: the indices of all problems in the order in which the kernels have them: by falling k,
        if they are sorted. Problems without any work are not among them.
    """

    launches: tuple[Launch, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """See the class."""
        return tuple(i for launch in self.launches for i in launch.problems)

    def __str__(self) -> str:
        path = f"{self.path} ({self.reason})" if self.reason else self.path
        lines = [str(self.problem), f"path {path}"]
        if self.launches:
            # There is no other on the FP64 tensor cores.
            scheduler = "device" if self.path == "direct" else self.problem.scheduler
            lines.append(
                f"scheduler {scheduler}, launches {len(self.launches)}, "
                f"predicted efficiency {self.efficiency:.0%}"
            )
        if self.terms:
            lines.append(float32.described(self.terms))
        return "\n   ".join(lines + [f"launch {launch}" for launch in self.launches])


def plan_grouped_gemm(avals: Sequence[Any], params: Mapping[str, Any]) -> GroupedGemmPlan:
    """Plans a `grouped_gemm` from its operands' abstract values and its parameters."""
    problem = GroupedGemmProblem.of(avals, params)
    reason = list_kernels.unsupported_reason(problem, params) or symbolic_sizes(avals)
    if reason:
        return GroupedGemmPlan(problem, "reference", reason)
    working = [i for i, entry in enumerate(problem.entries) if 0 not in entry.shape]
    if not working:
        return GroupedGemmPlan(problem, "zeros", "there is nothing to multiply")
    is_fp64 = problem.dtype in fp64_kernels.DTYPES
    addressable = problem if is_fp64 else _addressable_problem(problem)
    reason = _copy_reason(problem, addressable, working)
    terms = float32.num_terms(params["precision"]) if problem.dtype == jnp.float32 else 0
    launches = tuple(_launches(addressable, working, terms))
    return GroupedGemmPlan(
        problem=problem,
        path="direct" if is_fp64 else "copied" if reason else "tma",
        reason=reason,
        kernel_problem=addressable,
        tile=launches[0].tile,
        grid=launches[0].clusters * launches[0].tile.cluster,
        workspace_bytes=sum(launch.workspace_bytes for launch in launches),
        terms=terms,
        efficiency=_efficiency(problem, launches) * max(terms, 1),
        launches=launches,
    )


def _addressable_problem(problem: GroupedGemmProblem) -> GroupedGemmProblem:
    """`problem` with every row of every array a multiple of what TMA can address."""
    operand_multiple, result_multiple = list_kernels.row_multiples(problem)

    def pad(entry: Entry) -> Entry:
        multiples = {"n": result_multiple}
        multiples["m" if entry.transpose_lhs else "k"] = operand_multiple
        multiples["k" if entry.transpose_rhs else "n"] = operand_multiple
        padded = {name: _round_up(getattr(entry, name), x) for name, x in multiples.items()}
        return dataclasses.replace(entry, **padded)

    entries = tuple(map(pad, problem.entries))
    result_dtype = list_kernels.written_dtype(problem)
    return dataclasses.replace(problem, entries=entries, result_dtype=result_dtype)


def _copy_reason(
    problem: GroupedGemmProblem, addressable: GroupedGemmProblem, working: Sequence[int]
) -> str:
    """Why TMA cannot address the arrays of `problem`, empty if it can."""
    of_what = " of float16 parts" if problem.dtype == jnp.float32 else ""
    reasons = [
        f"rows of {name}={getattr(problem.entries[i], name)} elements of problem {i} are not a "
        f"multiple of 16 bytes{of_what}"
        for i in working
        for name in "mkn"
        if getattr(problem.entries[i], name) != getattr(addressable.entries[i], name)
    ]
    return _listed(reasons, "; ")


def _launches(problem: GroupedGemmProblem, working: Sequence[int], terms: int) -> list[Launch]:
    def stored(i):
        return problem.entries[i].transpose_lhs, problem.entries[i].transpose_rhs

    is_fp64 = problem.dtype in fp64_kernels.DTYPES
    most = grouped_gemm_plan_fp64.MAX_MATRICES if is_fp64 else MAX_PROBLEMS
    launches = []
    for transposes, members in itertools.groupby(sorted(working, key=stored), key=stored):
        order = list(members)
        if problem.sort_problems:
            # Longest tiles first, as CUTLASS recommends: short ones even out the end.
            order.sort(key=lambda i: -problem.entries[i].k)
        # As few launches as there can be, and none of them much smaller than the others.
        count = math.ceil(len(order) / most)
        bounds = [len(order) * j // count for j in range(count + 1)]
        for begin, end in itertools.pairwise(bounds):
            launches.append(_best_launch(problem, tuple(order[begin:end]), terms, *transposes))
    return launches


def _best_launch(
    problem: GroupedGemmProblem, order: tuple[int, ...], terms: int, *transposes: bool
) -> Launch:
    shapes = tuple(problem.entries[i].shape for i in order)
    if problem.dtype in fp64_kernels.DTYPES:
        tile, blocks, steps, balance = grouped_gemm_plan_fp64.simulated(shapes, problem.dtype)
        return Launch(order, *transposes, tile, blocks, None, steps, balance)
    parts_bytes = 0
    if terms:
        operands = [(s.g, s.m * s.k) for s in shapes] + [(s.g, s.k * s.n) for s in shapes]
        parts_bytes = float32.list_workspace_bytes(operands, terms)
        # Every term takes the steps of a product.
        shapes = tuple(s._replace(k=terms * _round_up(s.k, TILE_K)) for s in shapes)
    (tile, clusters, schedule, steps, balance) = _simulated(
        shapes, problem.scheduler, problem.sort_problems
    )
    return Launch(order, *transposes, tile, clusters, schedule, steps, balance, parts_bytes)


# One call is planned more than once: for `explain`, for lowering, for every layer of a model.
@functools.lru_cache(maxsize=256)
def _simulated(
    shapes: tuple[Shape, ...], scheduler: Scheduler, sort_problems: bool
) -> tuple[TileConfig, int, np.ndarray | None, float, float]:
    """The tile to take, its clusters and schedule, the steps of the longest cluster, the balance.

    The tile that is predicted to be done first: for lists of few tiles the small one, of which more
    multiprocessors get one.
    """
    choices = []
    for tile in TILES:
        most_clusters = NUM_SMS // tile.cluster
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
        choices.append((tile, clusters, table, float(busy.max()), float(balance)))
    return min(choices, key=lambda c: c[3] + CLUSTER_STEPS * (c[0].cluster > 1))


def _efficiency(problem: GroupedGemmProblem, launches: Sequence[Launch]) -> float:
    useful = sum(
        math.prod(problem.entries[i].shape) for launch in launches for i in launch.problems
    )

    def per_step(launch: Launch) -> int:
        if problem.dtype in fp64_kernels.DTYPES:
            return grouped_gemm_plan_fp64.multiply_adds_per_step(problem.dtype, launch.tile)
        return NUM_SMS * FULL_STEP_AREA * TILE_K

    return useful / sum(launch.steps * per_step(launch) for launch in launches)


def _listed(items: Sequence[Any], separator: str = ", ") -> str:
    """The first items, and how many more there are."""
    named = separator.join(map(str, items[:LISTED]))
    return named if len(items) <= LISTED else f"{named} and {len(items) - LISTED} more"


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
