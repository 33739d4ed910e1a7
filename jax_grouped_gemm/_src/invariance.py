"""Batch invariance: the bits of a row's result depend neither on other rows nor on their number.

The parameter `implementation` of a primitive is then an `Invariant` instead of None or "cuda", so
that batch invariance reaches cotangents and the parts of composed operations, as `implementation`
does. Plans then take only kernels that are `in_order`. Products gather operands instead of
splitting a sum over devices. Operations that sum over rows, such as weight gradients, cannot be
invariant: `Op.per_row` says which operations can.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import jax


class Invariant(enum.Enum):
    """A parameter `implementation`: invariant where kernels run; REQUIRED refuses all else."""

    WHERE_KERNELS_RUN = "batch invariant"
    REQUIRED = "batch invariant, by kernels alone"


# Part of the key of JAX's caches: a jitted function is traced again inside.
_context = jax.make_user_context(False)

_INVARIANT = {None: Invariant.WHERE_KERNELS_RUN, "cuda": Invariant.REQUIRED}

RULE = "batch invariant: only kernels that sum along k in one order; no sum is cut, none is XLA's"
"""The words of `explain` in plans of products."""


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Context in which the bits of a row's results do not depend on the other rows of a call.

    The context covers all calls that this thread makes or traces inside, also in functions under
    `jax.jit` and in Flax layers. It covers gradients with respect to rows even if those are
    computed outside. A jitted function is traced and compiled again inside. The context can
    decorate a function.

        with jgg.batch_invariant():
            logits = model(tokens)

    It has the effect of `batch_invariant=True` for every function of this package with that
    argument, and also for `ragged_dot_general` if its rows are not contracted. The section "Batch
    invariance" of the page on semantics has the guarantees and the errors.

    Args:
      enabled: False switches batch invariance off inside the context.

    Raises:
      TypeError: `enabled` is no boolean.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled must be True or False, got {enabled!r}")
    with _context(enabled):
        yield


def is_enabled() -> bool:
    """Whether the innermost `batch_invariant` asks for batch invariance."""
    return _context.value


def is_invariant(implementation: Any) -> bool:
    """Whether a parameter `implementation` asks for batch invariance."""
    return isinstance(implementation, Invariant)


def invariant(implementation: Any) -> Any:
    """Returns `implementation` as a parameter that asks for batch invariance."""
    return _INVARIANT.get(implementation, implementation)


def without(implementation: Any) -> Any:
    """Returns the parameter for an operation that sums over rows, without batch invariance."""
    return {value: name for name, value in _INVARIANT.items()}.get(implementation, implementation)
