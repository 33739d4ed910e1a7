"""Rounding, and the dtype of sums."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike


def cdiv(a: Any, b: int) -> Any:
    """Divides integers, or arrays of them, none of them negative, and rounds up."""
    return (a + (b - 1)) // b


def round_up(a: Any, multiple: int) -> Any:
    """Returns the least multiple of `multiple` that is no less than `a`."""
    return cdiv(a, multiple) * multiple


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which to sum numbers of `dtype`, floating point or complex."""
    dtype = jnp.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize < 4 else dtype


def is_static(*sizes: Any) -> bool:
    """Whether all are numbers: `jax.export` takes symbolic dimensions too."""
    return not any(map(export.is_symbolic_dim, sizes))
