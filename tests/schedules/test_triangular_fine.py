"""The schedule of fine tiles of rank-k updates, run on the CPU by the code that runs on the device.

Every square of 64 x 64 elements in the triangle is computed exactly once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan

TILE = rank_k_plan.FINE_TILE
FIELDS = "unit rank owner batch group begin extent head m n k_tiles share".split()
LHS, RHS, BOTH = 1, 2, 3  # `Share` of `csrc/scheduler/raster.h`
UPLO = pytest.mark.parametrize("uplo", ["lower", "upper"])


@pytest.fixture(scope="module")
def schedule(schedules):
    """Maps stacks [[g, n, steps]] to their tiles, a record array with FIELDS, in order."""

    def run(stacks, uplo, clusters=1) -> np.recarray:
        stacks = np.asarray(stacks, np.int32)
        stacks = np.concatenate([stacks, np.zeros_like(stacks[:, 1:])], axis=1)
        sizes = TILE.sizes()
        tiles = schedules.rank_k_tiles(stacks, upper=uplo == "upper", clusters=clusters, **sizes)
        return np.rec.fromarrays(tiles.T, names=FIELDS)

    return run


def squares(tile, uplo) -> list[tuple[int, int]]:
    """Returns the squares of a unit that a CTA computes: row and column, counted in squares."""
    m, n = tile.m // 64, tile.n // 64
    if tile.share != BOTH:
        return [(m + i, n + j) for i in range(2) for j in range(2)]
    first = tile.m // 256 * 4
    # Rows from the longest to the shortest one.
    rows = range(4) if uplo == "upper" else range(3, -1, -1)
    longest, next_to_it, next_to_last, last = (
        [(first + r, first + c) for c in range(4) if (c >= r if uplo == "upper" else c <= r)]
        for r in rows
    )
    assert tile.m != tile.n and (tile.m > tile.n) == (uplo == "lower")
    return next_to_it + next_to_last if tile["rank"] else longest + last


def check_shares(first, second, uplo):
    """Checks that both tiles of a unit have the rows that the two CTAs share."""
    longer, shorter = ("m", "n") if uplo == "lower" else ("n", "m")
    shared = LHS if uplo == "lower" else RHS
    np.testing.assert_array_equal(first.share, second.share)
    assert np.isin(first.share, (shared, BOTH)).all()
    for field in ("group", "batch", longer):
        np.testing.assert_array_equal(first[field], second[field])
    both = first.share == BOTH
    np.testing.assert_array_equal(first[shorter] == second[shorter], both)


def check(tiles, stacks, uplo):
    np.testing.assert_array_equal(tiles.unit, np.arange(len(tiles)) // 2)
    np.testing.assert_array_equal(tiles["rank"], np.arange(len(tiles)) % 2)
    check_shares(tiles[::2], tiles[1::2], uplo)
    for index, (g, n, steps) in enumerate(stacks):
        mine = tiles[tiles.group == index]
        assert (mine.extent == n).all() and (mine.k_tiles == steps).all()
        count = -(-n // 256) * 4
        computed = np.zeros((g, count, count), int)
        for tile in mine:
            for row, column in squares(tile, uplo):
                computed[tile.batch, row, column] += 1
        triangle = np.tri(count, dtype=int) if uplo == "lower" else np.tri(count, dtype=int).T
        # Past the edge of the matrix, only the last diagonal unit may compute squares.
        used = -(-n // 128) * 2
        np.testing.assert_array_equal(computed[:, :used, :used], [triangle[:used, :used]] * g)
        computed[:, :used, :used] = 0
        computed[:, count - 4 :, count - 4 :] = 0
        assert not computed.any()


@UPLO
def test_every_size(schedule, uplo):
    for n in range(1, 1600, 7):
        check(schedule([[2, n, 3]], uplo), [[2, n, 3]], uplo)


@UPLO
def test_around_the_tiles_edges(schedule, uplo):
    for n in (m * TILE.tile_m + d for m in range(1, 10) for d in (-1, 0, 1)):
        for g in (1, 3):
            check(schedule([[g, n, 5]], uplo), [[g, n, 5]], uplo)


@UPLO
def test_lists(schedule, uplo, rng):
    for _ in range(200):
        count = rng.integers(1, rank_k_plan.MAX_FINE_STACKS + 1)
        sizes = [rng.integers(1, most, count) for most in (5, 900, 30)]
        check(schedule(np.stack(sizes, axis=1), uplo), np.stack(sizes, axis=1), uplo)


@UPLO
@pytest.mark.parametrize("clusters", [1, 5, 66])
def test_clusters_take_units_in_turn(schedule, uplo, clusters):
    tiles = schedule([[3, 700, 2], [2, 300, 4]], uplo, clusters)
    np.testing.assert_array_equal(tiles.owner, tiles.unit % clusters)


@UPLO
def test_the_plan_counts_these_units(schedule, uplo, rng):
    for _ in range(100):
        g, n, k = int(rng.integers(1, 4)), int(8 * rng.integers(17, 80)), 256
        (plan,) = jgg.explain(
            lambda a: jgg.grouped_syrk(a, uplo=uplo), jax.ShapeDtypeStruct((g, n, k), jnp.bfloat16)
        ).plans
        tiles = schedule([[g, n, k // 64]], uplo)
        assert (plan.tile == TILE) == (len(tiles) <= 132)
        if plan.tile == TILE:
            assert plan.grid == len(tiles)
            longest = max(len(squares(tile, uplo)) for tile in tiles) * k // 64
            useful = g * n * (n + 1) / 2 * k
            assert plan.utilization == pytest.approx(useful / (longest * 132 * 64**3))
