"""Checks the options of a layer over several devices."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Self

import numpy as np

from jax_grouped_gemm._src.arguments import checked_boolean, checked_choice, checked_int
from jax_grouped_gemm._src.invariance import is_enabled

Auto = Literal["auto"]
Strategy = Literal["all_gather", "ragged_all_to_all"]
Combine = Literal["all_to_all", "ppermute"]
Save = Literal["x", "rows", "nothing"]

STRATEGIES: tuple[Strategy, ...] = ("all_gather", "ragged_all_to_all")
COMBINES: tuple[Combine, ...] = ("all_to_all", "ppermute")
SAVES: tuple[Save, ...] = ("x", "rows", "nothing")
AUTO = ("auto",)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The options of `expert_parallel_mlp` that say how a layer is computed, "auto" if not chosen.

    Attributes:
      strategy, chunks, combine, overlap, save, buffer_factor, batch_invariant: see
        `expert_parallel_mlp`.
    """

    strategy: Strategy | Auto = "auto"
    chunks: int | Auto = "auto"
    combine: Combine | Auto = "auto"
    overlap: bool | Auto = "auto"
    save: Save | Auto = "auto"
    buffer_factor: float | None = None
    batch_invariant: bool = False

    @classmethod
    def checked(cls, tokens: int | None, **options: Any) -> Self:
        """Checks and returns the options of a layer.

        `tokens` is the number of tokens of a device, or None if it is not known yet.

        Raises:
          TypeError, ValueError: an option is invalid.
        """
        wanted = cls(**options)
        checked_choice("strategy", wanted.strategy, AUTO + STRATEGIES)
        checked_choice("combine", wanted.combine, AUTO + COMBINES)
        checked_choice("save", wanted.save, AUTO + SAVES)
        if wanted.overlap != "auto":
            checked_boolean("overlap", wanted.overlap)
        if checked_boolean("batch_invariant", wanted.batch_invariant) or is_enabled():
            wanted = dataclasses.replace(wanted, batch_invariant=True)
            _check_invariant(wanted)
        chunks = _checked_chunks(wanted.chunks, tokens)
        if chunks not in ("auto", 1) and wanted.overlap is True:
            raise ValueError(
                f"overlap must be False or 'auto' with chunks={chunks}, because chunks run one "
                "after the other to save memory"
            )
        return dataclasses.replace(
            wanted,
            chunks=chunks,
            buffer_factor=_checked_factor(wanted.buffer_factor),
        )


def _check_invariant(wanted: Wanted) -> None:
    """Raises a `ValueError` if a token's result would depend on other tokens or on the devices."""
    if wanted.buffer_factor is not None:
        raise ValueError(
            "buffer_factor must be None with batch_invariant: which rows are dropped depends on "
            f"other tokens, got {wanted.buffer_factor!r}"
        )
    sums = "adds up partial results of devices, but each row must travel by 'ragged_all_to_all'"
    if wanted.strategy == "all_gather":
        raise ValueError(
            f"strategy must be 'auto' or 'ragged_all_to_all' with batch_invariant: 'all_gather' "
            f"{sums}"
        )
    if wanted.combine != "auto":
        raise ValueError(
            f"combine must be 'auto' with batch_invariant, got {wanted.combine!r}, which {sums}"
        )


def _checked_factor(factor: float | None) -> float | None:
    """Returns None or a positive finite number; raises a `ValueError` otherwise."""
    if factor is None:
        return None
    is_number = isinstance(factor, int | float | np.integer | np.floating)
    if isinstance(factor, bool) or not is_number or not 0 < factor < 2**31:
        raise ValueError(
            f"buffer_factor must be None or a positive number below 2^31, got {factor!r}"
        )
    return float(factor)


def _checked_chunks(chunks: int | str, tokens: int | None) -> int | Auto:
    """Returns a divisor of the tokens, or "auto".

    Raises:
      TypeError: `chunks` is neither a string nor an integer.
      ValueError: `chunks` does not divide the tokens, or is another string.
    """
    if isinstance(chunks, str):
        if chunks == "auto":
            return "auto"
    elif (count := checked_int("chunks", chunks)) >= 1 and (tokens is None or tokens % count == 0):
        return count
    known = "" if tokens is None else f"{tokens} "
    raise ValueError(
        f"chunks must be 'auto' or a positive divisor of the {known}tokens of a device, got "
        f"{chunks!r}"
    )
