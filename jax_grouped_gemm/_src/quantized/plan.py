"""Plans products with quantised weights: a kernel reads them packed, or each call dequantises."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Prediction, Target, predict
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    TMA_ALIGNMENT_BYTES,
    XLA,
    Formats,
    Kernel,
    Plan,
    TileConfig,
    TiledKernel,
    able,
    algorithm_reason,
    always,
    format_reason,
    passed_over,
    refusals,
    sizes_reason,
)
from jax_grouped_gemm._src.quantized import call
from jax_grouped_gemm._src.quantized.format import Format, Matrix


@dataclasses.dataclass(frozen=True)
class PackedProblem:
    """A product of rows and packed matrices, or two products of the same rows.

    Attributes:
      lhs, out: dtypes of the rows and of the result.
      format: format of the matrices.
      shape: g, k and n.
      packed_bytes: size of all matrices in bytes.
      names: names of the arrays of the format.
      rows: number of rows, m.
      groups: number of global groups, G.
      products: 2 for gate and up of equal shapes, 1 otherwise.
      is_bound: whether there may be far fewer rows than `rows`.
    """

    lhs: str
    out: str
    format: Format
    shape: tuple[int, ...]
    packed_bytes: int
    names: tuple[str, ...]
    rows: Any
    groups: Any
    products: int = 1
    is_bound: bool = False

    op = "packed_ragged_dot"

    @classmethod
    def of(cls, lhs: str, rhs: Any, out: str, *sizes: Any) -> PackedProblem:
        """Returns the problem for a `QuantizedArray` [g, k, n] and rows, groups and products."""
        return cls(lhs, out, rhs.format, rhs.shape, rhs.nbytes, tuple(rhs.arrays), *sizes)

    @property
    def formats(self) -> tuple[str, ...]:
        """See `Kernel.takes`."""
        return self.lhs, packed_format(self.format), self.out

    def predict(self, target: Target) -> Prediction:
        """Predicts the time if rows belong to as many different groups as possible."""
        count, k, n = self.shape
        visited = min(count, self.rows)
        moved = self.products * self.packed_bytes * visited / count + 2 * self.rows * (k + n)
        work = dict(multiply_adds=self.products * self.rows * k * n, num_bytes=moved)
        return predict(np.dtype(self.lhs), utilization=1.0, target=target, **work)

    def __str__(self) -> str:
        rows = f"lhs {self.lhs}[{self.rows}, {self.shape[1]}]"
        matrices = f"rhs {self.format} {list(self.shape)} ({readable(self.packed_bytes)})"
        return f"{self.op} {rows}, {matrices}, {self.groups} groups"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedKernel(TiledKernel):
    """A kernel that reads packed matrices.

    Attributes:
      most_rows: mean number of rows of a group up to which this kernel is faster than the next
        one in the table, or than dequantising if it is the last one (docs/notes/packed.md).
      unless: returns whether the next kernel is faster for a problem in spite of `most_rows`.
    """

    lhs: Formats = ("bfloat16",)
    most_rows: int
    unless: Callable[[PackedProblem], bool] = lambda problem: False


DECODED_COLUMNS = 256
SMALL_TILE_FORMATS = "mxfp4", "int4", "int8", "fp8"
"""Formats whose kernels have tiles of `call.SMALL_TILE_ROWS` rows."""

# Count thread blocks on an H200, because programs are traced before their device is known.
_SMALL_TILE_PLACES = Target().multiprocessors * call.SMALL_TILE_BLOCKS


def _is_fast_decoded(problem: PackedProblem) -> bool:
    """Returns whether a decoding kernel is faster than the streaming one, for few rows a group.

    Decoding kernels do not cut tiles along k, so some multiprocessors idle during the last tiles,
    and the longer k is, the longer they idle. If k is short, the streaming kernel loses more time
    by switching tiles. This choice was measured for whole layers only.
    """
    count, k, n = problem.shape
    tiles = min(count, problem.rows) * -(-problem.products * n // DECODED_COLUMNS)
    if k * 2 % TMA_ALIGNMENT_BYTES or tiles < _SMALL_TILE_PLACES:
        return False
    is_short = k <= 2048 and packed_format(problem.format) in SMALL_TILE_FORMATS
    return problem.rows >= problem.groups if is_short else problem.rows > 4 * problem.groups


def _is_tall_slower(problem: PackedProblem) -> bool:
    """Returns whether large tiles are faster than tall tiles, whose rows are gathered before."""
    is_wide = problem.products * problem.shape[2] >= 4096
    return problem.rows < 768 * problem.groups or problem.is_bound or not is_wide


def _refuses(problem: PackedProblem) -> str:
    return f"k={problem.shape[1]} must be a multiple of 8" * (problem.shape[1] % 8 > 0)


_decoding = functools.partial(
    PackedKernel,
    schedule="decoded",
    refuses=_refuses,
    in_order=always,  # tiles of all heights sum in the same order
)
_SMALL_TILE = TileConfig(call.SMALL_TILE_ROWS, DECODED_COLUMNS, cluster=1)
_LARGE_TILE = TileConfig(call.LARGE_TILE_ROWS, DECODED_COLUMNS, cluster=1)
TALL_TILE = TileConfig(call.TALL_TILE_ROWS, DECODED_COLUMNS // 2, cluster=2)
"""The tile whose kernels do not read rows of tokens in place."""
PACKED_KERNELS = (
    PackedKernel(
        tile=TileConfig(tile_m=16, tile_n=128, cluster=1),
        schedule="streamed",
        rhs=call.FORMATS,
        blocks=call.STREAMED_BLOCKS,
        most_rows=8,
        unless=_is_fast_decoded,
    ),
    _decoding(
        tile=_SMALL_TILE, blocks=call.SMALL_TILE_BLOCKS, rhs=SMALL_TILE_FORMATS, most_rows=24
    ),
    _decoding(
        tile=TALL_TILE,
        rhs=("mxfp4", "fp8_128x128"),
        refuses=lambda x: _refuses(x) or "only gate and up have tall tiles" * (x.products == 1),
        most_rows=2048,
        unless=_is_tall_slower,
    ),
    _decoding(tile=_LARGE_TILE, rhs=call.FORMATS, most_rows=2048),
)
"""The kernels for packed matrices. If none pays for a problem, matrices are dequantised."""


def packed_kernel(problem: PackedProblem, implementation: Any) -> PackedKernel | None:
    """Returns the kernel that multiplies packed matrices, None to dequantise them first.

    The choice follows from shapes alone, because a program is traced before its device is known.
    With batch invariance, a kernel is chosen whenever one can run, for any number of rows.
    """
    found = able(refusals(PACKED_KERNELS, problem, implementation))
    paying = (
        kernel
        for kernel in found
        if problem.rows <= kernel.most_rows * problem.groups and not kernel.unless(problem)
    )
    return next(paying, found[-1] if found and is_invariant(implementation) else None)


def dequantized_reason(
    products: Sequence[PackedProblem], operands: Any, precision: Any, implementation: Any
) -> str:
    """Returns why weights are dequantised first, empty if a kernel reads them packed.

    Args:
      products: the products of the operation.
      operands: a pytree of all operands.
      precision, implementation: parameters of the primitive.
    """
    if implementation == "xla":
        return AS_ASKED
    formats = (format_reason(PACKED_KERNELS, product) for product in products)
    if reason := next(filter(None, formats), algorithm_reason(precision)):
        return reason
    if reason := sizes_reason("quantised weights", jax.tree.leaves(operands), implementation):
        return reason
    for product in products:
        if 0 in (product.rows, *product.shape):
            return "there is nothing to multiply"
        if packed_kernel(product, implementation) is None:
            taking = [kernel for kernel in PACKED_KERNELS if kernel.takes(*product.formats)]
            if reason := taking[-1].refuses(product):
                any_number = is_invariant(implementation)
                rows = "any number of" if any_number else f"more than {taking[0].most_rows}"
                return f"for {rows} rows a group, {reason}"
            return f"that is faster for more than {taking[-1].most_rows} rows a group"
    return ""


def plan_packed(problem: PackedProblem, target: Target, implementation: Any) -> Plan[PackedProblem]:
    """Returns the plan of a product for which `packed_kernel` returns a kernel."""
    # The problem may be a device's slice. It has no more rows a group, so a kernel pays for it too.
    kernel = packed_kernel(problem, implementation)
    assert kernel is not None
    streams = kernel.schedule == "streamed"
    return Plan(
        problem,
        kernel,
        kernel_problem=problem,
        grid=kernel.places(target),
        workspace_bytes=streams * call.streamed_workspace_bytes(target.multiprocessors),
        prediction=problem.predict(target),
        passed_over=passed_over(refusals(PACKED_KERNELS, problem, implementation), kernel),
    )


UNPACKING = Kernel("unpack", lhs=call.FORMATS, out=("bfloat16",))
"""The kernel that writes packed matrices as bfloat16."""


@dataclasses.dataclass(frozen=True)
class DequantizeProblem:
    """Weights that are dequantised before they are multiplied.

    Attributes:
      format: format of the weights.
      matrix: k and n of each matrix.
      count: number of matrices.
      dtype: dtype of the dequantised weights.
      packed_bytes: size of the stored weights in bytes.
      names: names of the stored arrays.
    """

    format: Format
    matrix: Matrix
    count: int
    dtype: np.dtype
    packed_bytes: int
    names: tuple[str, ...]

    op = "dequantize_weights"

    @property
    def formats(self) -> tuple[str, ...]:
        """See `Kernel.takes`."""
        return (packed_format(self.format),) * 2 + (self.dtype.name,)

    @property
    def bytes(self) -> int:
        """Size of the dequantised weights in bytes."""
        return self.count * math.prod(self.matrix) * self.dtype.itemsize

    def __str__(self) -> str:
        shape = self.count, *self.matrix
        if not is_static(*shape):
            return f"dequantises weights first: {self.format} {list(shape)} to {self.dtype}"
        return (
            f"dequantises {readable(self.bytes)} of weights first: {self.format} {list(shape)}, "
            f"{readable(self.packed_bytes)}, to {self.dtype}"
        )


def plan_dequantize(
    operands: Sequence[Any], params: Mapping[str, Any], target: Target
) -> Plan[DequantizeProblem]:
    """Returns the plan of `DEQUANTIZE` for these operands and parameters."""
    packed_bytes = sum(x.size * x.dtype.itemsize for x in operands)
    matrices = params["format"], params["matrix"], operands[0].shape[0], params["dtype"]
    problem = DequantizeProblem(*matrices, packed_bytes, params["names"])
    notes = (params["reason"],) if params["reason"] else ()
    reason = format_reason([UNPACKING], problem)
    matrix = jax.ShapeDtypeStruct(params["matrix"], params["dtype"])
    reason = reason or sizes_reason(problem.op, (*operands, matrix), params["implementation"])
    if reason or not problem.bytes:
        return Plan(problem, XLA, reason or "there is nothing to dequantise", notes=notes)
    return Plan(problem, UNPACKING, kernel_problem=problem, notes=notes)


def packed_format(format: Format) -> str:
    """Returns the name of a format, followed by its layout unless the layout is "packed"."""
    return format.name if format.layout == "packed" else f"{format.name} in {format.layout}"


def readable(size: int) -> str:
    """Returns a number of bytes with a unit, such as 1.6 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} bytes"
