"""Custom calls of the kernels that read packed matrices.

The kernels read the arrays of a packed format in the layout of `pack.py`: `values`, and `scales`,
`channel_scales` and `zero_points` if the format has them. Each array has one leading dimension, the
index of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.plan import Plan

STREAMED = "jax_grouped_gemm.streamed_packed_dot.v3"
DECODED = "jax_grouped_gemm.decoded_packed_dot.v3"
UNPACK = "jax_grouped_gemm.unpack_matrices.v3"

FORMATS = ("mxfp4", "int4", "int8", "fp8", "fp8_128x128")

# The streaming kernel: rows and columns of a tile, and thread blocks on a multiprocessor.
STREAMED_ROWS = 16
STREAMED_COLUMNS = 128
STREAMED_BLOCKS = 2

# The decoding kernel: rows of its three tiles, and thread blocks on a multiprocessor with the
# smallest tile.
SMALL_TILE_ROWS = 32
SMALL_TILE_BLOCKS = 2
LARGE_TILE_ROWS = 128
TALL_TILE_ROWS = 256

_NO_ACTIVATION = {
    "function": np.int32(-1),
    **{name: np.float32(x) for name, x in dict(alpha=1, cubic=0, limit=math.inf, shift=0).items()},
}

Arrays = Mapping[str, jax.Array]


def streamed_workspace_bytes(multiprocessors: int) -> int:
    """Returns the size of the partial sums of all thread blocks of the streaming kernel."""
    block = STREAMED_ROWS * STREAMED_COLUMNS * np.dtype(np.float32).itemsize + 4
    return STREAMED_BLOCKS * multiprocessors * block


def unpack(arrays: Arrays, format: str, group_size: int | None, matrix: tuple[int, int]) -> Any:
    """Returns packed matrices as bfloat16 [g, k, n]."""
    optional = {name: x for name, x in arrays.items() if name != "values"}
    values = arrays["values"]
    result = jax.ShapeDtypeStruct((values.shape[0], *matrix), jnp.bfloat16)
    return jax.ffi.ffi_call(UNPACK, result)(
        values,
        *optional.values(),
        optional=" ".join(optional),
        format=format,
        group_size=np.int32(group_size or 0),
    )


def dot(
    plan: Plan[Any],
    x: jax.Array,
    gate: Arrays,
    indices: tuple[jax.Array, jax.Array],
    optional: Mapping[str, jax.Array | None],
    *,
    up: Arrays | None = None,
    activation: Mapping[str, Any] | None = None,
    zeroes_unowned: bool = True,
) -> jax.Array:
    """Multiplies rows by packed matrices, with the epilogue of an expert MLP if it is asked for.

    Args:
      plan: the plan of the product.
      x: bfloat16 [tokens, k].
      gate: arrays of the matrices, or of the gate's matrices.
      indices: group_sizes [groups] and group_offset [1], int32.
      optional: "rows" int32 [rows], "b0", "b1", "bo" [g, n], "weights" float32 [rows]; absent or
        None if not needed.
      up: arrays of up's matrices.
      activation: attributes of the custom call for the activation of gate and up; without it, the
        result is the product plus `weights` times `bo`.
      zeroes_unowned: whether rows that no local group owns are zero (True) or undefined.

    Returns:
      bfloat16 [rows, columns].
    """
    problem, kernel = plan.launched
    given = {name: a for name, a in gate.items() if name != "values"}
    given |= {f"up_{name}": a for name, a in (up or {}).items()}
    given |= {name: a for name, a in optional.items() if a is not None}
    results = [jax.ShapeDtypeStruct((problem.rows, problem.shape[2]), x.dtype)]
    target, tile = DECODED, {"tile_m": np.int32(kernel.tile.tile_m)}
    if kernel.schedule == "streamed":
        target, tile = STREAMED, {}
        results = [jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8), *results]
    *_, out = jax.ffi.ffi_call(target, results)(
        x,
        gate["values"],
        *indices,
        *given.values(),
        optional=" ".join(given),
        zeroes_unowned=zeroes_unowned,
        divisor=np.int32(1),  # 1, because rows name tokens, not pairs
        format=problem.format.name,
        group_size=np.int32(problem.format.group_size or 0),
        **(activation or _NO_ACTIVATION),
        **tile,
    )
    return out
