"""Group size lists that MoE routing and its corner cases produce."""

from __future__ import annotations

from itertools import product

import numpy as np


def uniform(m: int, groups: int) -> np.ndarray:
    """Returns the sizes of groups of m rows that differ by at most one row."""
    return np.diff(np.arange(groups + 1) * m // groups).astype(np.int32)


def multinomial(rng: np.random.Generator, m: int, groups: int) -> np.ndarray:
    """Routes m rows to groups of random popularity."""
    return rng.multinomial(m, rng.dirichlet(np.full(groups, 4.0))).astype(np.int32)


def zipf(rng: np.random.Generator, m: int, groups: int) -> np.ndarray:
    """Routes m rows with a power law, so that some groups are huge and many are empty."""
    popularity = rng.permutation(1 / np.arange(1, groups + 1) ** 1.2)
    return rng.multinomial(m, popularity / popularity.sum()).astype(np.int32)


def one_hot(m: int, groups: int, hot: int) -> np.ndarray:
    """Puts all m rows into one group."""
    sizes = np.zeros(groups, np.int32)
    sizes[hot] = m
    return sizes


def zero_patterns(rng: np.random.Generator, m: int, groups: int) -> np.ndarray:
    """Returns a list for each of the 2**groups ways in which groups can be empty.

    The sizes of a list, [groups], sum to at most m, so most lists leave rows without a group.
    """
    pattern = np.array(list(product((0, 1), repeat=groups)), np.int32)
    return pattern * rng.integers(1, m // groups + 1, pattern.shape, dtype=np.int32)


def tile_edges(rng: np.random.Generator, m: int, groups: int) -> np.ndarray:
    """Returns sizes at and next to the row counts into which kernels divide work."""
    near = np.add.outer((0, 8, 16, 64, 128, 256), (-1, 0, 1)).ravel()
    return rng.choice(near[(near >= 0) & (near <= m)], groups).astype(np.int32)


def hostile(rng: np.random.Generator, m: int, groups: int) -> np.ndarray:
    """Returns sizes that may be negative, zero, extreme, or sum to more than m."""
    choices = [-(2**31), -m, -1, 0, 1, 17, m // 3, m, 2**31 - 1]
    return rng.choice(np.array(choices, np.int32), groups)


def typical(rng: np.random.Generator, m: int, groups: int) -> list[np.ndarray]:
    """Returns a few lists, for tests with many operands. In one, the last rows have no group."""
    return [
        uniform(m, groups),
        multinomial(rng, m, groups),
        zipf(rng, m - 77, groups),
        tile_edges(rng, m, groups),
    ]


def any_kind(rng: np.random.Generator, m: int, groups: int) -> np.ndarray:
    """Returns a list of a random kind, for tests that sweep over many lists."""
    filled = rng.integers(0, m + 1)
    return (
        lambda: uniform(m, groups),
        lambda: multinomial(rng, m, groups),
        lambda: multinomial(rng, filled, groups),
        lambda: zipf(rng, m, groups),
        lambda: zipf(rng, filled, groups),
        lambda: one_hot(m, groups, rng.integers(groups)),
        lambda: rng.integers(0, 3 * max(m // groups, 1) + 1, groups, dtype=np.int32),
        lambda: tile_edges(rng, m, groups),
        lambda: hostile(rng, m, groups),
        lambda: np.zeros(groups, np.int32),
    )[rng.integers(10)]()
