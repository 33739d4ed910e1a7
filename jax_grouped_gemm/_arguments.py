"""Arguments that the public functions have in common, checked and in one form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

IMPLEMENTATIONS = (None, "cuda", "reference")


def checked_implementation(implementation: str | None) -> str | None:
    """`implementation` if it is one, else a `ValueError`."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    return implementation


def as_array(name: str, x: ArrayLike) -> jax.Array:
    """`x` as a JAX array; a `TypeError` if it is no array at all."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be a JAX or NumPy array, got {type(x).__name__}: {x!r}")
    return jnp.asarray(x)


def canonical_precision(precision: Any) -> Any:
    """A hashable precision: None, an algorithm, a `jax.lax.Precision` or a pair of those."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    if isinstance(precision, (tuple, list)):
        return tuple(map(canonical_precision, precision))
    if precision is None or isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return precision
    if precision in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[precision]
    precision = lax.Precision(precision)
    # XLA:GPU lets HIGH use TF32. Only DEFAULT may: HIGH is accurate to float32 here.
    return lax.Precision.HIGHEST if precision == lax.Precision.HIGH else precision


def to_int32(x: jax.Array) -> jax.Array:
    """Converts integers of any dtype, those outside the range of int32 to its nearest end."""
    ours, theirs = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    return jnp.clip(x, max(ours.min, theirs.min), min(ours.max, theirs.max)).astype(jnp.int32)


def canonical_offset(group_offset: ArrayLike | None) -> jax.Array:
    """`group_offset` as int32 [1]; a `TypeError` or `ValueError` says what is wrong."""
    offset = jnp.asarray(0 if group_offset is None else group_offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"group_offset must be an integer, got dtype {offset.dtype}")
    if offset.shape not in ((), (1,)):
        raise ValueError(f"group_offset must be a scalar or have shape (1,), got {offset.shape}")
    return to_int32(offset).reshape(1)
