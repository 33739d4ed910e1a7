"""The reference of steps that write FP8 weights: float64 results, FP8 bits, skipped steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import optimizer_steps as steps
from tests.support.dtypes import E4M3, E5M2

FORMATS = pytest.mark.parametrize("fp8, power_of_two", [(E4M3, False), (E5M2, True)])
SHAPES = [(3, 128, 256), (2, 300, 136), (1, 64, 13)]


@FORMATS
@pytest.mark.parametrize("kinds", steps.MOMENTS)
def test_adamw(kinds, fp8, power_of_two, rng):
    """Each format, and each choice of dtypes, has all shapes. A pair of both has some shapes."""
    first = (steps.MOMENTS.index(kinds) % 2 == 0) != power_of_two
    for shape in SHAPES[:2] if first else SHAPES[2:]:
        steps.check_adamw(rng, shape, fp8, kinds, power_of_two=power_of_two)


@FORMATS
@pytest.mark.parametrize("kind", [jnp.bfloat16, np.float32])
def test_apply(kind, fp8, power_of_two, rng):
    for shape in SHAPES:
        steps.check_apply(rng, shape, fp8, kind, power_of_two=power_of_two)


@pytest.mark.parametrize(
    "parts, copy, shapes",
    [(2, None, SHAPES[:2]), (3, jnp.bfloat16, SHAPES[1:2]), (2, jnp.float16, SHAPES[2:])],
)
def test_joined_and_copied(parts, copy, shapes, rng):
    for shape in shapes:
        steps.check_adamw(rng, shape, E4M3, parts=parts, copy=copy)
        steps.check_apply(rng, shape, E4M3, parts=parts, copy=copy)


@pytest.mark.parametrize("numbers", [dict(nesterov=True), dict(eps_root=1e-3)], ids=str)
def test_other_numbers(numbers, rng):
    steps.check_adamw(rng, (2, 300, 136), E4M3, **numbers)


def test_skipped(rng):
    for shape in SHAPES[1:]:
        steps.check_skipped(rng, shape, E4M3)


def test_nonfinite(rng):
    for shape in SHAPES[1:]:
        steps.check_nonfinite(rng, shape, E4M3)
