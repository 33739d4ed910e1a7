"""Plans of the FP8 operations: scaled ragged products and quantisers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv, is_static, round_up
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.fp8.formats import (
    BLOCK,
    COLUMN_ROWS,
    VIEWED_RHS,
    VIEWED_ROWS,
    Shape,
    block_maxima,
    quantized_blocks,
    quantized_groups,
    quantized_rows,
    viewed,
)
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    DEFAULT_TILE,
    KERNEL_RESULT_DTYPES,
    XLA,
    Kernel,
    Plan,
    TileConfig,
    TiledKernel,
)
from jax_grouped_gemm._src.ragged.plan import Candidates
from jax_grouped_gemm._src.ragged.problem import (
    RaggedProblem,
    addressable_problem,
    copy_reason,
    has_few_rows,
)
from jax_grouped_gemm._src.ragged.tiles import STREAM_K_TILE, stream_k_pays
from jax_grouped_gemm._src.sizes import too_large_operands

SWAPPED_TILE = TileConfig(tile_m=32, tile_n=128, cluster=1)

SWAPPED_MOST_ROWS = 16
"""Rows a group, on average, up to which the swapped tile is the faster one."""

PAIRED_FP8_COLUMNS = 256
"""Columns up to which two gradients of weights are faster as one launch, by 12 %
(docs/notes/fp8.md). With 512 or 768 that is as fast as two, and both operands are there until both
results are."""

FP8_TILES_IN_PLACE, STEPS_OF_SCALES = 3, 4
"""Tiles of columns up to which a product that reads tokens in place is faster than copies of them
(docs/notes/fp8.md), and steps whose scales it reads at once."""

LEAST_COPIES, PIECE_COLUMNS = 2, 16
"""Copies of a token from which on it is quantised before they are made, and what then is moved."""

QUANTISED_ON_ROWS = 2**22
"""Elements of groups of few rows up to which tokens are quantised on their rows, each as often as
it is on one: a kernel or two fewer, which copy values and scales of quantised tokens, for a byte or
three more of each element, which is in L2."""

FP8_STREAM_K_LEAST_STEPS = 96
"""Measured at 112 steps and 8.2 waves alone, where 7 % in steps were 4.5 % in time."""

NONCONTRACTING_KERNELS = (
    TiledKernel(tile=DEFAULT_TILE, record=("h200_fp8.json", "qwen3_up/fp8_forward/random")),
    TiledKernel(
        tile=SWAPPED_TILE,
        schedule="swapped",
        record=("h200_fp8.json", "decode_small/fp8_forward/random"),
        pays=lambda problem, target: has_few_rows(problem, SWAPPED_MOST_ROWS),
        blocks=3,
    ),
    TiledKernel(
        tile=STREAM_K_TILE,
        schedule="stream_k",
        record=("h200_fp8.json", "mixtral_down/fp8_forward/random"),
        pays=lambda problem, target: stream_k_pays(problem, target, FP8_STREAM_K_LEAST_STEPS),
    ),
)

GATHERED_KERNELS = NONCONTRACTING_KERNELS[:1]
"""The table for products that read tokens in place."""

CONTRACTING_KERNELS = (
    TiledKernel(tile=DEFAULT_TILE, record=("h200_fp8.json", "mixtral_up/fp8_wgrad/random")),
)
"""The table for weight gradients, of one rhs and of two."""


@dataclasses.dataclass(frozen=True)
class ScaledProblem(RaggedProblem):
    """Static description of one product of FP8 operands with scales.

    Attributes:
      lhs_scaling, rhs_scaling: which elements share a scale.
      b: blocks of 128 rows of a contracting product, each of one group; 0 otherwise.
      r: rows of such a block; 0 otherwise.
      fast_accumulation: whether tensor cores alone may add up products.
      view: of a flat array, what lhs, or of a contracting product rhs, is; see `ScaledView`.
    """

    lhs_scaling: str
    rhs_scaling: str
    b: int
    r: int
    fast_accumulation: bool = False
    view: Shape = ()

    def counts(self) -> dict[str, Any]:
        rows = {"the number of rows of all blocks of 128": self.b * BLOCK} if self.b else {}
        return super().counts() | rows

    def __str__(self) -> str:
        scaling = f"scaled by {self.lhs_scaling} and {self.rhs_scaling}"
        return f"{super().__str__()}, {scaling}"


def noncontracting(
    avals: Sequence[Any],
    params: Mapping[str, Any],
    op: str = "scaled_ragged_noncontracting",
    table: Sequence[TiledKernel] | None = None,
) -> Candidates[ScaledProblem]:
    """The kernels of a `scaled_ragged_noncontracting`."""
    place = params.get("view", ())
    problem = ScaledProblem.of(
        op,
        _without_scales(viewed(avals, VIEWED_ROWS, place)),
        params,
        lhs="mk",
        rhs="gnk" if params["transpose_rhs"] else "gkn",
        out="mn",
        lhs_scaling=params["lhs_scaling"],
        rhs_scaling=params["rhs_scaling"],
        b=0,
        r=0,
        fast_accumulation=params["fast_accumulation"],
        view=place,
    )
    # FP8 tensor cores read both operands along the contracted dimension.
    form = dataclasses.replace(_kernel_form(problem), rhs="gnk")
    return Candidates(problem, table or NONCONTRACTING_KERNELS, form, _unsupported_reason(problem))


def gathered(avals: Sequence[Any], params: Mapping[str, Any]) -> Candidates[ScaledProblem]:
    """The kernels of a `gathered_scaled_noncontracting`."""
    lhs, lhs_scale, rhs, rhs_scale, *groups, rows = avals
    copies = jax.ShapeDtypeStruct((rows.shape[0], lhs.shape[1]), lhs.dtype)
    operands = copies, lhs_scale, rhs, rhs_scale, *groups
    return noncontracting(operands, params, "gathered_scaled_noncontracting", GATHERED_KERNELS)


def contracting(
    avals: Sequence[Any], params: Mapping[str, Any], op: str = "scaled_ragged_contracting"
) -> Candidates[ScaledProblem]:
    """The kernels of a `scaled_ragged_contracting`."""
    place = params.get("view", ())
    problem = ScaledProblem.of(
        op,
        _without_scales(viewed(avals, VIEWED_RHS, place)),
        params,
        lhs="bkr",
        rhs="bnr",
        out="gkn",
        lhs_scaling=_rows_scaling(avals[1]),
        rhs_scaling=_rows_scaling(avals[3]),
        m=params["num_rows"],
        view=place,
    )
    return Candidates(
        problem, CONTRACTING_KERNELS, _kernel_form(problem), _unsupported_reason(problem)
    )


def paired(avals: Sequence[Any], params: Mapping[str, Any]) -> Candidates[ScaledProblem]:
    """The kernels of a `paired_scaled_contracting`, as those of one of its two products."""
    lhs, lhs_scale, first, first_scale, _, _, *groups = avals
    one = (lhs, lhs_scale, first, first_scale, *groups)
    return contracting(one, params, "paired_scaled_contracting")


def reads_in_place(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether to bind a `gathered_scaled_noncontracting`, which reads rows where they are, and not
    to copy them for a product that may have any kernel."""
    lhs, *_, rows = avals
    candidates = gathered(avals, params)
    problem = candidates.problem
    return (
        _takes_first(candidates, params)
        and not has_few_rows(problem, SWAPPED_MOST_ROWS)
        and (problem.lhs_scaling, problem.rhs_scaling) == ("1x128", "128x128")
        and is_static(*lhs.shape, *rows.shape)
        and 0 not in lhs.shape
        and not too_large_operands((lhs,))
        and cdiv(problem.k, BLOCK) % STEPS_OF_SCALES == 0
        and cdiv(problem.n, DEFAULT_TILE.tile_n) <= FP8_TILES_IN_PLACE
    )


def is_one_launch(avals: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Whether to bind a `paired_scaled_contracting`, and not two products."""
    _, _, first, _, second, *_ = avals
    candidates = paired(avals, params)
    problem = candidates.problem
    return (
        _takes_first(candidates, params)
        and (problem.lhs_scaling, problem.rhs_scaling) == ("column", "1x128")
        # The kernel stores results transposed, which 16 bits allow alone.
        and problem.out_dtype != np.dtype(np.float32)
        and first.dtype == second.dtype
        and problem.n <= PAIRED_FP8_COLUMNS
    )


def _takes_first(candidates: Candidates[ScaledProblem], params: Mapping[str, Any]) -> bool:
    """Whether the first kernel can compute a product of arrays as they are. Programs are traced by
    it, before it is known what they are compiled for, so that it follows from shapes alone."""
    problem = candidates.problem
    sizes = problem.num_groups, *problem.shape("mkng")
    return (
        params["implementation"] != "xla"
        and not candidates.unsupported
        and is_static(*sizes)
        and 0 not in sizes
        and params.get("tile") in (None, candidates.table[0].tile)
        and not copy_reason(problem, addressable_problem(candidates.form))
    )


def quantises_on_rows(rows: Any, columns: Any, groups: Any) -> bool:
    """Whether tokens are quantised on `rows` rows of `groups` groups, and not before."""
    if not is_static(rows, columns, groups):
        return False
    return 0 < rows <= SWAPPED_MOST_ROWS * groups and rows * columns <= QUANTISED_ON_ROWS


def _kernel_form(problem: ScaledProblem) -> ScaledProblem:
    """`problem` with dtypes that the kernels have: at most one operand of float8_e5m2.

    An lhs of float8_e5m2 next to such an rhs becomes two of float8_e4m3fn, whose products are added
    in float32: see `formats.split_e5m2`.
    """
    if not problem.lhs_dtype == problem.rhs_dtype == jnp.float8_e5m2:
        return problem
    return dataclasses.replace(
        problem, lhs_dtype=np.dtype(jnp.float8_e4m3fn), out_dtype=np.dtype(np.float32)
    )


def _rows_scaling(scale: Any) -> str:
    """Of rows in transposed blocks: a scale for each block and column, or for each column."""
    return "column" if scale.shape[-2] == 1 else "1x128"


def _without_scales(avals: Sequence[Any]) -> Sequence[Any]:
    lhs, _, rhs, _, group_sizes, group_offset = avals
    return lhs, rhs, group_sizes, group_offset


def _unsupported_reason(problem: ScaledProblem) -> str:
    if problem.out_dtype in KERNEL_RESULT_DTYPES:
        return ""
    return (
        f"no kernel for {problem.lhs_dtype} x {problem.rhs_dtype} -> {problem.out_dtype}: the "
        "kernels return bfloat16, float16 or float32"
    )


@dataclasses.dataclass(frozen=True)
class QuantizeProblem:
    """Static description of one call of a quantiser.

    Attributes:
      op: name of the primitive.
      shape: of what is quantised.
      dtype: of the values.
      power_of_two: whether scales are rounded up to powers of two.
    """

    op: str
    shape: Shape
    dtype: np.dtype
    power_of_two: bool

    def __str__(self) -> str:
        return f"{self.op} {list(self.shape)} -> {self.dtype}"


Results = tuple[jax.ShapeDtypeStruct | None, ...]
"""All that a quantiser can write, None for what was not asked for."""


@dataclasses.dataclass(frozen=True)
class QuantizePlan(Plan[QuantizeProblem]):
    """How one quantiser runs on a device of compute capability 9.0.

    Attributes:
      results: see `Results`.
    """

    results: Results = ()


def _forms(params: Mapping[str, Any], batch: Shape, *forms: tuple[Shape, Shape] | None) -> Results:
    """Values and scales of each form."""
    dtypes = np.dtype(params["dtype"]), jnp.float32
    return tuple(
        None if form is None else jax.ShapeDtypeStruct((*batch, *shape), dtype)
        for form in forms
        for shape, dtype in zip(form or ((), ()), dtypes, strict=True)
    )


def _arrays(dtype: Any, *shapes: Shape | None) -> Results:
    return tuple(None if shape is None else jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _blocks(params, x, columns=None):
    g, rows, cols = x.shape
    cols = columns or cols
    plain = quantized_blocks(g, rows, cols) if params["plain"] else None
    transposed = quantized_blocks(g, cols, rows) if params["transposed"] else None
    return _forms(params, (), plain, transposed)


def _ragged(params, x, group_sizes):
    m, cols = x.shape[-2:]
    plain = quantized_rows(m, cols) if params["plain"] else None
    groups = quantized_groups(m, cols, group_sizes.shape[-1]) if params["transposed"] else None
    return _forms(params, x.shape[:-2] or group_sizes.shape[:-1], plain, groups)


def _gathered(params, x, rows, _, group_sizes):
    form = quantized_groups(rows.shape[0], x.shape[1], group_sizes.shape[0])
    values, _scales = _forms(params, (), form)
    # Of a token that is copied several times, bytes are moved that were found once.
    room = None
    if is_static(*rows.shape, *x.shape) and rows.shape[0] >= LEAST_COPIES * x.shape[0]:
        shape = x.shape[0], round_up(x.shape[1], PIECE_COLUMNS)
        room = jax.ShapeDtypeStruct(shape, jnp.uint8)
    return values, room


def _matrix_maxima(params, x):
    of_rows, of_columns = block_maxima(*x.shape)
    shapes = of_rows if params["rows"] else None, of_columns if params["columns"] else None
    return _arrays(jnp.float32, *shapes)


def _channels(params, *operands):
    *_, row_scale, column_scale = operands
    (g, rows), columns = row_scale.shape, column_scale.shape[1]
    plain = (g, rows, columns) if params["plain"] else None
    transposed = (g, columns, rows) if params["transposed"] else None
    return _arrays(np.dtype(params["dtype"]), plain, transposed)


RESULTS: dict[str, Callable[..., Results]] = {
    "quantize_rows": lambda params, x: _forms(params, (), quantized_rows(*x.shape)),
    "quantize_tokens": lambda params, x, rows: _forms(
        params, (), quantized_rows(rows.shape[0], x.shape[1])
    ),
    "quantize_blocks": _blocks,
    "quantize_joined": lambda params, x, _: _blocks(params, x, 2 * round_up(x.shape[2], BLOCK)),
    "quantize_ragged": _ragged,
    "quantize_gathered": _gathered,
    "quantize_channels": _channels,
    "column_maxima": lambda params, x, _: _arrays(
        jnp.float32, (cdiv(x.shape[0], COLUMN_ROWS), x.shape[1])
    ),
    "matrix_maxima": _matrix_maxima,
}
"""What each quantiser writes, from its parameters and its operands' avals."""


def plan_quantizer(
    op: str, avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> QuantizePlan:
    """Plans the quantiser of that name from its operands' avals and its parameters."""
    results = RESULTS[op](params, *avals)
    dtype = np.dtype(params.get("dtype", np.float32))
    problem = QuantizeProblem(op, avals[0].shape, dtype, params.get("power_of_two", False))
    reason = too_large_operands((*avals, *(x for x in results if x is not None)))
    if params["implementation"] == "xla":
        reason = AS_ASKED
    kernel = XLA if reason else Kernel(op)
    return QuantizePlan(problem, kernel, reason, None if reason else problem, results=results)
