"""Plans ragged products."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import is_static, round_up
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.fallback import faster_reason
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    NOTHING,
    XLA,
    Plan,
    Table,
    TileConfig,
    TiledKernel,
    able,
    algorithm_reason,
    choose,
    format_reason,
    passed_over,
    predict_problem,
    refusals,
)
from jax_grouped_gemm._src.ragged.problem import (
    ACCUMULATE_NAME,
    RATIOS,
    RaggedProblem,
    addressable_problem,
    can_be_skewed,
    copy_reason,
    count_tiles,
    rows_stay,
    tile_utilization,
    workspace_bytes,
)
from jax_grouped_gemm._src.ragged.tiles import EXACT_KERNELS, KERNELS
from jax_grouped_gemm._src.sizes import too_large

SYMBOLIC_ROWS_OF_GROUP = 128
"""Mean number of rows of a group that a plan assumes if the number of rows is symbolic."""

R = TypeVar("R", bound=RaggedProblem)


@dataclasses.dataclass(frozen=True)
class Candidates(Generic[R]):
    """A ragged product, and the kernels to choose from.

    Attributes:
      problem: the product.
      table: the kernels.
      form: `problem` with the layouts and the dtype of the result that the kernels support.
      precision: the precision of the product.
    """

    problem: R
    table: Table
    form: R
    precision: Any = None

    @functools.cached_property
    def unsupported(self) -> str:
        """Why no kernel can run the product, empty if a kernel can."""
        of_formats = format_reason(self.table.compiled, self.problem)
        return of_formats or algorithm_reason(self.precision) or _size_reason(self.problem)

    def with_tile(self, tile: TileConfig, implementation: Any) -> TiledKernel:
        """Returns the kernel with `tile`, if it runs the problem.

        Raises:
          ValueError: no kernel with `tile` runs the problem as `implementation` asks.
        """
        reasons = refusals(self.table.compiled, self.form, implementation)
        found = next((kernel for kernel in reasons if kernel.tile == tile), None)
        if found and not reasons[found]:
            return found
        raise ValueError(
            f"use_tiles has the tile {tile} for {self.problem}, which is "
            f"{reasons[found] if found else 'not compiled'}. Tiles that run it: "
            + "; ".join(str(kernel.tile) for kernel in able(reasons))
        )


def check_tile(
    candidates_of: Callable[..., Candidates[Any]], avals: Sequence[Any], params: Mapping[str, Any]
) -> None:
    """Raises a `ValueError` if no kernel with the parameter `tile` runs the product as
    `implementation` asks, or if the product must be batch invariant but cannot be."""
    tile, implementation = params.get("tile"), params["implementation"]
    if tile is None and not is_invariant(implementation):
        return
    candidates = candidates_of(avals, params)
    if tile is not None and not candidates.unsupported:
        candidates.with_tile(tile, implementation)


def noncontracting(avals: Sequence[Any], params: Mapping[str, Any]) -> Candidates[RaggedProblem]:
    """Returns the kernels for a `ragged_noncontracting`."""
    lhs = "km" if params["transpose_lhs"] else "mk"
    rhs = "gnk" if params["transpose_rhs"] else "gkn"
    return _candidates("ragged_noncontracting", avals, params, lhs=lhs, rhs=rhs, out="mn")


def contracting(
    avals: Sequence[Any], params: Mapping[str, Any], op: str = "ragged_contracting"
) -> Candidates[RaggedProblem]:
    """Returns the kernels for a `ragged_contracting`."""
    lhs = "km" if params["transpose_lhs"] else "mk"
    rhs = "nm" if params["transpose_rhs"] else "mn"
    return _candidates(op, avals, params, lhs=lhs, rhs=rhs, out="gkn")


def accumulating(avals: Sequence[Any], params: Mapping[str, Any]) -> Candidates[RaggedProblem]:
    """Returns the kernels for a `ragged_accumulate`."""
    accumulator, *operands = avals
    options = dict(num_groups=accumulator.shape[-3], preferred_element_type=accumulator.dtype)
    return contracting(operands, {**params, **options}, ACCUMULATE_NAME)


def _candidates(
    op: str, avals: Sequence[Any], params: Mapping[str, Any], **layouts: str
) -> Candidates[RaggedProblem]:
    """Returns the kernels for two operands that are not FP8."""
    problem = RaggedProblem.of(op, avals, params, **layouts)
    table = EXACT_KERNELS if problem.terms == float32.FULL_TERMS else KERNELS
    return Candidates(problem, table, _kernel_form(problem), params["precision"])


def _kernel_form(problem: RaggedProblem) -> RaggedProblem:
    """Returns `problem` with the layouts and the dtype of the result that the kernels support.

    The ragged dimension is not the contiguous one of any operand, and the result has the operands'
    dtype or float32. Kernels that accumulate need 16-bit operands, and a result that TMA can
    address without copies.
    """
    rhs = "mn" if problem.contracts_rows else problem.rhs
    form = dataclasses.replace(problem, lhs="mk", rhs=rhs)
    if problem.out_dtype != problem.lhs_dtype:
        form = dataclasses.replace(form, out_dtype=np.dtype(np.float32))
    if problem.accumulates:
        is_padded = addressable_problem(form).shape(form.out) != form.shape(form.out)
        if is_padded or form.terms:
            form = dataclasses.replace(form, op="ragged_contracting")
    return form


def plan_product(
    candidates_of: Callable[[Sequence[Any], Mapping[str, Any]], Candidates[R]],
    avals: Sequence[Any],
    params: Mapping[str, Any],
    target: Target,
) -> Plan[R]:
    """Returns the plan of a ragged product: a kernel, or XLA if no kernel runs it or XLA is faster.

    Args:
      candidates_of: `candidates_of(avals, params)` returns the product and its kernels.
      avals: abstract operands of the primitive.
      params: parameters of the primitive.
      target: the device to plan for.

    Raises:
      ValueError: no kernel with the parameter `tile` runs the problem.
    """
    candidates = candidates_of(avals, params)
    exact = problem = candidates.problem
    override, implementation = params.get("tile"), params["implementation"]
    plan = functools.partial(Plan, exact, product=params.get("product"))
    if implementation == "xla" or candidates.unsupported:
        return plan(XLA, AS_ASKED if implementation == "xla" else candidates.unsupported)
    overriding = None if override is None else candidates.with_tile(override, implementation)
    if 0 in (*problem.batch, problem.num_groups, *problem.shape("mkng")):
        return plan(NOTHING, "there is nothing to multiply")
    form = candidates.form
    if not is_static(exact.m):
        rows = SYMBOLIC_ROWS_OF_GROUP * exact.num_groups
        problem, form = (dataclasses.replace(x, m=rows) for x in (problem, form))
    addressable = addressable_problem(form)
    reasons = refusals(candidates.table.compiled, addressable, implementation)
    kernels = able(reasons)
    # Take the default for a symbolic size, because no size makes it much slower than other kernels.
    kernel = choose(kernels, addressable, target) if problem is exact else kernels[0]
    kernel = overriding or kernel
    places = kernel.places(target)
    useful = math.prod(problem.shape("mkn")) / math.prod(addressable.shape("mkn"))
    utilization = tile_utilization(addressable, kernel.tile, places) * useful
    kernel_problem = dataclasses.replace(addressable, m=exact.m)
    found = plan(
        kernel,
        copy_reason(problem, addressable),
        kernel_problem,
        grid=_grid(addressable, kernel, places),
        workspace_bytes=workspace_bytes(kernel_problem, kernel, target),
        terms=problem.terms,
        utilization=utilization,
        prediction=predict_problem(problem, kernel, utilization, target),
        chosen_by="override" if overriding else "default",
        candidates=tuple(kernel.tile for kernel in kernels),
        passed_over=passed_over(reasons, kernel) if problem is exact and not overriding else (),
        notes=_notes(problem, kernel_problem, kernel),
    )
    xla = candidates.table.xla
    if not overriding and (reason := faster_reason(xla, found, target, implementation)):
        return plan(xla, reason, terms=problem.terms)
    return found


def _notes(
    problem: RaggedProblem, kernel_problem: RaggedProblem, kernel: TiledKernel
) -> tuple[str, ...]:
    terms = problem.terms
    parts = (float32.described(terms, in_kernel=kernel.splits),) if terms else ()
    if not problem.accumulates:
        return parts
    if kernel_problem.accumulates:
        return ("added in place by the kernel", *parts)
    why = "the kernels add products of 16-bit operands to rows that need no padding"
    return (f"written to memory and added by XLA: {why}", *parts)


def _size_reason(problem: RaggedProblem) -> str:
    """Returns which sizes of `problem` no kernel takes, or an empty string."""
    sizes = {name: getattr(problem, name) for name in "mkng"}
    sizes |= dict(zip(["the batch"], problem.batch, strict=False))
    if reason := too_large(sizes | problem.counts()):
        return reason
    symbolic = {name: size for name, size in sizes.items() if not is_static(size)}
    # If the result keeps the rows, a symbolic number of rows affects only the workspace.
    if not symbolic or (rows_stay(problem) and list(symbolic) == ["m"]):
        return ""
    found = ", ".join(f"{name} = {size}" for name, size in symbolic.items())
    return (
        "only m of a product [m, k] x [g, k, n] may be symbolic for a kernel; k, n, g, the batch, "
        f"and m of a weight gradient must be static, got {found}"
    )


def _grid(problem: RaggedProblem, kernel: TiledKernel, places: int) -> int:
    if can_be_skewed(problem, kernel):
        return places
    num_tiles = count_tiles(problem, kernel.tile)
    if kernel.schedule == "stream_k":
        most_ranges, _ = RATIOS[0]
        num_tiles *= most_ranges
    return min(round_up(num_tiles, kernel.tile.cluster), places)
