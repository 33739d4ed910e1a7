"""Plans of the scaled ragged products."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv, is_static
from jax_grouped_gemm._src.fp8 import formats
from jax_grouped_gemm._src.fp8.formats import BLOCK, VIEWED_RHS, VIEWED_ROWS, viewed
from jax_grouped_gemm._src.fp8.scaled.problem import ScaledProblem, without_scales
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.plan import (
    DEFAULT_TILE,
    FLOATS,
    FLOATS_8,
    FLOATS_16,
    Table,
    TileConfig,
    TiledKernel,
    always,
)
from jax_grouped_gemm._src.ragged.plan import Candidates
from jax_grouped_gemm._src.ragged.problem import addressable_problem, copy_reason
from jax_grouped_gemm._src.ragged.tiles import STREAM_K_TILE, stream_k_pays
from jax_grouped_gemm._src.sizes import too_large_operands

SWAPPED_TILE = TileConfig(tile_m=32, tile_n=128, cluster=1)

SWAPPED_MOST_ROWS = 16
"""Average rows of a group up to which the swapped tile is faster."""

PAIRED_FP8_COLUMNS = 256
"""Columns up to which two weight gradients are faster in one launch, by 12 % (docs/notes/fp8.md).
With 512 or 768 columns one launch is as fast as two, but keeps both operands alive until both
results are ready."""

FP8_TILES_IN_PLACE, STEPS_OF_SCALES = 3, 4
"""The most tiles of columns for which reading tokens in place is faster than copying them
(docs/notes/fp8.md), and the number of steps whose scales the kernel in place reads at once."""

QUANTISED_ON_ROWS = 2**22
"""If groups have few rows, rows are quantised instead of tokens up to this number of elements. This
saves the one or two kernels that copy values and scales of quantised tokens. But it reads one more
byte of each 16-bit element, or three more bytes of each float32 element, from L2."""

FP8_STREAM_K_LEAST_STEPS = 96
"""The fewest steps of a stream-K product. The limit was measured only at 112 steps and 8.2 waves,
where 7 % fewer steps took 4.5 % less time."""


def _swapping_pays(problem: ScaledProblem, target: Any = None) -> bool:
    return problem.m <= SWAPPED_MOST_ROWS * problem.num_groups


def _is_in_blocks(problem: ScaledProblem) -> bool:
    """Whether scales change along k, so that every kernel applies them after each 128 elements.

    Scales that are equal along k are applied at the end by some kernels, and along k by others.
    """
    return problem.scales[1] == formats.MATRIX_BLOCKS


_of_fp8 = functools.partial(TiledKernel, lhs=FLOATS_8, rhs=FLOATS_8, out=FLOATS)

NONCONTRACTING_KERNELS = (
    _of_fp8(
        tile=DEFAULT_TILE, record=("h200_fp8.json", "qwen3_up/fp8_forward/random"), in_order=always
    ),
    _of_fp8(
        tile=SWAPPED_TILE,
        schedule="swapped",
        record=("h200_fp8.json", "decode_small/fp8_forward/random"),
        pays=_swapping_pays,
        blocks=3,
        in_order=_is_in_blocks,
    ),
    _of_fp8(
        tile=STREAM_K_TILE,
        schedule="stream_k",
        record=("h200_fp8.json", "mixtral_down/fp8_forward/random"),
        pays=lambda problem, target: stream_k_pays(problem, target, FP8_STREAM_K_LEAST_STEPS),
    ),
)

GATHERED_KERNELS = NONCONTRACTING_KERNELS[:1]
"""The table for products that read tokens in place."""

CONTRACTING_KERNELS = (
    _of_fp8(tile=DEFAULT_TILE, record=("h200_fp8.json", "mixtral_up/fp8_wgrad/random")),
)
"""The table for weight gradients."""

PAIRED_SCALED_KERNELS = (dataclasses.replace(CONTRACTING_KERNELS[0], out=FLOATS_16),)
"""The table for two gradients of one lhs: the kernel stores them transposed, in 16 bits only."""


def noncontracting(
    avals: Sequence[Any],
    params: Mapping[str, Any],
    op: str = "scaled_ragged_noncontracting",
    table: Sequence[TiledKernel] | None = None,
) -> Candidates[ScaledProblem]:
    """Returns the kernels for a `scaled_ragged_noncontracting`."""
    place = params.get("view", ())
    problem = ScaledProblem.of(
        op,
        without_scales(viewed(avals, VIEWED_ROWS, place)),
        params,
        lhs="mk",
        rhs="gnk" if params["transpose_rhs"] else "gkn",
        out="mn",
        scales=(params["lhs_scaling"], params["rhs_scaling"]),
        fast_accumulation=params["fast_accumulation"],
        view=place,
    )
    # FP8 tensor cores read both operands along the contracted dimension.
    form = dataclasses.replace(_kernel_form(problem), rhs="gnk")
    if is_invariant(params["implementation"]) and problem.scales[0].is_single:
        raise ValueError(
            f"{op}: lhs has one scale for all rows, so a row's result depends on other rows, which "
            "batch_invariant rules out; use one scale for each row or block, as the formats "
            "'fp8_row' and 'fp8_1x128' do"
        )
    return Candidates(problem, Table(table or NONCONTRACTING_KERNELS), form)


def gathered(avals: Sequence[Any], params: Mapping[str, Any]) -> Candidates[ScaledProblem]:
    """Returns the kernels for a `gathered_scaled_noncontracting`."""
    lhs, lhs_scale, rhs, rhs_scale, *groups, rows = avals
    copies = jax.ShapeDtypeStruct((rows.shape[0], lhs.shape[1]), lhs.dtype)
    operands = copies, lhs_scale, rhs, rhs_scale, *groups
    return noncontracting(operands, params, "gathered_scaled_noncontracting", GATHERED_KERNELS)


def contracting(
    avals: Sequence[Any],
    params: Mapping[str, Any],
    op: str = "scaled_ragged_contracting",
    table: Sequence[TiledKernel] | None = None,
) -> Candidates[ScaledProblem]:
    """Returns the kernels for a `scaled_ragged_contracting`."""
    place = params.get("view", ())
    problem = ScaledProblem.of(
        op,
        without_scales(viewed(avals, VIEWED_RHS, place)),
        params,
        lhs="bkr",
        rhs="bnr",
        out="gkn",
        scales=(formats.transposed_scaling(avals[1]), formats.transposed_scaling(avals[3])),
        m=params["num_rows"],
        view=place,
    )
    return Candidates(problem, Table(table or CONTRACTING_KERNELS), _kernel_form(problem))


def paired(avals: Sequence[Any], params: Mapping[str, Any]) -> Candidates[ScaledProblem]:
    """Returns one product of a `paired_scaled_contracting`, and the kernels for both together."""
    lhs, lhs_scale, first, first_scale, _, _, *groups = avals
    one = (lhs, lhs_scale, first, first_scale, *groups)
    return contracting(one, params, "paired_scaled_contracting", PAIRED_SCALED_KERNELS)


def reads_in_place(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether to bind a `gathered_scaled_noncontracting`, which reads rows in place, instead of
    copying rows for a product by any kernel."""
    lhs, *_, rows = avals
    candidates = gathered(avals, params)
    problem = candidates.problem
    return (
        _takes_first(candidates, params)
        and not _swapping_pays(problem)
        and problem.scales == (formats.ROW_BLOCKS, formats.MATRIX_BLOCKS)
        and is_static(*lhs.shape, *rows.shape)
        and 0 not in lhs.shape
        and not too_large_operands((lhs,))
        and cdiv(problem.k, BLOCK) % STEPS_OF_SCALES == 0
        and cdiv(problem.n, DEFAULT_TILE.tile_n) <= FP8_TILES_IN_PLACE
    )


def is_one_launch(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether to bind a `paired_scaled_contracting` instead of two products."""
    _, _, first, _, second, *_ = avals
    candidates = paired(avals, params)
    problem = candidates.problem
    return (
        _takes_first(candidates, params)
        and problem.scales == (formats.TRANSPOSED_COLUMNS, formats.TRANSPOSED_BLOCKS)
        and first.dtype == second.dtype
        and problem.n <= PAIRED_FP8_COLUMNS
    )


def _takes_first(candidates: Candidates[ScaledProblem], params: Mapping[str, Any]) -> bool:
    """Whether the first kernel can compute a product of unpadded arrays. This decides what is
    traced, before the device is known, so it follows from shapes alone."""
    problem = candidates.problem
    sizes = problem.num_groups, *problem.shape("mkng")
    return (
        params["implementation"] != "xla"
        and not candidates.unsupported
        and is_static(*sizes)
        and 0 not in sizes
        and params.get("tile") in (None, candidates.table.compiled[0].tile)
        and not copy_reason(problem, addressable_problem(candidates.form))
    )


def quantises_on_rows(rows: Any, columns: Any, groups: Any) -> bool:
    """Whether tokens are quantised after they are copied to `rows` rows of `groups` groups."""
    if not is_static(rows, columns, groups):
        return False
    return 0 < rows <= SWAPPED_MOST_ROWS * groups and rows * columns <= QUANTISED_ON_ROWS


def _kernel_form(problem: ScaledProblem) -> ScaledProblem:
    """Returns `problem` with dtypes that kernels have: at most one operand of float8_e5m2.

    If both operands are float8_e5m2, lhs becomes two arrays of float8_e4m3fn, whose products are
    added in float32: see `formats.split_e5m2`.
    """
    if not problem.lhs_dtype == problem.rhs_dtype == jnp.float8_e5m2:
        return problem
    return dataclasses.replace(
        problem, lhs_dtype=np.dtype(jnp.float8_e4m3fn), out_dtype=np.dtype(np.float32)
    )
