"""Checks arguments that are lists or stacks of matrices, and their scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import as_array, canonical_dtype

Stack = jax.Array | np.ndarray
Matrices = Stack | Sequence[Stack]
Scale = ArrayLike | Sequence[ArrayLike | Sequence[ArrayLike]]
Results = jax.Array | list[jax.Array]


@dataclasses.dataclass(frozen=True)
class MatrixLists:
    """The operands of one call: lists of equal length, whose entries are matrices and stacks.

    Attributes:
      entries: the lists by name: the factors and, if given, "c". Results have the form of the
        first list.
      is_stack: whether each operand is one stack, rather than a sequence.
    """

    entries: dict[str, list[jax.Array]]
    is_stack: bool

    @classmethod
    def of(cls, factors: dict[str, Matrices], c: Matrices | None) -> MatrixLists:
        """Checks the factors by name, and c.

        Raises:
          TypeError: an operand is neither an array nor a sequence of matrices and stacks.
          ValueError: lists differ in length.
        """
        operands = factors if c is None else {**factors, "c": c}
        first, *_ = operands
        is_stack = isinstance(operands[first], Stack)
        entries = {name: _entries(name, x, is_stack, first) for name, x in operands.items()}
        for name, xs in entries.items():
            _check_count(name, len(xs), first, len(entries[first]))
        return cls(entries, is_stack)

    @property
    def first(self) -> str:
        """The name of the operand that sets the form of other operands and of the results."""
        return next(iter(self.entries))

    def __len__(self) -> int:
        return len(self.entries[self.first])

    def dtypes(self, preferred: DTypeLike | None) -> tuple[np.dtype, np.dtype]:
        """Returns the dtype in which factors are multiplied, and that of the results."""
        factors = {name: xs for name, xs in self.entries.items() if name != "c"}
        dtype = np.dtype(jnp.result_type(*(x for xs in factors.values() for x in xs)))
        result_dtype = np.dtype(jnp.result_type(dtype, *self.entries.get("c", ())))
        if preferred is not None:
            result_dtype = canonical_dtype("preferred_element_type", preferred)
        for name, x in ((" and ".join(factors), dtype), ("the results", result_dtype)):
            if not jnp.issubdtype(x, jnp.inexact):
                raise TypeError(f"{name} must be floating point or complex, got dtype {x}")
        if is_complex(dtype) and not is_complex(result_dtype):
            raise TypeError(f"complex operands need complex results, got dtype {result_dtype}")
        return dtype, result_dtype

    def stacks(self, name: str, dtype: np.dtype) -> list[jax.Array]:
        """Returns an operand's entries as stacks of `dtype`, a matrix as a stack of one."""
        entries = (x.astype(dtype) for x in self.entries[name])
        return [x if x.ndim == 3 else x[None] for x in entries]

    def scales(
        self, name: str, scale: Scale, dtype: np.dtype, *, keep_single: bool = False
    ) -> list[jax.Array]:
        """Returns alpha or beta as an array [g] of `dtype` for each entry.

        With `keep_single`, a number for a whole stack stays [1], because XLA would write out [g] in
        a separate kernel.
        """
        scales: Sequence[Any] = [scale] * len(self)
        if not self.is_stack and isinstance(scale, Sequence):
            scales = scale
        elif not self.is_stack and isinstance(scale, Stack) and scale.ndim:
            scales = list(scale)
        _check_count(name, len(scales), self.first, len(self))
        entries = self.entries[self.first]
        arrays = []
        for i, (x, entry) in enumerate(zip(scales, entries, strict=True)):
            x = _scale_array(name, x)
            g = entry.shape[0] if entry.ndim == 3 else 1
            if x.shape not in ((), (g,)[: entry.ndim - 2]):
                raise TypeError(
                    f"{name} must be a scalar or have one element for each matrix, got shape "
                    f"{x.shape} for entry {i} of shape {entry.shape}"
                )
            if is_complex(x.dtype) and not is_complex(dtype):
                raise TypeError(f"{name} must be real here, got dtype {x.dtype}")
            one_for_all = keep_single and x.ndim == 0
            arrays.append(jnp.broadcast_to(x.astype(dtype), (1 if one_for_all else g,)))
        return arrays

    def results(self, outs: Sequence[jax.Array]) -> Results:
        """Returns stacks of results in the form of the first operand."""
        entries = self.entries[self.first]
        outs = [out if x.ndim == 3 else out[0] for out, x in zip(outs, entries, strict=True)]
        return outs[0] if self.is_stack else outs


def is_number(x: Any) -> TypeGuard[complex]:
    """Whether a scale is a Python or NumPy number, known when the function is traced."""
    return isinstance(x, (int, float, complex, np.number)) and not isinstance(x, jax.Array)


def check_beta(beta: Scale, c: Matrices | None) -> None:
    """Raises a `ValueError` if there is a `beta` but no `c` to scale."""
    if c is None and not (is_number(beta) and beta == 0):
        raise ValueError(f"beta must be zero if c is None, got beta={beta!r}")


def is_complex(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def _entries(name: str, x: Matrices, is_stack: bool, first: str) -> list[jax.Array]:
    """Returns the matrices and stacks of an operand, which must have the form of `first`."""
    if is_stack:
        x = as_array(name, x)
        if x.ndim != 3:
            raise TypeError(
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
            raise TypeError(
                f"{name}[{i}] must be a matrix or a stack of matrices, got shape {entry.shape}"
            )
    return entries


def _check_count(name: str, count: int, first: str, expected: int) -> None:
    if count != expected:
        raise ValueError(f"{name} has {count} entries, but {first} has {expected}")


def _scale_array(name: str, x: Any) -> jax.Array:
    if isinstance(x, Sequence) and x and not isinstance(x, str):
        scales = [_scale_array(name, entry) for entry in x]
        if not any(scale.ndim for scale in scales):
            return jnp.stack(scales)
    if not (is_number(x) or isinstance(x, (jax.Array, np.ndarray))):
        raise TypeError(f"{name} must be a number, an array or a sequence of these, got {x!r}")
    return jnp.asarray(x)
