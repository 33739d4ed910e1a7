"""The problem of a plan: a ragged product, and how its kernels assign tiles.

The number of tiles depends on the group sizes, so kernels do this arithmetic on the device. Plans
assume groups of equal size, but reserve workspaces large enough for any sizes. Three schedules do
more than assign whole tiles:

Stream-K (Osama et al., 2023) cuts the last wave of tiles along K (`csrc/scheduler/assignment.h`).
A persistent kernel computes its tiles in waves, one tile on each multiprocessor, and in the last
wave most multiprocessors may be idle. Stream-K assigns K tiles ("steps") instead of whole tiles of
the result. Here it does so only in the last wave, whose sums then pass through memory.

Skew: the more rows a group has, the more steps its tiles of a contracting product take. If one
group has most of the rows, its few tiles keep few multiprocessors busy. The kernel looks at the
group sizes when it starts (`csrc/scheduler/skew.h`). If whole tiles keep multiprocessors evenly
busy, it assigns whole tiles. Otherwise it cuts tiles into pieces whose sums pass through memory
(`csrc/scheduler/chains.h`), and idle warps write the zeros of empty groups. The order of sums
depends only on the group sizes, so equal inputs give equal bits.

Ping-pong: usually each of the two consumer warpgroups of a thread block computes half of every
tile, and both wait while a float32 tile is stored, because it is too large to stay in registers. In
a ping-pong kernel each warpgroup computes whole but smaller tiles, and stores a tile while the
other warpgroup multiplies (`csrc/sm90/consumer_pingpong.h`). Smaller tiles read more from L2.
Ping-pong therefore pays only if tiles have few steps along K, and not if a tile takes longer to
store than to multiply.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import cdiv, round_up
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.plan import (
    DEFAULT_TILE,
    TMA_ALIGNMENT_BYTES,
    TileConfig,
    TiledKernel,
    unaddressable_rows,
)

ACCUMULATE_NAME = "ragged_accumulate"
STORED_TRANSPOSED = ("km", "gnk", "nm")
"""Dimensions of the operands that are stored transposed."""


@dataclasses.dataclass(frozen=True)
class RaggedProblem:
    """Static description of one ragged product.

    Attributes:
      op: name of the primitive.
      lhs, rhs, out: names of the dimensions of each array without its batch dimension: m is the
        ragged dimension, g the local groups, k and n are those of the product.
      lhs_dtype, rhs_dtype, out_dtype: element types.
      m, k, n, g: extents of the dimensions.
      num_groups: number of global groups.
      batch: extent of the native batch dimension, () if there is none.
      batched: whether lhs, rhs, group sizes and group offset have the batch dimension.
      zeroes_unowned: whether rows of the result that no local group owns are zero, or undefined.
      max_sms: the most multiprocessors that the kernel uses, None for all.
      terms: see `Plan`.
    """

    op: str
    lhs: str
    rhs: str
    out: str
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    m: int
    k: int
    n: int
    g: int
    num_groups: int
    batch: tuple[int, ...]
    batched: tuple[bool, ...]
    zeroes_unowned: bool = dataclasses.field(default=True, kw_only=True)
    max_sms: int | None = dataclasses.field(default=None, kw_only=True)
    terms: int = dataclasses.field(default=0, kw_only=True)

    @classmethod
    def of(
        cls,
        op: str,
        avals: Sequence[Any],
        params: Mapping[str, Any],
        *,
        lhs: str,
        rhs: str,
        **fields: Any,
    ) -> Self:
        """Returns the problem for the avals of lhs, rhs, group sizes and group offset."""
        ranks = (len(lhs), len(rhs), 1, 1)
        sizes: dict[str, Any] = {"g": params.get("num_groups")}
        for names, aval in ((lhs, avals[0]), (rhs, avals[1])):
            sizes |= zip(names, aval.shape[-len(names) :], strict=True)
        batched = tuple(x.ndim > rank for x, rank in zip(avals, ranks, strict=True))
        batches = [x.shape[0] for x, b in zip(avals, batched, strict=True) if b]
        return cls(
            op=op,
            lhs=lhs,
            rhs=rhs,
            lhs_dtype=avals[0].dtype,
            rhs_dtype=avals[1].dtype,
            out_dtype=np.dtype(params["preferred_element_type"]),
            **sizes,
            num_groups=avals[2].shape[-1],
            zeroes_unowned=params.get("zeroes_unowned", True),
            max_sms=params.get("max_sms"),
            terms=float32.terms_of(avals[0].dtype, params.get("precision")),
            batch=tuple(batches[:1]),
            batched=batched,
            **fields,
        )

    @property
    def arrays(self) -> tuple[tuple[str, np.dtype], ...]:
        """Dimension names and element type of lhs, rhs and the result."""
        return ((self.lhs, self.lhs_dtype), (self.rhs, self.rhs_dtype), (self.out, self.out_dtype))

    @property
    def contracts_rows(self) -> bool:
        """Whether the ragged dimension is contracted."""
        return "m" not in self.out

    @property
    def accumulates(self) -> bool:
        """Whether a kernel adds the product to an accumulator in place."""
        return self.op == ACCUMULATE_NAME

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the dtypes of lhs, rhs and the result, for `Kernel.takes`."""
        return self.lhs_dtype.name, self.rhs_dtype.name, self.out_dtype.name

    @property
    def multiply_adds(self) -> float:
        """Multiply-adds of the local groups, if all groups have equal sizes."""
        local = self.g / max(self.num_groups, 1)
        return math.prod(self.batch) * self.m * local * self.k * self.n

    def counts(self) -> dict[str, Any]:
        """Returns, by name, all sizes besides m, k, n and g that the kernels limit."""
        found = {"the number of groups": self.num_groups}
        if self.batch:
            (b,) = self.batch
            found |= {"rows of all batches": b * self.m, "groups of all batches": b * self.g}
        return found

    def shape(self, names: str) -> tuple[int, ...]:
        """Returns the extents of the named dimensions."""
        return tuple(getattr(self, name) for name in names)

    @property
    def operand_bytes(self) -> float:
        """Bytes that are read from lhs and rhs, if all groups have equal sizes.

        A product reads rows of local groups, and weights of groups that have rows.
        """
        total = 0.0
        for (names, dtype), is_batched in zip(self.arrays[:2], self.batched, strict=False):
            visited = min(self.m / max(self.g, 1), 1)
            share = visited if "g" in names else self.g / max(self.num_groups, 1)
            size = math.prod(self.shape(names)) * dtype.itemsize
            total += size * share * (math.prod(self.batch) if is_batched else 1)
        return total

    @property
    def result_bytes(self) -> float:
        """Bytes of the result, and of the accumulator if there is one."""
        size = math.prod(self.batch) * math.prod(self.shape(self.out)) * self.out_dtype.itemsize
        return size * 2 if self.accumulates else size

    def __str__(self) -> str:
        lhs, rhs, out = (
            f"{dtype}{list(self.shape(names))}{'^T' * (names in STORED_TRANSPOSED)}"
            for names, dtype in self.arrays
        )
        batch = f", batch {self.batch[0]}" if self.batch else ""
        return f"{self.op} {lhs} x {rhs} -> {out}, {self.num_groups} groups{batch}"


NUM_CONSUMERS = 2
STEP_BYTES = 128
"""Bytes that a step reads of a row of either operand: 64 elements of 16 bits, or 128 of 8."""

# Stream-K: a pair (c, u) lets c clusters share the work of u units. Kernels use the first pair for
# which there are enough clusters.
RATIOS = ((4, 1), (3, 1), (2, 1), (3, 2), (4, 3))
WORTHWHILE_STEPS = 16
"""The least number of steps that cutting the last wave must save."""

# The kernel does not look for skew in shapes beyond these limits, because cutting tiles would never
# pay, or looking would take too long.
SKEW_LEAST_STEPS = 64
SKEW_MOST_UNITS = 1 << 16
SKEW_MOST_GROUPS = 1 << 10


def steps(problem: RaggedProblem) -> int:
    """Returns the number of steps along k, for a product that keeps the rows."""
    itemsize = min(problem.lhs_dtype.itemsize, 2)  # float32 is split into 16-bit parts
    return cdiv(problem.k * itemsize, STEP_BYTES)


def result_tiles(problem: RaggedProblem) -> tuple[int, int, int]:
    """Returns the number of matrices in the result, and their rows and columns, for equal groups.
    If the result keeps the rows, each group's rows count as a matrix."""
    count = math.prod(problem.batch) * problem.g
    if problem.contracts_rows:
        return count, problem.k, problem.n
    return count, cdiv(problem.m, problem.num_groups), problem.n


def rows_stay(problem: RaggedProblem) -> bool:
    """Returns whether the result keeps the rows of an lhs [m, k]."""
    return (problem.lhs, problem.out) == ("mk", "mn")


def count_tiles(problem: RaggedProblem, tile: TileConfig) -> int:
    """Returns the number of tiles of all groups, if groups have equal sizes."""
    count, rows, columns = result_tiles(problem)
    return count * cdiv(rows, tile.tile_m) * cdiv(columns, tile.tile_n)


def count_waves(problem: RaggedProblem, tile: TileConfig, clusters: int) -> int:
    """Returns the number of units of the busiest cluster, if groups have equal sizes."""
    count, *_ = result_tiles(problem)
    return cdiv(count * units_of_result(problem, tile), clusters)


def tile_utilization(problem: RaggedProblem, tile: TileConfig, places: int) -> float:
    """Returns the useful share of the tensor cores' time, if `places` tiles run at a time."""
    count, rows, columns = result_tiles(problem)
    units = cdiv(count_tiles(problem, tile), tile.cluster)
    clusters = places // tile.cluster
    waves: float = cdiv(units, clusters)
    if tile.stream_k:
        waves = stream_k_waves(units, steps(problem), clusters)
    return count * rows * columns / (waves * places * tile.tile_m * tile.tile_n)


def stream_k_waves(units: int, steps: int, clusters: int) -> float:
    """Returns the time of `units` units of `steps` steps each on `clusters` clusters, in multiples
    of the time of one whole unit, without the cost of handing sums over."""
    full, last = divmod(units, clusters)
    if last == 0:
        return full
    ranges = next((last * p // q for p, q in RATIOS if last * p // q <= clusters), last)
    longest = cdiv(last * steps, ranges)
    return full + (longest / steps if steps - longest >= WORTHWHILE_STEPS else 1)


def sums_bytes(tile_m: int, tile_n: int, num_blocks: int) -> int:
    """Returns the bytes for a float32 tile and the consumers' announcements of each CTA."""
    return num_blocks * (4 * tile_m * tile_n + 4 * NUM_CONSUMERS)


def cut_tile(kernel: TiledKernel) -> TileConfig:
    """Returns the tile that a kernel cuts if groups are unequal. Both consumers share a cut tile,
    even in a ping-pong kernel, where each consumer otherwise has tiles to itself."""
    return kernel.tile if kernel.schedule == "cooperative" else DEFAULT_TILE


def can_be_skewed(problem: RaggedProblem, kernel: TiledKernel) -> bool:
    """Returns whether the kernel cuts tiles for some group sizes."""
    return (
        problem.contracts_rows
        and (problem.lhs, problem.rhs) == ("mk", "mn")
        and not problem.terms
        and skew_is_possible(
            rows=problem.m,
            units=units_of_result(problem, cut_tile(kernel)),
            groups=math.prod(problem.batch) * problem.g,
        )
    )


def skew_is_possible(*, rows: int, units: int, groups: int) -> bool:
    """Returns whether kernels cut tiles for some group sizes.

    Args:
      rows: extent of the ragged dimension.
      units: number of units of one group.
      groups: local groups of all batches.
    """
    return (
        rows // (STEP_BYTES // 2) >= SKEW_LEAST_STEPS
        and units < SKEW_MOST_UNITS
        and groups <= SKEW_MOST_GROUPS
    )


def skew_bytes(problem: RaggedProblem, kernel: TiledKernel, num_blocks: int) -> int:
    """Returns the bytes for all sums that `num_blocks` thread blocks can hand over.

    Every cluster gets equally many whole units of a group. Clusters share the units that are left
    over, so such a unit is cut into at most `clusters // left_over + 1` pieces.
    """
    tile = cut_tile(kernel)
    clusters = num_blocks // tile.cluster
    left_over = units_of_result(problem, tile) % clusters
    if left_over == 0:
        return 0
    sums = left_over * (clusters // left_over + 1)
    return sums_bytes(tile.tile_m, tile.tile_n, sums * tile.cluster)


def units_of_result(problem: RaggedProblem, tile: TileConfig) -> int:
    """Returns the number of units of one group. A unit has a tile for each CTA of a cluster."""
    _, rows, columns = result_tiles(problem)
    rows, columns = cdiv(rows, tile.tile_m), cdiv(columns, tile.tile_n)
    pairs, single = divmod(rows, tile.cluster)
    return pairs * columns + single * cdiv(columns, 2)


R = TypeVar("R", bound=RaggedProblem)


def addressable_problem(problem: R) -> R:
    """Returns `problem` with contiguous dimensions padded to multiples that TMA can address."""
    padded: dict[str, Any] = {}
    for names, dtype in problem.arrays:
        row = names[-1]
        # TMA addresses the float16 parts of float32 operands.
        itemsize = 2 if problem.terms else dtype.itemsize
        multiple = max(TMA_ALIGNMENT_BYTES // itemsize, 1)
        padded[row] = max(round_up(getattr(problem, row), multiple), padded.get(row, 0))
    return dataclasses.replace(problem, **padded)


def copy_reason(problem: RaggedProblem, addressable: RaggedProblem) -> str:
    """Returns why kernels cannot read the arrays of `problem` without copies, empty if they can."""
    reasons = unaddressable_rows("mkn", problem, addressable, problem.terms)
    reasons += [
        f"the kernels need {name} with dimensions {'/'.join(getattr(addressable, name))} in memory"
        for name in ("lhs", "rhs")
        if getattr(problem, name) != getattr(addressable, name)
    ]
    if problem.lhs_dtype != addressable.lhs_dtype:
        reasons.append(
            f"no kernel multiplies two operands of {problem.lhs_dtype}, so lhs is split into two "
            f"arrays of {addressable.lhs_dtype}"
        )
    return "; ".join(reasons)


LEAST_BYTES = 16
"""The least size of a workspace, because kernels take no empty buffers."""


def workspace_bytes(problem: RaggedProblem, kernel: TiledKernel, target: Target) -> int:
    """Returns the size of the kernel's workspace in bytes."""
    tile = kernel.tile
    if kernel.schedule == "stream_k":
        return sums_bytes(tile.tile_m, tile.tile_n, target.multiprocessors)
    if can_be_skewed(problem, kernel):
        return max(skew_bytes(problem, kernel, target.multiprocessors), LEAST_BYTES)
    return _float32_bytes(problem) if problem.terms and not kernel.splits else LEAST_BYTES


def _float32_bytes(problem: RaggedProblem) -> int:
    """Returns the bytes for the parts of both operands, and for data on groups, rows and matrices,
    in the layout of `csrc/ragged/parts_workspace.cc`."""
    lhs_batched, rhs_batched, sizes_batched, offset_batched = problem.batched
    owners_batched = sizes_batched or offset_batched
    lhs_batched |= owners_batched
    is_contracting = problem.contracts_rows
    rhs_batched |= owners_batched and is_contracting
    batch = math.prod(problem.batch)
    lhs_batches, rhs_batches, owner_batches = (
        batch if batched else 1 for batched in (lhs_batched, rhs_batched, owners_batched)
    )
    parts = float32.num_parts(problem.terms)
    sections = (
        (lhs_batches * problem.g, np.uint32),
        (rhs_batches * problem.g, np.uint32),
        (0 if is_contracting else rhs_batches * problem.g, np.int32),
        (owner_batches * problem.m, np.int32),
        (parts * lhs_batches * math.prod(problem.shape(problem.lhs)), float32.PART_DTYPE),
        (parts * rhs_batches * math.prod(problem.shape(problem.rhs)), float32.PART_DTYPE),
    )
    return sum(float32.section_bytes(*section) for section in sections)
