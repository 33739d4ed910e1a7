"""Which kernel runs a ragged product, decided from static shapes alone.

A plan is pure Python: it needs neither a device nor the compiled extension, and it never depends
on the values of the group sizes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arithmetic import is_static
from jax_grouped_gemm._src.ragged import skew, stream_k
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.tile_config import CUT_TILE, DEFAULT_TILE, NUM_SMS, TileConfig

TMA_ALIGNMENT_BYTES = 16
WORKSPACE_BYTES = 16

ACCUMULATE = "ragged_accumulate"

LARGEST_SIZE = 2**31 - 1

SYMBOLIC_ROWS_OF_GROUP = 128
"""What a plan takes for the average rows of a group where their number is symbolic."""

KERNEL_OPERAND_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
KERNEL_RESULT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class KernelFamily:
    """Kernels that take the same problems.

    Attributes:
      tiles: the compiled configurations that run every problem of the family.
      unsupported_reason: of a problem and the primitive's parameters, why no kernel of the family
        can run it; empty if one can.
      kernel_form: of a problem, the same with the layouts and the result's dtype that the kernels
        have.
      more_tiles: of a problem, further configurations that run it.
      choose: of a problem, the configuration to take unless another one is asked for.
      blocks: of a configuration, thread blocks that share a multiprocessor.
    """

    tiles: tuple[TileConfig, ...]
    unsupported_reason: Callable[[RaggedProblem, Mapping[str, Any]], str]
    kernel_form: Callable[[RaggedProblem], RaggedProblem]
    more_tiles: Callable[[RaggedProblem], tuple[TileConfig, ...]] = lambda problem: ()
    choose: Callable[[RaggedProblem], TileConfig] = lambda problem: DEFAULT_TILE
    blocks: Callable[[TileConfig], int] = lambda tile: 1


Choice = Literal["default", "override"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one ragged product runs on a device of compute capability 9.0.

    Attributes:
      problem: what is computed.
      path: "tma" is the kernel on the arrays as they are; "copied" the kernel on copies that TMA
        can address; "direct" a kernel without TMA, on the arrays as they are; "zeros" no kernel at
        all; "reference" the pure JAX implementation.
      reason: why not "tma" or "direct", empty on those paths.
      kernel_problem: the problem that the kernel gets, None without a kernel. It equals `problem`
        on the path "tma", unless XLA converts the result to a dtype that no kernel writes.
      tile: kernel configuration, None without a kernel.
      grid: thread blocks launched.
      workspace_bytes: scratch memory of the kernel.
      terms: products of float16 parts that make up a product of float32 operands, 1 or 3; with few
        rows a group, where parts are bfloat16, the precision of as many. 0 for other operands. See
        `_src.float32`.
      efficiency: predicted share of the tensor cores' work that is useful, from the tiles' edges
        and the last, partial wave of tiles, for groups of equal size. 0 without a kernel.
      chosen_by: what the tile comes from: "default", its family's choice, or "override", a tile
        given to `jax_grouped_gemm.use_tiles`.
      candidates: the compiled configurations that can run the problem, () without a kernel.
    """

    problem: RaggedProblem
    path: Literal["tma", "copied", "direct", "zeros", "reference"]
    reason: str
    kernel_problem: RaggedProblem | None = None
    tile: TileConfig | None = None
    grid: int = 0
    workspace_bytes: int = 0
    terms: int = 0
    efficiency: float = 0.0
    chosen_by: Choice = "default"
    candidates: tuple[TileConfig, ...] = ()

    @property
    def adds_in_place(self) -> bool:
        """Whether the kernel adds its product to an accumulator; otherwise XLA does, if any."""
        return self.kernel_problem is not None and self.kernel_problem.op == ACCUMULATE

    def __str__(self) -> str:
        path = f"{self.path} ({self.reason})" if self.reason else self.path
        lines = [str(self.problem), f"path {path}"]
        if self.tile:
            lines.append(
                f"tile {self.tile}{_CHOSEN_BY[self.chosen_by]}, "
                f"grid {self.grid}, workspace {self.workspace_bytes} bytes, "
                f"predicted efficiency {self.efficiency:.0%}"
            )
        if self.problem.op == ACCUMULATE and self.kernel_problem:
            lines.append(
                "added in place by the kernel"
                if self.adds_in_place
                else "written to memory and added by XLA: the kernels add products of 16-bit "
                "operands to rows that need no padding"
            )
        if self.terms:
            lines.append(float32.described(self.terms, few_rows=self.tile.transposed))
        return "\n   ".join(lines)


_CHOSEN_BY = {"default": "", "override": " (overridden)"}


def make_plan(problem: RaggedProblem, params: Mapping[str, Any], family: KernelFamily) -> Plan:
    """Plans `problem` with the kernels of `family`.

    Raises:
      ValueError: the parameter `tile` is no configuration of `family`.
    """
    reason = family.unsupported_reason(problem, params) or _size_reason(problem)
    override = params.get("tile")
    if override is not None and not reason:
        _check_compiled(override, problem, family)
    if params["implementation"] == "reference":
        return Plan(problem, "reference", "implementation='reference' was asked for")
    if reason:
        return Plan(problem, "reference", reason)
    exact = problem
    if not is_static(problem.m):
        problem = dataclasses.replace(problem, m=SYMBOLIC_ROWS_OF_GROUP * problem.num_groups)
    if 0 in (*problem.batch, problem.num_groups, *problem.shape("mkng")):
        return Plan(problem, "zeros", "there is nothing to multiply")
    addressable = addressable_problem(family.kernel_form(problem))
    terms = float32.num_terms(params["precision"]) if is_float32(problem) else 0
    tile = family.choose(addressable) if override is None else override
    num_tiles = _num_tiles(addressable, tile) * (stream_k.RATIOS[0][0] if tile.stream_k else 1)
    places = tile.places(family.blocks(tile))
    grid = min(_round_up(num_tiles, tile.cluster), places)
    if _can_be_skewed(addressable):
        grid = places
    reason = _copy_reason(problem, addressable)
    kernel_problem = addressable
    if problem is not exact:
        kernel_problem = dataclasses.replace(addressable, m=exact.m)
    return Plan(
        problem=exact,
        path="copied" if reason else "tma",
        reason=reason,
        kernel_problem=kernel_problem,
        tile=tile,
        grid=grid,
        workspace_bytes=_workspace_bytes(kernel_problem, tile, terms),
        terms=terms,
        efficiency=_efficiency(addressable, tile, places) * _volume(problem) / _volume(addressable),
        chosen_by="default" if override is None else "override",
        candidates=compiled_tiles(addressable, family),
    )


def symbolic_sizes(avals: Sequence[Any]) -> str:
    """Returns why no kernel runs operands with symbolic sizes, or an empty string."""
    shapes = [x.shape for x in avals if not is_static(*x.shape)]
    if not shapes:
        return ""
    return f"its kernels need static sizes, got {', '.join(map(str, shapes))}"


def _size_reason(problem: RaggedProblem) -> str:
    """Returns which sizes of `problem` no kernel takes, or an empty string."""
    sizes = {name: getattr(problem, name) for name in "mkng"}
    sizes |= dict(zip(["the batch"], problem.batch, strict=False))
    symbolic = {name: size for name, size in sizes.items() if not is_static(size)}
    # Rows that stay where they are need nothing of the plan: neither padding nor a workspace.
    rows_stay = (problem.lhs, problem.out) == ("mk", "mn")
    too_large = [f"{name} = {x}" for name, x in sizes.items() if is_static(x) and x > LARGEST_SIZE]
    if too_large:
        return f"the kernels count to 2^31 - 1, got {', '.join(too_large)}"
    if not symbolic or (rows_stay and list(symbolic) == ["m"]):
        return ""
    found = ", ".join(f"{name} = {size}" for name, size in symbolic.items())
    return (
        "only m of a product [m, k] x [g, k, n] may be symbolic for a kernel; k, n, g, the batch, "
        f"and m of a weight gradient must be static, got {found}"
    )


def compiled_tiles(problem: RaggedProblem, family: KernelFamily) -> tuple[TileConfig, ...]:
    """The configurations that can run `problem`, and may be asked for."""
    return family.tiles + family.more_tiles(problem)


def _check_compiled(tile: TileConfig, problem: RaggedProblem, family: KernelFamily) -> None:
    compiled = compiled_tiles(problem, family)
    if tile not in compiled:
        raise ValueError(
            f"use_tiles has the tile {tile} for {problem}, which is not compiled. Compiled are: "
            + "; ".join(map(str, compiled))
        )


def _workspace_bytes(problem: RaggedProblem, tile: TileConfig, terms: int) -> int:
    if tile.stream_k:
        return stream_k.workspace_bytes(tile.tile_m, tile.tile_n, NUM_SMS)
    if _can_be_skewed(problem):
        units = _units_of_result(problem, CUT_TILE)
        partial_sums = skew.workspace_bytes(units=units, num_blocks=NUM_SMS, **CUT_TILE.sizes())
        return max(partial_sums, WORKSPACE_BYTES)
    needs_parts = terms and not tile.transposed
    return float32.workspace_bytes(problem, terms) if needs_parts else WORKSPACE_BYTES


def _can_be_skewed(problem: RaggedProblem) -> bool:
    """Whether the kernel cuts tiles for some group sizes, whichever it has for others."""
    return (
        problem.contracts_rows
        and (problem.lhs, problem.rhs) == ("mk", "mn")
        and not is_float32(problem)
        and skew.is_possible(
            rows=problem.m,
            units=_units_of_result(problem, CUT_TILE),
            groups=math.prod(problem.batch) * problem.g,
        )
    )


def _units_of_result(problem: RaggedProblem, tile: TileConfig) -> int:
    """What clusters compute of the result of one group, two tiles at a time where they are two."""
    _, rows, columns = _result_tiles(problem)
    rows, columns = math.ceil(rows / tile.tile_m), math.ceil(columns / tile.tile_n)
    pairs, single = divmod(rows, tile.cluster)
    return pairs * columns + single * math.ceil(columns / 2)


def is_float32(problem: RaggedProblem) -> bool:
    return problem.lhs_dtype == jnp.float32


def addressable_problem(problem: RaggedProblem) -> RaggedProblem:
    """`problem` with every row of every array a multiple of what TMA can address."""
    padded = {}
    for names, dtype in problem.arrays:
        row = names[-1]
        # Of float32 operands, TMA addresses the float16 parts.
        itemsize = 2 if is_float32(problem) else dtype.itemsize
        multiple = max(TMA_ALIGNMENT_BYTES // itemsize, 1)
        padded[row] = max(_round_up(getattr(problem, row), multiple), padded.get(row, 0))
    return dataclasses.replace(problem, **padded)


def default_or_stream_k(
    problem: RaggedProblem, tiles: Sequence[TileConfig], least_steps: int = stream_k.LEAST_STEPS
) -> TileConfig:
    """The default, or one of `tiles`, which cut the last wave, where that was measured to pay.

    Elsewhere it gives nothing, or loses up to 1 % (2 % in FP8).
    """
    for tile in tiles:
        if stream_k.pays(
            rows_of_group=math.ceil(problem.m / problem.num_groups),
            steps=problem.steps,
            waves=_num_tiles(problem, tile) / NUM_SMS,
            least_steps=least_steps,
        ):
            return tile
    return DEFAULT_TILE


def _copy_reason(problem: RaggedProblem, addressable: RaggedProblem) -> str:
    """Why the kernels cannot read the arrays of `problem` as they are, empty if they can."""
    of_what = " of float16 parts" if is_float32(problem) else ""
    reasons = [
        f"rows of {name}={getattr(problem, name)} elements are not a multiple of 16 bytes{of_what}"
        for name in "mkn"
        if getattr(problem, name) != getattr(addressable, name)
    ]
    reasons += [
        f"the kernels want {name} with dimensions {'/'.join(getattr(addressable, name))} in memory"
        for name in ("lhs", "rhs")
        if getattr(problem, name) != getattr(addressable, name)
    ]
    return "; ".join(reasons)


def _result_tiles(problem: RaggedProblem) -> tuple[int, int, int]:
    """Number of dense results of equal size and their rows and columns, for equal groups."""
    count = math.prod(problem.batch) * problem.g
    if problem.out == "gkn":
        return count, problem.k, problem.n
    return count, math.ceil(problem.m / problem.num_groups), problem.n


def _num_tiles(problem: RaggedProblem, tile: TileConfig) -> int:
    count, rows, columns = _result_tiles(problem)
    return count * math.ceil(rows / tile.tile_m) * math.ceil(columns / tile.tile_n)


def _efficiency(problem: RaggedProblem, tile: TileConfig, places: int) -> float:
    count, rows, columns = _result_tiles(problem)
    units = math.ceil(_num_tiles(problem, tile) / tile.cluster)
    clusters = places // tile.cluster
    waves = math.ceil(units / clusters)
    if tile.stream_k:
        waves = stream_k.waves(units, problem.steps, clusters)
    return count * rows * columns / (waves * places * tile.tile_m * tile.tile_n)


def _volume(problem: RaggedProblem) -> int:
    return math.prod(problem.shape("mkn"))


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
