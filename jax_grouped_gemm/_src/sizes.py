"""The largest sizes that kernels take, and messages of plans for larger ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jax_grouped_gemm._src.arrays import is_static

LARGEST_SIZE = 2**29
"""The largest dimension of an operand, and the most rows and matrices of all batches: `kMostSize`
of csrc/largest_sizes.h, which says why."""

MOST_ROW_BATCHES = 65535
"""Batches of an operation that moves rows: `kMostRowBatches`."""


def too_large(sizes: Mapping[str, Any]) -> str:
    """Returns which of the named sizes no kernel takes, or an empty string.

    A symbolic size may be any size, so a kernel checks it when it runs.
    """
    found = [f"{name} = {x}" for name, x in sizes.items() if is_static(x) and x > LARGEST_SIZE]
    return f"the kernels count to 2^29, got {', '.join(found)}" if found else ""


def too_large_operands(avals: Iterable[Any]) -> str:
    """Returns which operands have a dimension that no kernel takes, or an empty string."""
    return next(
        (
            f"the kernels count to 2^29, got an operand {x.dtype}{list(x.shape)}"
            for x in avals
            if any(is_static(size) and size > LARGEST_SIZE for size in x.shape)
        ),
        "",
    )
