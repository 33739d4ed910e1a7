"""Helpers for arrays: sizes, dtypes of sums and of slices, and mesh axes over which arrays vary.

Inside `jax.shard_map` the type of an array says over which manual axes it varies. A primitive whose
operands vary over different axes is ill-typed. JAX's own operations insert the missing casts, and
the operations of this package insert them with these helpers. The transpose of a cast is the `psum`
that the gradient of a replicated operand needs. So casts must be visible to autodiff, and the
lowering cannot insert them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import DTypeLike


def cdiv(a: Any, b: int) -> Any:
    """Divides non-negative integers, or arrays of them, and rounds up."""
    return (a + (b - 1)) // b


def round_up(a: Any, multiple: int) -> Any:
    """Returns the least multiple of `multiple` that is at least `a`."""
    return cdiv(a, multiple) * multiple


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which to sum numbers of `dtype`, floating point or complex."""
    dtype = jnp.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def is_static(*sizes: Any) -> bool:
    """Returns whether all sizes are numbers, not symbolic dimensions of `jax.export`."""
    return not any(map(export.is_symbolic_dim, sizes))


def pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pads the last dimensions of `x` with zeros up to `shape`."""
    batch_rank = x.ndim - len(shape)
    growth = [new - old for new, old in zip(shape, x.shape[batch_rank:], strict=True)]
    config = [(0, 0, 0)] * batch_rank + [(0, g, 0) for g in growth]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def whole_bytes_dtype(dtype: np.dtype) -> np.dtype:
    """Returns a dtype of whole bytes that holds `dtype`; XLA cannot slice smaller elements."""
    if not jnp.issubdtype(dtype, jnp.integer) and not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if (jnp.iinfo(dtype) if is_integer else jnp.finfo(dtype)).bits >= 8:
        return dtype
    if not is_integer:
        return np.dtype(jnp.bfloat16)
    return np.dtype(np.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else np.uint8)


def _bits_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which to slice and update arrays of `dtype`.

    On the CPU, XLA computes 8-bit and 16-bit floats in float32, and so it converts the whole array
    for every dynamic slice and update in a loop. It does not convert unsigned integers.
    """
    is_narrow_float = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(f"uint{8 * dtype.itemsize}") if is_narrow_float else dtype


def to_bits(x: jax.Array) -> jax.Array:
    """Returns `x` in the dtype in which to slice and update it."""
    return from_bits(x, _bits_dtype(x.dtype))


def from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Undoes `to_bits`: returns the array of `dtype` with the bits `x`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def zero_bits(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Returns `to_bits` of zeros of `dtype`."""
    return jnp.zeros(shape, _bits_dtype(dtype))


def map_batch(
    fn: Callable[..., jax.Array], operands: Sequence[jax.Array], ranks: Sequence[int]
) -> jax.Array:
    """Maps `fn` over the batch dimension of the operands that have more dimensions than `ranks`."""
    batched = [x.ndim > rank for x, rank in zip(operands, ranks, strict=True)]
    if not any(batched):
        return fn(*operands)

    def body(mapped):
        mapped = iter(mapped)
        return fn(*(next(mapped) if b else x for b, x in zip(batched, operands, strict=True)))

    return lax.map(body, [x for b, x in zip(batched, operands, strict=True) if b])


def stacked(operands: Sequence[jax.Array], dims: Sequence[int | None]) -> list[jax.Array]:
    """Returns operands with their mapped axes in front, broadcast where `dims` has None."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Returns the manual axes over which at least one of `arrays` varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def vary_over(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Casts `x` so that it varies over all of `axes` too."""
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def rows_or_zeros(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns x[rows] of x [T, D] and rows [m], zero where an index is not in [0, T)."""
    if 0 in x.shape:  # a gather from an empty array does not treat indices as out of range
        zeros = jnp.zeros((rows.shape[0], x.shape[1]), x.dtype)
        return vary_over(zeros, varying_axes(x, rows))
    return jnp.asarray(x).at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def align_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts all arrays so that each varies over all axes over which any of them varies."""
    axes = varying_axes(*arrays)
    return tuple(vary_over(x, axes) for x in arrays)
