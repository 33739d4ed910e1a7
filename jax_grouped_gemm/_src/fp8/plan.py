"""Plans of the FP8 operations: scaled ragged products and quantisers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv, is_static, round_up
from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.fp8.formats import (
    BLOCK,
    COLUMN_ROWS,
    SLICED_RHS,
    SLICED_ROWS,
    Shape,
    block_maxima,
    quantized_blocks,
    quantized_groups,
    quantized_rows,
    sliced,
)
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    DEFAULT_TILE,
    KERNEL_RESULT_DTYPES,
    Choice,
    Path,
    Plan,
    TileConfig,
    symbolic_sizes,
)
from jax_grouped_gemm._src.ragged.plan import plan_product
from jax_grouped_gemm._src.ragged.problem import RaggedProblem, has_few_rows
from jax_grouped_gemm._src.ragged.tiles import STREAM_K_TILE, stream_k_pays
from jax_grouped_gemm._src.sizes import too_large_operands

TRANSPOSED_TILE = TileConfig(tile_m=32, tile_n=128, cluster=1)

FP8_FEW_ROWS = 16
"""Rows a group, on average, up to which the transposed tile is the faster one."""

PAIRED_COLUMNS = 256
"""Columns up to which two gradients of weights are faster as one launch, by 12 %
(docs/notes/fp8.md). With 512 or 768 that is as fast as two, and both operands are there until both
results are."""

TILES_IN_PLACE, STEPS_OF_SCALES = 3, 4
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

NONCONTRACTING = (
    Choice(DEFAULT_TILE, record=("h200_fp8.json", "qwen3_up/fp8_forward/random")),
    Choice(
        TRANSPOSED_TILE,
        record=("h200_fp8.json", "decode_small/fp8_forward/random"),
        pays=lambda problem, target: has_few_rows(problem, FP8_FEW_ROWS),
        blocks=3,
    ),
    Choice(
        STREAM_K_TILE,
        record=("h200_fp8.json", "mixtral_down/fp8_forward/random"),
        pays=lambda problem, target: stream_k_pays(problem, target, FP8_STREAM_K_LEAST_STEPS),
    ),
)

CONTRACTING = (Choice(DEFAULT_TILE, record=("h200_fp8.json", "mixtral_up/fp8_wgrad/random")),)


@dataclasses.dataclass(frozen=True)
class ScaledProblem(RaggedProblem):
    """Static description of one product of FP8 operands with scales.

    Attributes:
      lhs_scaling, rhs_scaling: which elements share a scale.
      b: blocks of 128 rows of a contracting product, each of one group; 0 otherwise.
      r: rows of such a block; 0 otherwise.
      fast_accumulation: whether tensor cores alone may add up products.
      slice: of a flat array, what lhs, or of a contracting product rhs, is; see `SlicedPair`.
    """

    lhs_scaling: str
    rhs_scaling: str
    b: int
    r: int
    fast_accumulation: bool = False
    slice: Shape = ()

    @classmethod
    def noncontracting(
        cls,
        avals: Sequence[Any],
        params: Mapping[str, Any],
        op: str = "scaled_ragged_noncontracting",
    ) -> Self:
        """The problem of a `scaled_ragged_noncontracting` with operands of the given avals."""
        place = params.get("slice", ())
        return cls.of(
            op,
            _without_scales(sliced(avals, SLICED_ROWS, place)),
            params,
            lhs="mk",
            rhs="gnk" if params["transpose_rhs"] else "gkn",
            out="mn",
            lhs_scaling=params["lhs_scaling"],
            rhs_scaling=params["rhs_scaling"],
            b=0,
            r=0,
            fast_accumulation=params["fast_accumulation"],
            slice=place,
        )

    @classmethod
    def contracting(
        cls,
        avals: Sequence[Any],
        params: Mapping[str, Any],
        op: str = "scaled_ragged_contracting",
    ) -> Self:
        """The problem of a `scaled_ragged_contracting` with operands of the given avals."""
        place = params.get("slice", ())
        return cls.of(
            op,
            _without_scales(sliced(avals, SLICED_RHS, place)),
            params,
            lhs="bkr",
            rhs="bnr",
            out="gkn",
            lhs_scaling=_rows_scaling(avals[1]),
            rhs_scaling=_rows_scaling(avals[3]),
            m=params["num_rows"],
            slice=place,
        )

    def counts(self) -> dict[str, Any]:
        rows = {"the number of rows of all blocks of 128": self.b * BLOCK} if self.b else {}
        return super().counts() | rows

    def __str__(self) -> str:
        scaling = f"scaled by {self.lhs_scaling} and {self.rhs_scaling}"
        return f"{super().__str__()}, {scaling}"


ScaledPlan = Plan[ScaledProblem]


def plan_scaled_noncontracting(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> ScaledPlan:
    """Plans a `scaled_ragged_noncontracting` from its operands' avals and its parameters."""
    return _plan_noncontracting(ScaledProblem.noncontracting(avals, params), params, target)


def plan_gathered_noncontracting(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> ScaledPlan:
    """Plans a `gathered_scaled_noncontracting`: on the path "fused" where the product reads rows
    where they are, on "unfused" where they are to be copied."""
    lhs, lhs_scale, rhs, rhs_scale, *groups, rows = avals
    copies = jax.ShapeDtypeStruct((rows.shape[0], lhs.shape[1]), lhs.dtype)
    problem = ScaledProblem.noncontracting(
        (copies, lhs_scale, rhs, rhs_scale, *groups), params, "gathered_scaled_noncontracting"
    )
    found = _plan_noncontracting(problem, params, target)
    if found.path == "reference":
        return found
    reason = found.reason
    if (problem.lhs_scaling, problem.rhs_scaling) != ("1x128", "128x128"):
        reason = "the kernel takes scales of blocks"
    elif not is_static(*lhs.shape, *rows.shape, problem.n):
        reason = symbolic_sizes(avals)
    elif 0 in lhs.shape:
        reason = "there is nothing to read"
    elif too_large_operands((lhs,)):
        reason = too_large_operands((lhs,))
    elif cdiv(problem.k, BLOCK) % STEPS_OF_SCALES:
        reason = f"scales of k = {problem.k} are not a multiple of {STEPS_OF_SCALES}"
    elif cdiv(problem.n, DEFAULT_TILE.tile_n) > TILES_IN_PLACE:
        reason = f"copies and a product of {problem.n} columns are faster"
    elif found.tile not in (None, DEFAULT_TILE):
        reason = f"the product of tokens has no tile {found.tile}"
    return dataclasses.replace(found, path="unfused" if reason else "fused", reason=reason)


def quantises_on_rows(rows: Any, columns: Any, groups: Any) -> bool:
    """Whether tokens are quantised on `rows` rows of `groups` groups, and not before."""
    if not is_static(rows, columns, groups):
        return False
    return 0 < rows <= FP8_FEW_ROWS * groups and rows * columns <= QUANTISED_ON_ROWS


def _plan_noncontracting(
    problem: ScaledProblem, params: Mapping[str, Any], target: Target
) -> ScaledPlan:
    return plan_product(
        problem,
        params,
        target,
        table=NONCONTRACTING,
        # FP8 tensor cores read both operands along the contracted dimension.
        form=dataclasses.replace(_kernel_form(problem), rhs="gnk"),
        unsupported=_unsupported_reason(problem),
    )


def plan_scaled_contracting(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> ScaledPlan:
    """Plans a `scaled_ragged_contracting` from its operands' avals and its parameters."""
    return _plan_contracting(ScaledProblem.contracting(avals, params), params, target)


def plan_paired_contracting(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> ScaledPlan:
    """Plans a `paired_scaled_contracting`: as one of its two products, on the path "fused" where
    one kernel computes both, on "unfused" where two are to."""
    lhs, lhs_scale, first, first_scale, second, _, *groups = avals
    one = (lhs, lhs_scale, first, first_scale, *groups)
    problem = ScaledProblem.contracting(one, params, "paired_scaled_contracting")
    found = _plan_contracting(problem, params, target)
    if found.path == "reference":
        return found
    reason = found.reason
    if problem.lhs_scaling != "column" or problem.rhs_scaling == "column":
        reason = "the kernel takes scales of columns of lhs, of blocks of both rhs"
    elif problem.out_dtype == np.dtype(np.float32):
        reason = "the kernel stores results transposed, which 16 bits allow alone"
    elif first.dtype != second.dtype:
        reason = f"the kernel takes two rhs of one dtype, got {first.dtype} and {second.dtype}"
    elif problem.n > PAIRED_COLUMNS:
        reason = f"two products of {problem.n} columns are as fast, and may take less memory"
    elif found.tile not in (None, DEFAULT_TILE):
        reason = f"the product of both has no tile {found.tile}"
    return dataclasses.replace(found, path="unfused" if reason else "fused", reason=reason)


def _plan_contracting(
    problem: ScaledProblem, params: Mapping[str, Any], target: Target
) -> ScaledPlan:
    return plan_product(
        problem,
        params,
        target,
        table=CONTRACTING,
        form=_kernel_form(problem),
        unsupported=_unsupported_reason(problem),
    )


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


@dataclasses.dataclass(frozen=True)
class QuantizePlan(Plan[QuantizeProblem]):
    """How one quantiser runs on a device of compute capability 9.0: on the path "direct" if not by
    the reference.

    Attributes:
      results: all that the kernel can write, None for what was not asked for.
    """

    results: tuple[jax.ShapeDtypeStruct | None, ...] = ()


def plan_quantize_rows(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `quantize_rows` from its operands' avals and its parameters."""
    (x,) = avals
    return _plan_quantizer("quantize_rows", avals, params, (), [quantized_rows(*x.shape)])


def plan_quantize_tokens(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `quantize_tokens` from its operands' avals and its parameters."""
    x, rows = avals
    forms = [quantized_rows(rows.shape[0], x.shape[1])]
    return _plan_quantizer("quantize_tokens", avals, params, (), forms)


def plan_quantize_blocks(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `quantize_blocks` from its operands' avals and its parameters."""
    (x,) = avals
    g, rows, cols = x.shape
    forms = [
        quantized_blocks(g, rows, cols) if params["plain"] else None,
        quantized_blocks(g, cols, rows) if params["transposed"] else None,
    ]
    return _plan_quantizer("quantize_blocks", avals, params, (), forms)


def plan_quantize_joined(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `quantize_joined` from its operands' avals and its parameters."""
    x, _ = avals
    g, rows, cols = x.shape
    joined = 2 * round_up(cols, BLOCK)
    forms = [
        quantized_blocks(g, rows, joined) if params["plain"] else None,
        quantized_blocks(g, joined, rows) if params["transposed"] else None,
    ]
    return _plan_quantizer("quantize_joined", avals, params, (), forms)


def plan_quantize_ragged(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `quantize_ragged` from its operands' avals and its parameters."""
    x, group_sizes = avals
    m, cols = x.shape[-2:]
    batch = x.shape[:-2] or group_sizes.shape[:-1]
    forms = [
        quantized_rows(m, cols) if params["plain"] else None,
        quantized_groups(m, cols, group_sizes.shape[-1]) if params["transposed"] else None,
    ]
    return _plan_quantizer("quantize_ragged", avals, params, batch, forms)


def plan_column_maxima(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `column_maxima` from its operands' avals and its parameters."""
    x, _ = avals
    shape = cdiv(x.shape[0], COLUMN_ROWS), x.shape[1]
    return _plan_channels("column_maxima", avals, params, np.dtype(np.float32), (shape,))


def plan_matrix_maxima(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `matrix_maxima` from its operands' avals and its parameters."""
    (x,) = avals
    of_rows, of_columns = block_maxima(*x.shape)
    return _plan_channels(
        "matrix_maxima",
        avals,
        params,
        np.dtype(np.float32),
        (of_rows if params["rows"] else None, of_columns if params["columns"] else None),
    )


def plan_quantize_channels(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `quantize_channels` from its operands' avals and its parameters."""
    x, *_, row_scale, column_scale = avals
    (g, rows), columns = row_scale.shape, column_scale.shape[1]
    return _plan_channels(
        "quantize_channels",
        avals,
        params,
        np.dtype(params["dtype"]),
        (
            (g, rows, columns) if params["plain"] else None,
            (g, columns, rows) if params["transposed"] else None,
        ),
    )


def _plan_channels(
    op: str,
    avals: Sequence[Any],
    params: Mapping[str, Any],
    dtype: np.dtype,
    shapes: Sequence[Shape | None],
) -> QuantizePlan:
    x = avals[0]
    results = tuple(
        None if shape is None else jax.ShapeDtypeStruct(shape, dtype) for shape in shapes
    )
    problem = QuantizeProblem(op, x.shape, dtype, False)
    return _quantize_plan(problem, avals, params, results)


def plan_quantize_gathered(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200
) -> QuantizePlan:
    """Plans a `quantize_gathered` from its operands' avals and its parameters."""
    x, rows, _, group_sizes = avals
    forms = [quantized_groups(rows.shape[0], x.shape[1], group_sizes.shape[0])]
    found = _plan_quantizer("quantize_gathered", avals, params, (), forms)
    values, _scales = found.results
    # Of a token that is copied several times, bytes are moved that were found once.
    room = None
    if is_static(*rows.shape, *x.shape) and rows.shape[0] >= LEAST_COPIES * x.shape[0]:
        shape = x.shape[0], round_up(x.shape[1], PIECE_COLUMNS)
        room = jax.ShapeDtypeStruct(shape, jnp.uint8)
    return dataclasses.replace(found, results=(values, room))


def _plan_quantizer(
    op: str,
    avals: Sequence[Any],
    params: Mapping[str, Any],
    batch: Shape,
    forms: Sequence[tuple[Shape, Shape] | None],
) -> QuantizePlan:
    x = avals[0]
    dtype = np.dtype(params["dtype"])
    results = tuple(
        None if form is None else jax.ShapeDtypeStruct((*batch, *shape), kind)
        for form in forms
        for shape, kind in zip(form or ((), ()), (dtype, jnp.float32), strict=True)
    )
    problem = QuantizeProblem(op, x.shape, dtype, params["power_of_two"])
    return _quantize_plan(problem, avals, params, results)


def _quantize_plan(
    problem: QuantizeProblem,
    avals: Sequence[Any],
    params: Mapping[str, Any],
    results: tuple[jax.ShapeDtypeStruct | None, ...],
) -> QuantizePlan:
    if params["implementation"] == "reference":
        reason = AS_ASKED
    else:
        reason = too_large_operands((*avals, *(x for x in results if x is not None)))
    path: Path = "reference" if reason else "direct"
    return QuantizePlan(problem, path, reason, results=results)
