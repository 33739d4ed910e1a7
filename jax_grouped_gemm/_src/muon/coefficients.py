"""Coefficients of Newton-Schulz iterations, and restarts of Gram Newton-Schulz."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Triple = tuple[float, float, float]
Coefficients = str | Sequence[float] | Sequence[Sequence[float]]

CLASSIC: Triple = (3.4445, -4.7750, 2.0315)

DION: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Rounding can lift singular values above one, where the polynomials are not valid.
_SAFETY = 1.05
POLAR_EXPRESS: tuple[Triple, ...] = tuple(
    (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)

# "standard" is Optax's name of the classic coefficients.
NAMED: dict[str, Triple | tuple[Triple, ...]] = {
    "classic": CLASSIC,
    "standard": CLASSIC,
    "dion": DION,
    "polar_express": POLAR_EXPRESS,
}

# Rounding to 16 bits gives Gram matrices negative eigenvalues, which more steps would blow up.
MOST_STEPS_OF_SEGMENT = 3


def table(coefficients: Coefficients) -> np.ndarray:
    """Returns one triple [3], or one for each step [steps, 3].

    Raises:
      ValueError: `coefficients` is neither a known name nor triples.
    """
    if isinstance(coefficients, str):
        if coefficients not in NAMED:
            raise ValueError(f"coefficients must be one of {sorted(NAMED)}, got {coefficients!r}")
        coefficients = NAMED[coefficients]
    try:
        triples = np.asarray(coefficients, np.float64)
    except (TypeError, ValueError):
        triples = np.empty(0)
    if triples.ndim not in (1, 2) or triples.shape[-1] != 3:
        raise ValueError(
            "coefficients must be three numbers, three for each iteration, or one of "
            f"{sorted(NAMED)}, got {coefficients!r}"
        )
    return triples


def iterations(coefficients: Coefficients, steps: Any) -> tuple[list[Triple], Any]:
    """Returns a triple for each step, or one triple if `steps` is traced, and the number of steps.

    Raises:
      ValueError: `coefficients` are not triples, or `steps` is negative or not an integer.
    """
    triples = table(coefficients)
    if triples.ndim == 2:
        return [(a, b, c) for a, b, c in triples.tolist()], len(triples)
    a, b, c = triples.tolist()
    if isinstance(steps, jax.Array) and jnp.issubdtype(steps.dtype, jnp.integer):
        return [(a, b, c)], steps
    if not isinstance(steps, int | np.integer) or isinstance(steps, bool) or steps < 0:
        raise ValueError(f"steps must be an integer that is not negative, got {steps!r}")
    return [(a, b, c)] * int(steps), int(steps)


def segments(
    triples: Sequence[Triple], restarts: Sequence[int] | None, dtype: np.dtype
) -> list[Sequence[Triple]]:
    """Returns the triples of each segment between restarts of Gram Newton-Schulz.

    Args:
      triples: triples of all steps.
      restarts: the steps after which the iteration restarts. None means two steps a segment, but
        three in the first segment if the number of steps is odd. Three in the last segment would
        take equally long, but be five times less accurate.
      dtype: dtype of the iteration.

    Raises:
      ValueError: `restarts` do not rise, lie outside the iteration, or leave a segment that is
        too long for `dtype`.
    """
    steps = len(triples)
    if restarts is None:
        restarts = range(2 + steps % 2, steps, 2)
    if isinstance(restarts, str) or not isinstance(restarts, Sequence):
        raise ValueError(f"restarts must be a sequence of integers, got {restarts!r}")
    bounds = [0, *restarts, steps]
    valid = all(isinstance(x, int | np.integer) for x in restarts)
    if not valid or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False) if steps):
        raise ValueError(
            f"restarts must be rising integers between 0 and {steps} steps, got {restarts!r}"
        )
    parts = [triples[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    longest = max(map(len, parts))
    if dtype.itemsize == 2 and longest > MOST_STEPS_OF_SEGMENT:
        raise ValueError(
            f"restarts={restarts!r} leave {longest} steps in a row, but {dtype} allows at most "
            f"{MOST_STEPS_OF_SEGMENT}"
        )
    return parts
