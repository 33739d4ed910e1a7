"""Refuses operands whose number of rows, columns or matrices is too large for int32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MOST = np.iinfo(np.int32).max
_WORDS = {1: ("elements",), 2: ("rows", "columns"), 3: ("matrices", "rows", "columns")}


def check_counts(
    function: str,
    ranks: Sequence[int] | None,
    operands: Sequence[Any],
    params: Mapping[str, Any],
) -> None:
    """Raises a `NotImplementedError` if an operand has too many rows, columns or matrices.

    Args:
      function: name of the function, with the names of its operands in parentheses if known.
      ranks: see `op.Op.operand_ranks`.
      operands: operands of the primitive. If none is int32, nothing is checked, because kernels
        then do not count in int32.
      params: parameters of the primitive. A `tree` has the operands' names.
    """
    if not any(x.dtype == jnp.int32 for x in operands):
        return
    for place, x in enumerate(operands):
        # Do not check a vector of values: such a vector is a buffer that several results share, and
        # kernels count its elements in 64 bits.
        if x.ndim == 1 and x.dtype != jnp.int32:
            continue
        for axis, size in enumerate(x.shape):
            if isinstance(size, int) and size > MOST:
                rank = x.ndim if ranks is None else ranks[place]
                words = ("batches",) * (x.ndim - rank) + _WORDS.get(rank, ())
                counted = words[axis] if axis < len(words) else f"elements along dimension {axis}"
                raise NotImplementedError(
                    f"{function.partition('(')[0]}: {_name(function, place, operands, params)} of "
                    f"shape {x.shape} has {size} {counted}, beyond the limit {MOST} (2^31 - 1) of "
                    "int32, in which kernels count"
                )


def _name(function: str, place: int, operands: Sequence[Any], params: Mapping[str, Any]) -> str:
    """Returns the name of an operand, or "operand" and its number if the name is not known."""
    names = function.rstrip(")").partition("(")[2].split(", ")
    if place < len(names) and names[place]:
        return names[place]
    if "tree" in params:
        tree = params["tree"].unflatten(range(len(operands)))
        path, _ = jax.tree_util.tree_leaves_with_path(tree)[place]
        return getattr(path[-1], "name", f"operand {place}")
    return f"operand {place}"
