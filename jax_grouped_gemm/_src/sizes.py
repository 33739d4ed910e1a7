"""The largest sizes that kernels take, and why plans refuse larger sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax_grouped_gemm._src.arrays import is_static

LARGEST_SIZE = 2**29
"""The limit for each dimension of an operand, and for the rows and matrices of all batches. It is
`kMostSize` of csrc/largest_sizes.h, which explains it."""

MOST_ROW_BATCHES = 65535
"""The limit for the batches of an operation that moves rows, `kMostRowBatches` in C++."""


_WORDS = {"m": "rows (m)", "k": "columns (k)", "n": "columns (n)", "g": "matrices (g)"}


def too_large(sizes: Mapping[str, Any]) -> str:
    """Returns which of the named sizes no kernel takes, or an empty string.

    It does not check symbolic sizes. Kernels check them when they run.
    """
    large = ((name, x) for name, x in sizes.items() if is_static(x) and x > LARGEST_SIZE)
    found = ", ".join(f"{_WORDS.get(name, name)} = {x}" for name, x in large)
    return f"the kernels count to 2^29, got {found}" if found else ""


def too_large_operands(avals: Iterable[Any]) -> str:
    """Returns which operands have a dimension that no kernel takes, or an empty string."""
    large = (x for x in avals if any(is_static(n) and n > LARGEST_SIZE for n in x.shape))
    text = "the kernels count to 2^29, got an operand"
    return next((f"{text} {x.dtype}{list(x.shape)}" for x in large), "")
