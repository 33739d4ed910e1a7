"""Draws random products of all operations, which are compiled once and run with many sizes.

A trial is one program with fixed operands. Each run draws new group sizes, offsets, scales and
experts, so that few programs compute many products.
"""

from __future__ import annotations

import numpy as np

from tests.stress.drawing import Trial
from tests.stress.fp8_trials import fp8_training, scaled, scaled_gradient
from tests.stress.list_trials import list_of_products, symmetric_update
from tests.stress.ragged_trials import accumulate, expert_mlp, gradient, moved_rows, ragged

# The number of trials of each family, in a sequence of trials that repeats.
FAMILIES_OF_TRIALS = (
    (ragged, 5),
    (gradient, 2),
    (accumulate, 1),
    (expert_mlp, 2),
    (list_of_products, 3),
    (symmetric_update, 3),
    (scaled, 2),
    (scaled_gradient, 1),
    (fp8_training, 1),
    (moved_rows, 1),
)
IN_TURN = [family for family, count in FAMILIES_OF_TRIALS for _ in range(count)]


def trial(seed: int, number: int, implementation: str, most: int) -> tuple[str, Trial]:
    """Returns the family's name and trial `number`. Sizes are at most `most`, rows twice that."""
    family = IN_TURN[number % len(IN_TURN)]
    return family.__name__, family(np.random.default_rng([seed, number]), implementation, most)
