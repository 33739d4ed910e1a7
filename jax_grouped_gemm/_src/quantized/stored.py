"""The codes of matrices in the tensors of checkpoints, and checks of these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_grouped_gemm._src.arguments import as_array
from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.quantized.format import Codes, Format, named

# --- The codes of one matrix, from its tensors


def of_bytes(stored: Any) -> Codes:
    packed, scales = stored
    return Codes(_nibbles(packed).T, scales.T)


def of_channels(stored: Any) -> Codes:
    values, scales = stored
    return Codes(values.T, scales[:, 0])


def of_blocks(stored: Any) -> Codes:
    values, scales = stored
    return Codes(values.T, scales.T)


def of_gptq(stored: Any) -> Codes:
    """Returns codes with zero points + 1, modulo 16; files store each zero point minus 1."""
    codes = of_gptq_v2(stored)
    zeros = codes.zero_points
    return codes._replace(zero_points=None if zeros is None else (zeros + 1) & 15)


def of_gptq_v2(stored: Any) -> Codes:
    words, scales, zeros = stored
    if zeros is not None:
        zeros = _words_along(zeros, 1)[:, : scales.shape[1]]  # the last word may have padding
    return Codes(_words_along(words, 0), scales, zeros)


def of_awq(stored: Any) -> Codes:
    words, scales, zeros = stored
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return Codes(_words_along(words, 1, order), scales, _words_along(zeros, 1, order))


def of_compressed(stored: Any) -> Codes:
    words, *of_groups = stored
    return of_gptq_v2((words.T, *of_groups))


def _words_along(words: jax.Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Unpacks eight codes of each word along `axis`. Nibble j of a word is its code `order[j]`."""
    unsigned = lax.bitcast_convert_type(words, jnp.uint32)
    places = [order.index(i) for i in range(8)]
    codes = [(unsigned >> 4 * place & 15).astype(jnp.uint8) for place in places]
    axis %= words.ndim
    shape = (*words.shape[:axis], 8 * words.shape[axis], *words.shape[axis + 1 :])
    return jnp.stack(codes, axis + 1).reshape(shape)


def _nibbles(packed: jax.Array) -> jax.Array:
    """Returns the codes [..., k] of bytes [..., k / 2], the low nibble first."""
    both = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


# --- Checks of tensors


def int4(size: int, zeros: jax.Array | None) -> Format:
    """Returns the format "int4" for groups of `size` rows, see `per_group`, and for zero points."""
    size = size if size in (32, 64) else 128
    return named("int4", group_size=size, zero_points=zeros is not None or None)


def matrices(name: str, x: ArrayLike, dtype: Any) -> jax.Array:
    """Returns `x` as an array; raises a `TypeError` unless it has `dtype` and two dimensions."""
    x = as_array(name, x)
    if x.dtype != dtype:
        raise TypeError(f"{name} must be {np.dtype(dtype)}, got {x.dtype} of shape {x.shape}")
    if x.ndim < 2:
        raise TypeError(f"{name} must have two dimensions at least, got {x.shape}")
    return x


def check_shape(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    """Raises a `TypeError` unless `x` has the shape."""
    if x.shape != shape:
        raise TypeError(f"{name} must have the shape {shape}, got {x.shape}")


def known_values(name: str, x: Any) -> np.ndarray:
    """Returns the values of a tensor that decides whether other tensors can be read."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{name} must not be traced, because its values are checked")
    return np.asarray(x)


def check_order(name: str, g_idx: Any, leading: Sequence[int], k: int, size: int) -> None:
    """Raises an error unless row i of all matrices [*leading, k, n] belongs to group i // size."""
    given = known_values(name, g_idx)
    if given.shape not in ((k,), (*leading, k)):
        raise TypeError(f"{name} must have the shape {(*leading, k)}, got {given.shape}")
    if (given != np.arange(k) // max(size, 1)).any():
        raise ValueError(
            f"{name} is not k // group_size. Act-order (desc_act) permutes the rows of each expert "
            "differently, so no single product can read all experts: quantise without act-order, "
            "or dequantise the checkpoint"
        )


def group_size(name: str, scales: jax.Array, shape: tuple[int, ...], *, whole: bool = False) -> int:
    """Returns how many rows of matrices share an element of `scales`.

    Args:
      name: name of the scales, for messages.
      scales: [..., groups, n].
      shape: [..., k, n].
      whole: whether all k rows may be one group.

    Raises:
      TypeError: the number is not possible, or `scales` are not floating.
    """
    *leading, k, n = shape
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating, got {scales.dtype} of shape {scales.shape}")
    groups = [(size, cdiv(k, size)) for size in (32, 64, 128)]
    if whole:
        groups.append((k, 1))
    for size, count in groups:
        if scales.shape == (*leading, count, n):
            return size
    raise TypeError(
        f"{name} must be [..., groups, {n}] for groups of 32, 64 or 128 of {k} rows of 4 bits"
        f"{', or for one group' * whole}, got {scales.shape}"
    )


def per_group(size: int, k: int, *arrays: jax.Array | None) -> list[jax.Array | None]:
    """Returns numbers of groups [..., groups, n]. One group of k rows becomes groups of 128."""
    if size in (32, 64, 128):
        return list(arrays)
    return [
        None if x is None else jnp.broadcast_to(x, (*x.shape[:-2], cdiv(k, 128), x.shape[-1]))
        for x in arrays
    ]
