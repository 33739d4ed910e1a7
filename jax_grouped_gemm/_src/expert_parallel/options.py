"""Options of a layer over several devices, checked."""

from __future__ import annotations

from jax_grouped_gemm._src.arguments import checked_int

STRATEGIES = ("auto", "all_gather", "ragged_all_to_all")
COMBINES = ("auto", "psum_scatter", "all_to_all", "ppermute")
SAVES = ("x", "rows", "nothing")


def checked_factor(factor: float | None) -> float | None:
    """None or a positive number; a `ValueError` if it is neither."""
    if factor is None:
        return None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise ValueError(f"buffer_factor must be None or a positive number, got {factor!r}")
    return float(factor)


def checked_chunks(chunks: int | str, tokens: int) -> int:
    """A divisor of the tokens; one for "auto", since more have never been faster.

    Raises:
      TypeError: it is neither a string nor an integer.
      ValueError: it is no divisor, or another string.
    """
    if isinstance(chunks, str):
        if chunks == "auto":
            return 1
    elif (count := checked_int("chunks", chunks)) >= 1 and tokens % count == 0:
        return count
    raise ValueError(
        f"chunks must be 'auto' or a positive divisor of the {tokens} tokens of a device, got "
        f"{chunks!r}"
    )
