"""Arguments that are lists of matrices, stacks of matrices, and scales of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import as_array
from jax_grouped_gemm._src.lists.scaling import accumulator_dtype

Matrices = ArrayLike | Sequence[ArrayLike]
Scale = ArrayLike | Sequence[ArrayLike]
Results = jax.Array | list[jax.Array]


def is_one_stack(x: Matrices) -> bool:
    """Whether an operand is a single array, not a sequence."""
    return isinstance(x, (jax.Array, np.ndarray))


def entries_of(name: str, x: Matrices, is_stack: bool, first: str = "a") -> list[jax.Array]:
    """The matrices and stacks of an operand, which has the form of the operand called `first`."""
    if is_stack:
        x = as_array(name, x)
        if x.ndim != 3:
            raise ValueError(
                f"{name} must be a stack [g, n, k] or a sequence of matrices, got one array of "
                f"shape {x.shape}"
            )
        return [x]
    if not isinstance(x, Sequence) or not x:
        raise TypeError(
            f"{name} must be an array or a non-empty sequence of arrays, as {first} is, got {x!r}"
        )
    entries = [as_array(f"{name}[{i}]", entry) for i, entry in enumerate(x)]
    for i, entry in enumerate(entries):
        if entry.ndim not in (2, 3):
            raise ValueError(
                f"{name}[{i}] must be a matrix or a stack of matrices, got shape {entry.shape}"
            )
    return entries


def check_counts(operands: dict[str, list[jax.Array]]) -> None:
    """A `ValueError` unless all operands have as many entries as the first one."""
    first, *_ = operands
    for name, entries in operands.items():
        if len(entries) != len(operands[first]):
            raise ValueError(
                f"{name} has {len(entries)} entries, but {first} has {len(operands[first])}"
            )


def as_stack(x: jax.Array) -> jax.Array:
    """A matrix as a stack of one."""
    return x if x.ndim == 3 else x[None]


def like_entry(out: jax.Array, entry: jax.Array) -> jax.Array:
    """A stack of results in the form of the entry that it came from."""
    return out if entry.ndim == 3 else out[0]


def scales_of(
    name: str,
    scale: Scale,
    entries: list[jax.Array],
    is_stack: bool,
    result_dtype: np.dtype,
    may_be_complex: bool,
    first: str = "a",
    *,
    keep_single: bool = False,
) -> list[jax.Array]:
    """alpha or beta as an array [g] for each entry of the operand called `first`.

    With `keep_single`, a number for a whole stack stays one: [1]. XLA would write out [g] in a
    kernel of its own.
    """
    dtype = accumulator_dtype(result_dtype)
    if not may_be_complex:
        dtype = jnp.finfo(dtype).dtype
    if is_stack or not (isinstance(scale, Sequence) or jnp.ndim(scale)):
        scale = [scale] * len(entries)
    if len(scale) != len(entries):
        raise ValueError(f"{name} has {len(scale)} entries, but {first} has {len(entries)}")

    def broadcast(i, x, entry):
        x = jnp.asarray(x)
        g = entry.shape[0] if entry.ndim == 3 else 1
        if x.shape not in ((), (g,)[: entry.ndim - 2]):
            raise ValueError(
                f"{name} must be a scalar or have one element for each matrix, got shape "
                f"{x.shape} for entry {i} of shape {entry.shape}"
            )
        if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(f"{name} must be real here, got dtype {x.dtype}")
        one_for_all = keep_single and x.ndim == 0
        return jnp.broadcast_to(x.astype(dtype), (1 if one_for_all else g,))

    return [broadcast(i, x, entry) for i, (x, entry) in enumerate(zip(scale, entries, strict=True))]
