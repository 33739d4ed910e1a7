"""The definition of a trial, and the sizes and choices that trials draw."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support import group_sizes as sizes_of
from tests.support.dtypes import C64
from tests.support.families import FAMILIES, SIXTEEN_BITS, Family

Rng = np.random.Generator


@dataclass(frozen=True)
class Trial:
    """One program and how its results are judged.

    Attributes:
      name: describes the trial in the record of a failure.
      function: takes the operands and the arguments that are drawn for a run.
      operands: arrays that are the same in every run.
      draw: returns the other arguments of a run, drawn from a generator.
      judge: takes (drawn, results), and raises AssertionError unless the results are right.
      x64: whether the function needs 64-bit types.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple
    draw: Callable[[Rng], tuple]
    judge: Callable[[tuple, Any], None]
    x64: bool = False


def side(rng: Rng, most: int, multiple: int = 1) -> int:
    """Draws a size up to `most`: a tiny one, any one, or one at or next to a tile's edge."""
    kind = rng.integers(4)
    if kind == 0:
        size = int(rng.integers(1, 18))
    elif kind == 1:
        size = int(rng.choice([64, 128, 256, 512])) + int(rng.integers(-1, 2))
    else:
        size = int(rng.integers(1, most + 1))
    return max(1, min(size, most) // multiple) * multiple


def pick(rng: Rng, choices):
    """Draws one of the choices."""
    return choices[rng.integers(len(choices))]


def flip(rng: Rng) -> bool:
    """Returns True or False, each in half of the draws."""
    return bool(rng.integers(2))


def pick_family(rng: Rng, implementation: str) -> Family:
    """Draws a family, but not complex64 for the reference, which does not sum it in float64."""
    families = FAMILIES + SIXTEEN_BITS
    if implementation == "xla":
        families = tuple(family for family in families if family.dtype != C64)
    return pick(rng, families)


def sizes_and_offset(rng: Rng, m: int, g: int, shifted: bool) -> tuple:
    """Draws group sizes of any kind, and, if `shifted`, a group offset that may be out of range."""
    offset = rng.choice([-1, 0, 1, g // 2, g]) if shifted else 0
    return sizes_of.any_kind(rng, m, g), np.array(offset, np.int32)


def shape_of_product(rng: Rng, most: int) -> tuple[int, int, int, int]:
    """Draws m, k, n and the number of groups. Half of the draws have multiples of 8 as k and n."""
    multiple = pick(rng, (1, 8))
    m, k, n = side(rng, 2 * most), side(rng, most, multiple), side(rng, most, multiple)
    return m, k, n, int(rng.integers(1, 13))
