"""How quantised weights are multiplied: read packed by a kernel, or dequantised once a call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Prediction, Target, predict
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    TMA_ALIGNMENT_BYTES,
    XLA,
    Kernel,
    Plan,
    TileConfig,
    TiledKernel,
    always,
    check_sizes_do_not_matter,
    runnable,
    symbolic_sizes,
)
from jax_grouped_gemm._src.quantized import call
from jax_grouped_gemm._src.quantized.format import Format, Matrix
from jax_grouped_gemm._src.sizes import too_large_operands


@dataclasses.dataclass(frozen=True)
class PackedProblem:
    """A product of bfloat16 rows and packed matrices, or two products of the same rows.

    Attributes:
      format: of the matrices.
      shape: g, k and n.
      packed_bytes: of all matrices.
      names: of the arrays that they are stored in.
      rows: m.
      groups: G.
      products: 2 for gate and up, of matrices alike.
    """

    format: Format
    shape: tuple[int, ...]
    packed_bytes: int
    names: tuple[str, ...]
    rows: Any
    groups: Any
    products: int = 1

    @classmethod
    def of(cls, rhs: Any, rows: Any, groups: Any, products: int = 1) -> PackedProblem:
        """The problem of a `QuantizedArray` [g, k, n]."""
        names = tuple(rhs.arrays)
        return cls(rhs.format, rhs.shape, rhs.nbytes, names, rows, groups, products)

    @property
    def op(self) -> str:
        """Name of the primitive."""
        return "packed_ragged_dot"

    def predict(self, target: Target) -> Prediction:
        """For as many matrices as rows visit at most."""
        count, k, n = self.shape
        visited = min(count, self.rows)
        moved = self.products * self.packed_bytes * visited / count + 2 * self.rows * (k + n)
        return predict(
            np.dtype(jnp.bfloat16),
            multiply_adds=self.products * self.rows * k * n,
            utilization=1.0,
            num_bytes=moved,
            target=target,
        )

    @property
    def described(self) -> str:
        """Format, shape and bytes of the matrices."""
        return f"{self.format} {list(self.shape)} ({readable(self.packed_bytes)})"

    def __str__(self) -> str:
        rows = f"lhs bfloat16[{self.rows}, {self.shape[1]}]"
        return f"{self.op} {rows}, rhs {self.described}, {self.groups} groups"


STREAMED_ROWS = 8
DECODED_ROWS = dict(mxfp4=1024, int4=512, int8=512)
"""Mean rows of a group up to which each kernel is faster than the next one, and the last one than
dequantising once (docs/notes/packed.md)."""


def _streaming_pays(problem: PackedProblem, target: Any) -> bool:
    return problem.rows <= STREAMED_ROWS * problem.groups


def _decoding_pays(problem: PackedProblem, target: Any) -> bool:
    return problem.rows <= DECODED_ROWS[problem.format.name] * problem.groups


def _has_whole_vectors(problem: PackedProblem) -> bool:
    return problem.shape[1] * 2 % TMA_ALIGNMENT_BYTES == 0


PACKED_KERNELS = (
    TiledKernel(
        tile=TileConfig(tile_m=16, tile_n=128, cluster=1),
        schedule="streamed",
        blocks=call.STREAMED_BLOCKS,
        pays=_streaming_pays,
    ),
    TiledKernel(
        tile=TileConfig(tile_m=128, tile_n=256, cluster=1),
        schedule="decoded",
        runs=_has_whole_vectors,
        pays=_decoding_pays,
        in_order=always,
    ),
)
"""The table of what multiplies packed matrices. Where no row pays, they are dequantised."""


def packed_kernel(problem: PackedProblem, implementation: Any) -> TiledKernel | None:
    """The kernel that multiplies packed matrices, None if dequantised ones are faster.

    Which is faster depends on the number of rows, so that batch invariance takes a kernel wherever
    one can run.

    Programs are traced by it, before it is known what they are compiled for, so that it follows
    from shapes alone.
    """
    found = runnable(PACKED_KERNELS, problem, implementation)
    if is_invariant(implementation):
        return found[0] if found else None
    return next((kernel for kernel in found if kernel.pays(problem, None)), None)


def dequantized_reason(
    x: Any, products: Sequence[PackedProblem], operands: Any, precision: Any, implementation: Any
) -> str:
    """Why weights are dequantised before they are multiplied, empty if a kernel reads them packed.

    Args:
      x: the rows or tokens.
      products: each product.
      operands: all of them, a pytree.
      precision, implementation: parameters of the primitive.
    """
    if implementation == "xla":
        return AS_ASKED
    for product in products:
        if not reads(product.format):
            return f"no kernel multiplies {product.format}"
    if x.dtype != jnp.bfloat16:
        return f"kernels multiply packed weights by bfloat16, got {x.dtype}"
    if isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"the kernels do not implement precision={precision}"
    every = jax.tree.leaves(operands)
    for reason in (symbolic_sizes(every), too_large_operands(every)):
        if reason:
            check_sizes_do_not_matter("weights that are quantised", implementation, reason)
            return reason
    for product in products:
        if 0 in (product.rows, *product.shape):
            return "there is nothing to multiply"
        if packed_kernel(product, implementation) is None:
            k, name = product.shape[1], product.format.name
            if not _has_whole_vectors(product):
                any_number = is_invariant(implementation)
                rows = "any number of" if any_number else f"more than {STREAMED_ROWS}"
                return f"for {rows} rows a group, k={k} must be a multiple of 8"
            return f"that is faster for more than {DECODED_ROWS[name]} rows a group"
    return ""


def plan_packed(problem: PackedProblem, target: Target, implementation: Any) -> Plan[PackedProblem]:
    """The plan of a product that a kernel computes."""
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
    )


UNPACK = Kernel("unpack")
"""The kernel that writes packed matrices as bfloat16."""


@dataclasses.dataclass(frozen=True)
class DequantizeProblem:
    """Weights that are dequantised before they are multiplied.

    Attributes:
      format: of the weights.
      matrix: k and n of each.
      count: how many matrices.
      dtype: in which they are multiplied.
      packed_bytes: of the weights as they are stored.
      names: of the arrays that they are stored in.
    """

    format: Format
    matrix: Matrix
    count: int
    dtype: np.dtype
    packed_bytes: int
    names: tuple[str, ...]

    @property
    def op(self) -> str:
        """Name of the primitive."""
        return "dequantize_weights"

    @property
    def bytes(self) -> int:
        """Bytes of the dequantised weights."""
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
    """The plan of one call of the primitive."""
    packed_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in operands)
    problem = DequantizeProblem(
        params["format"],
        params["matrix"],
        operands[0].shape[0],
        params["dtype"],
        packed_bytes,
        params["names"],
    )
    notes = (params["reason"],) if params["reason"] else ()
    if reason := _not_unpacked(problem, operands):
        return Plan(problem, XLA, reason, notes=notes)
    return Plan(problem, UNPACK, kernel_problem=problem, notes=notes)


def reads(format: Format) -> bool:
    """Whether kernels read arrays of a format."""
    return format.name in call.FORMATS and format.layout == "packed"


def _not_unpacked(problem: DequantizeProblem, operands: Sequence[Any]) -> str:
    """Why no kernel dequantises, empty if one does."""
    if not reads(problem.format):
        return f"no kernel dequantises {problem.format}"
    if problem.dtype != jnp.bfloat16:
        return f"the kernel writes bfloat16, not {problem.dtype}"
    for reason in (symbolic_sizes(operands), too_large_operands(operands)):
        if reason:
            return reason
    return "" if problem.bytes else "there is nothing to dequantise"


def readable(size: int) -> str:
    """A number of bytes with a unit, 1.6 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} bytes"
