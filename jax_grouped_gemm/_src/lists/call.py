"""Makes the custom call of one launch of a kernel for lists of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.plan import TileConfig


def launch(
    target: str,
    operands: Sequence[jax.Array],
    c: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    tile: TileConfig,
    terms: int,
    workspace_bytes: int,
    in_place: Sequence[bool] | None = None,
    **attributes: Any,
) -> Sequence[jax.Array]:
    """Calls `target`, which may update c in place.

    Args:
      target: name of the custom call.
      operands: operands that the kernel reads.
      c: the last operands of the kernel, one for each result, or an empty list.
      results: shapes and dtypes.
      tile: kernel configuration.
      terms: how many products of float16 parts replace one product of float32. 0 for kernels that
        do not split operands; these take neither this attribute nor a workspace.
      workspace_bytes: size of the parts of float32 operands.
      in_place: for each c, whether the result overwrites it; None means all. If the program reads
        a c afterwards, XLA copies it first.
      **attributes: other attributes.

    Returns:
      The results.
    """
    workspace = []
    if terms:
        workspace = [jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8)]
        attributes["terms"] = np.int32(terms)
    attributes |= {name: np.int32(size) for name, size in tile.sizes().items()}
    call = jax.ffi.ffi_call(
        target,
        [*workspace, *results],
        input_output_aliases={
            len(operands) + i: len(workspace) + i
            for i in range(len(c))
            if in_place is None or in_place[i]
        },
    )
    return call(*operands, *c, has_c=bool(c), **attributes)[len(workspace) :]
