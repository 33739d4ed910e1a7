"""Products of long tiles, whose clusters begin each turn together (csrc/sm90/lockstep.h)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16
from tests.support.ops import NONCONTRACTING, noncontracting, random, swap

# These sizes give some 300 units of work, which are five turns of 66 clusters. A unit has 41 full
# steps and a step that is not full.
M, K, N, G = 9001, 2632, 2056, 5
CHECKED_COLUMNS = 24

run = partial(noncontracting, implementation="cuda")


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(20261122)
    lhs, rhs, _ = (random(rng, shape, BF16) for shape in NONCONTRACTING.shapes(M, K, N, G))
    return lhs, rhs


def check(rng, out, lhs, rhs, sizes, offset=0):
    """Compares some of the columns, because all columns would take minutes in float64."""
    columns = np.sort(rng.choice(N, CHECKED_COLUMNS, replace=False))
    exact = oracle.ragged_noncontracting(lhs, rhs[..., columns], sizes, offset)
    oracle.check(out[..., columns], exact)


def short_tiles(rng):
    """Returns sizes of groups whose last tile has few rows, and takes half the time of others."""
    tiles = rng.multinomial(M // 128 - G, np.full(G, 1 / G))
    return (128 * tiles + rng.integers(1, 64, G)).astype(np.int32)


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_group_sizes(transpose_rhs, operands, rng):
    kinds = (
        short_tiles(rng),
        sizes_of.multinomial(rng, M, G),
        sizes_of.zipf(rng, M - 1111, G),
        sizes_of.one_hot(M, G, 3),
        np.array([0, 4000, 0, 0, 1234], np.int32),
    )
    lhs, rhs = operands
    stored = swap(rhs, transpose_rhs)
    for sizes in kinds:
        out = run(lhs, stored, sizes, transpose_rhs=transpose_rhs)
        check(rng, out, lhs, rhs, sizes)


@pytest.mark.parametrize("offset", [-2, 2, 9])
def test_rows_of_other_groups(offset, operands, rng):
    """Unowned rows have tiles without steps, between other tiles."""
    sizes = rng.multinomial(M, np.full(G + 3, 1 / (G + 3))).astype(np.int32)
    lhs, rhs = operands
    check(rng, run(lhs, rhs, sizes, np.int32(offset)), lhs, rhs, sizes, offset)


def test_batches(operands, rng):
    lhs, rhs = operands
    sizes = np.stack([short_tiles(rng), sizes_of.multinomial(rng, M, G)])
    lhs = jnp.stack([lhs, lhs[::-1]])
    check(rng, jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(lhs, rhs, sizes), lhs, rhs, sizes)


def test_one_launch_after_another(operands, rng):
    """Counters continue from one launch to the next, with other sizes and other turns."""
    lhs, rhs = operands
    for rows in (M, 2000, 5000, M):
        sizes = sizes_of.multinomial(rng, rows, G)
        check(rng, run(lhs[:rows], rhs, sizes), lhs[:rows], rhs, sizes)
