"""Batch invariance: the bits of a row's result depend neither on other rows nor on their number.

The parameter `implementation` of a batch-invariant primitive is an `Invariant` instead of None or
"cuda", so that cotangents and the parts of composed operations get it too. Plans then take only
kernels that are `in_order`. Products gather operands instead of splitting a sum over devices.
Operations that sum over rows, such as weight gradients, cannot be invariant. `Op.per_row` says
which operations can.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import jax


class Invariant(enum.Enum):
    """Values of `implementation` that ask for batch invariance.

    A program for a GPU raises if no kernel can run. With REQUIRED, any other program raises too.
    """

    WHERE_KERNELS_RUN = "batch invariant"
    REQUIRED = "batch invariant, by kernels alone"


# The context is part of the key of JAX's caches, so a jitted function is traced again inside it.
_context = jax.make_user_context(False)

_INVARIANT = {None: Invariant.WHERE_KERNELS_RUN, "cuda": Invariant.REQUIRED}

RULE = "batch invariant: only kernels that sum along k in one order and cut no sum, never XLA"
"""The text of `explain` for batch-invariant products."""


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Returns a context in which the bits of a row's results do not depend on other rows.

    The context covers all calls that this thread makes or traces inside, also in functions under
    `jax.jit` and in Flax layers. It covers gradients with respect to rows even if gradients are
    computed outside. A jitted function is traced and compiled again inside. The context can
    decorate a function.

        with jgg.batch_invariant():
            logits = model(tokens)

    It has the effect of `batch_invariant=True` on every function of this package that has this
    argument, and also on `ragged_dot_general` if its rows are not contracted. The section "Batch
    invariance" of the page on semantics has the guarantees and the errors.

    Args:
      enabled: False switches batch invariance off inside the context.

    Raises:
      TypeError: `enabled` is not a boolean.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True or False, got {enabled!r}")
    with _context(enabled):
        yield


def is_enabled() -> bool:
    """Returns whether the innermost `batch_invariant` asks for batch invariance."""
    return _context.value


def is_invariant(implementation: Any) -> bool:
    """Returns whether a parameter `implementation` asks for batch invariance."""
    return isinstance(implementation, Invariant)


def invariant(implementation: Any) -> Any:
    """Returns the `Invariant` for an `implementation` of None or "cuda"."""
    return _INVARIANT.get(implementation, implementation)


def without(implementation: Any) -> Any:
    """Returns the `implementation` from which `invariant` made an `Invariant`."""
    return {value: name for name, value in _INVARIANT.items()}.get(implementation, implementation)
