"""Plans of the quantisers."""

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
    Shape,
    quantized_blocks,
    quantized_groups,
    quantized_rows,
)
from jax_grouped_gemm._src.plan import AS_ASKED, XLA, Kernel, Plan
from jax_grouped_gemm._src.sizes import too_large_operands

LEAST_COPIES, PIECE_COLUMNS = 2, 16
"""If there are at least LEAST_COPIES rows for each token on average, tokens are quantised once, and
their bytes are copied, PIECE_COLUMNS at a time."""


Results = tuple[jax.ShapeDtypeStruct | None, ...]
"""All results of a quantiser, None for a result that is not asked for."""


@dataclasses.dataclass(frozen=True)
class QuantizeProblem:
    """Static description of one call of a quantiser.

    Attributes:
      op: name of the primitive.
      shape: shape of the array to quantise.
      dtype: dtype of the values.
      power_of_two: whether scales are rounded up to powers of two.
      results: see `Results`.
    """

    op: str
    shape: Shape
    dtype: np.dtype
    power_of_two: bool
    results: Results

    def __str__(self) -> str:
        return f"{self.op} {list(self.shape)} -> {self.dtype}"


QuantizePlan = Plan[QuantizeProblem]


def _forms(params: Mapping[str, Any], batch: Shape, *forms: tuple[Shape, Shape] | None) -> Results:
    """Returns the shapes and dtypes of values and scales of each form."""
    dtypes = np.dtype(params["dtype"]), jnp.float32
    return tuple(
        None if form is None else jax.ShapeDtypeStruct((*batch, *shape), dtype)
        for form in forms
        for shape, dtype in zip(form or ((), ()), dtypes, strict=True)
    )


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
    # The last result is room for quantised tokens, see LEAST_COPIES.
    room = None
    if is_static(*rows.shape, *x.shape) and rows.shape[0] >= LEAST_COPIES * x.shape[0]:
        shape = x.shape[0], round_up(x.shape[1], PIECE_COLUMNS)
        room = jax.ShapeDtypeStruct(shape, jnp.uint8)
    return values, room


RESULTS: dict[str, Callable[..., Results]] = {
    "quantize_rows": lambda params, x: _forms(params, (), quantized_rows(*x.shape)),
    "quantize_tokens": lambda params, x, rows: _forms(
        params, (), quantized_rows(rows.shape[0], x.shape[1])
    ),
    "quantize_blocks": _blocks,
    "quantize_joined": lambda params, x, _: _blocks(params, x, 2 * round_up(x.shape[2], BLOCK)),
    "quantize_ragged": _ragged,
    "quantize_gathered": _gathered,
    "column_maxima": lambda params, x, _: (
        jax.ShapeDtypeStruct((cdiv(x.shape[0], COLUMN_ROWS), x.shape[1]), jnp.float32),
    ),
}
"""The results of each quantiser, from its parameters and its operands' avals."""
KERNELS = {name: Kernel(name) for name in RESULTS}
"""The kernel of each quantiser."""


def plan_quantizer(
    op: str, avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> QuantizePlan:
    """Plans the quantiser `op` from its operands' avals and its parameters."""
    results = RESULTS[op](params, *avals)
    dtype, power_of_two = params.get("dtype", np.float32), params.get("power_of_two", False)
    problem = QuantizeProblem(op, avals[0].shape, np.dtype(dtype), power_of_two, results)
    reason = too_large_operands((*avals, *(x for x in results if x is not None)))
    if params["implementation"] == "xla":
        reason = AS_ASKED
    kernel = XLA if reason else KERNELS[op]
    return Plan(problem, kernel, reason, None if reason else problem)
