"""Custom calls of the kernels that read packed matrices.

The kernels read the arrays of a packed format as `pack.py` lays them out, each with one leading
dimension, the matrices: `values`, and `scales`, `channel_scales` and `zero_points` if the format
has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STREAMED = "jax_grouped_gemm.streamed_packed_dot.v1"
DECODED = "jax_grouped_gemm.decoded_packed_dot.v1"
UNPACK = "jax_grouped_gemm.unpack_matrices.v1"

FORMATS = ("mxfp4", "int4", "int8")

# The streaming kernel: a tile's rows and columns of the matrices, and thread blocks of a
# multiprocessor.
STREAMED_ROWS = 16
STREAMED_COLUMNS = 128
STREAMED_BLOCKS = 2

# The kernel that decodes: a tile's rows, and thread blocks of a multiprocessor for few of them.
FEW_ROWS = 32
FEW_ROWS_BLOCKS = 2
MANY_ROWS = 128
DECODED_COLUMNS = 256

_NO_ACTIVATION = {
    "function": np.int32(-1),
    **{name: np.float32(x) for name, x in dict(alpha=1, cubic=0, limit=math.inf, shift=0).items()},
}

Arrays = Mapping[str, jax.Array]


def workspace_bytes(rows: int, blocks: int) -> int:
    """Bytes of the partial sums of all thread blocks, for the kernel with tiles of so many rows."""
    slots = {STREAMED_ROWS: (STREAMED_COLUMNS,), FEW_ROWS: (DECODED_COLUMNS // 2,) * 2}
    sums = (rows * columns for columns in slots.get(rows, ()))
    return blocks * sum(np.dtype(np.float32).itemsize * count + 4 for count in sums)


def unpack(arrays: Arrays, format: str, group_size: int | None, matrix: tuple[int, int]) -> Any:
    """Returns the matrices [g, k, n] in bfloat16."""
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
    x: jax.Array,
    gate: Arrays,
    indices: tuple[jax.Array, jax.Array],
    *,
    up: Arrays | None = None,
    format: str,
    group_size: int | None,
    columns: int,
    rows: int,
    optional: Mapping[str, jax.Array | None],
    activation: Mapping[str, Any] | None = None,
    kept: bool = False,
    divisor: int = 1,
    zeroes_unowned: bool = True,
    workspace_bytes: int = 0,
    tile_rows: int = MANY_ROWS,
) -> list[jax.Array]:
    """Multiplies rows by packed matrices, with the epilogue of an expert MLP.

    Args:
      x: bfloat16 [tokens, k].
      gate: arrays of the matrices, or of the gate's matrices.
      indices: group_sizes [groups] and group_offset [1], int32.
      up: arrays of the matrices of up.
      format: one of `FORMATS`.
      group_size: number of elements along k that share a scale.
      columns: n of the matrices and of the result.
      rows: rows of the result.
      optional: "rows" int32 [rows], "b0", "b1", "bo" [g, n], "weights" float32 [rows] or
        "weights_of_pairs" float32 [tokens, divisor]; None where one is not there.
      activation: of gate and up, as attributes of the custom call; without it, the result is the
        product and `weights` times `bo`.
      kept: whether gate and up are results, too.
      divisor: `rows` are numbers of pairs, so many times those of tokens.
      zeroes_unowned: whether rows that no local group owns are zero, or undefined.
      workspace_bytes: of the kernel for groups of few rows; 0 for the other one, which wants k to
        be a multiple of 8.
      tile_rows: rows of that one's tiles, `MANY_ROWS`, or `FEW_ROWS` except for int8.

    Returns:
      bfloat16 [rows, columns]: the result, then gate and up if they are kept.
    """
    given = {name: a for name, a in gate.items() if name != "values"}
    given |= {f"up_{name}": a for name, a in (up or {}).items()}
    given |= {name: a for name, a in optional.items() if a is not None}
    one = jax.ShapeDtypeStruct((rows, columns), x.dtype)
    results = [one] * (1 + kept * (1 + (up is not None)))
    target, tile = DECODED, {"tile_m": np.int32(tile_rows)}
    if workspace_bytes:
        target, tile = STREAMED, {"tile_m": np.int32(FEW_ROWS)} if tile_rows == FEW_ROWS else {}
        results = [jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8), *results]
    found = jax.ffi.ffi_call(target, results)(
        x,
        gate["values"],
        *indices,
        *given.values(),
        optional=" ".join(given),
        zeroes_unowned=zeroes_unowned,
        divisor=np.int32(divisor),
        format=format,
        group_size=np.int32(group_size or 0),
        **(activation or _NO_ACTIVATION),
        **tile,
    )
    return list(found)[bool(workspace_bytes) :]
