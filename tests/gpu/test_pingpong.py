"""Weight gradients into float32 by consumers that take turns, against float64."""

from functools import partial

import jax
import numpy as np
import pytest

from jax_grouped_gemm._src.ragged.tiles import PINGPONG_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.ops import CONTRACTING, contracting, random

TILE = PINGPONG_TILE
# Each group has three by three output tiles, of which the last ones are not full.
M, K, N, G = 776, 264, 392, 8

run = partial(contracting, preferred_element_type=F32, tile=TILE, implementation="cuda")


def operands(rng, m=M, k=K, n=N, g=G, dtype=BF16):
    return [random(rng, shape, dtype) for shape in CONTRACTING.shapes(m, k, n, g)[:2]]


def check(lhs, rhs, sizes, offset=None):
    out = run(lhs, rhs, sizes, offset)
    assert out.dtype == F32
    oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes, 0 if offset is None else offset))
    return out


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_any_group_sizes(dtype, rng):
    lhs, rhs = operands(rng, dtype=dtype)
    for _ in range(60):
        check(lhs, rhs, sizes_of.any_kind(rng, M, G))


@pytest.mark.parametrize("first", [0, 1, 7, 63])
def test_every_group_length_up_to_two_steps(first, rng):
    """Last steps have every number of 16-row slices, with and without a full step before."""
    lhs, rhs = operands(rng, m=1320, k=64, n=64, g=18)
    lengths = rng.permutation(np.arange(1, 131))
    for some in lengths.reshape(-1, 10):
        sizes = np.concatenate([[first], some, [0, 0, 1, 0, 5, 64, 3]]).astype(np.int32)
        check(lhs, rhs, sizes)


def test_all_patterns_of_empty_groups(rng):
    """Results of empty groups are zeros, and consumers keep their turns."""
    lhs, rhs = operands(rng, k=72, n=136)
    for sizes in sizes_of.zero_patterns(rng, M, G):
        check(lhs, rhs, sizes)


@pytest.mark.parametrize(
    "k, n",
    [(8, 8), (64, 192), (72, 200), (128, 576), (136, 64), (384, 384), (392, 584), (640, 1000)],
)
def test_dimensions_on_and_off_the_tile(k, n, rng):
    lhs, rhs = operands(rng, k=k, n=n)
    for sizes in (
        sizes_of.uniform(M, G),
        sizes_of.tile_edges(rng, M, G),
        sizes_of.one_hot(M, G, 3),
    ):
        check(lhs, rhs, sizes)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_neighbours(poison, rng):
    """Rows of other groups, and rows of no group, never reach a result."""
    lhs, rhs = operands(rng)
    sizes = np.array([129, 0, 70, 1, 150, 63, 0, 200], np.int32)
    clean = np.asarray(run(lhs, rhs, sizes))
    ends = np.cumsum(sizes)
    for group in (0, 2, 3, 4, 5, 7):
        dirty = [x.copy() for x in (lhs, rhs)]
        for x in dirty:
            x[ends[group] - sizes[group] : ends[group]] = poison
            x[ends[-1] :] = poison
        out = np.asarray(run(*dirty, sizes))
        others = np.arange(G) != group
        np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("offset", [-9, -2, 0, 3, 7, 20])
def test_group_offset(offset, rng):
    lhs, rhs = operands(rng)
    check(lhs, rhs, sizes_of.multinomial(rng, M, G), np.int32(offset))


def test_many_tiles_and_groups(rng):
    """Clusters compute several tiles, and use each stage and each slot several times."""
    m, groups = 20000, 40
    lhs, rhs = operands(rng, m=m, k=1160, n=1400, g=groups)
    for sizes in (sizes_of.multinomial(rng, m, groups), sizes_of.zipf(rng, m - 77, groups)):
        check(lhs, rhs, sizes)


@pytest.mark.parametrize("sizes", [[9000], [40, 8900, 60], [0, 0, 8192, 0], [3000, 0, 1, 6000]])
def test_unequal_groups(sizes, rng):
    """Tiles of unequal groups are cut from 4096 rows on, in another part of the same kernel."""
    m = 9000
    sizes = np.array(sizes, np.int32)
    lhs, rhs = operands(rng, m=m, k=520, n=776, g=len(sizes))
    check(lhs, rhs, np.minimum(sizes, m))


def test_batches(rng):
    lhs, rhs = (np.stack([x] * 3) for x in operands(rng))
    lhs[1] *= 2
    sizes = np.stack([sizes_of.any_kind(rng, M, G) for _ in range(3)])
    out = jax.vmap(lambda *arrays: run(*arrays))(lhs, rhs, sizes)
    for i in range(3):
        oracle.check(out[i], oracle.ragged_contracting(lhs[i], rhs[i], sizes[i]))


def test_same_inputs_give_the_same_bits(rng):
    lhs, rhs = operands(rng, m=6000, k=520, n=776)
    sizes = sizes_of.multinomial(rng, 6000, G)
    first = np.asarray(run(lhs, rhs, sizes)).tobytes()
    assert all(np.asarray(run(lhs, rhs, sizes)).tobytes() == first for _ in range(40))


def test_is_the_plan_s_choice(rng):
    m, groups = 4 * 512, 4
    lhs, rhs = operands(rng, m=m, g=groups)
    sizes = sizes_of.multinomial(rng, m, groups)
    chosen = contracting(lhs, rhs, sizes, preferred_element_type=F32, implementation="cuda")
    np.testing.assert_array_equal(chosen, check(lhs, rhs, sizes))
