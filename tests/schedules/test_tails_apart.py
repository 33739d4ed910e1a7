"""Whole tiles and tails are assigned separately: the kernels' schedule, run on the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.schedules.test_ragged import (
    FIELDS,
    LHS,
    NOTHING,
    Problem,
    check_noncontracting,
    random_problem,
)
from tests.support import group_sizes as sizes_of

TILES = [
    dict(tile_m=128, tile_n=128, cluster=1),
    dict(tile_m=128, tile_n=256, cluster=1),
    dict(tile_m=256, tile_n=64, cluster=2),
]


def listed(schedules, problem: Problem, **options: bool) -> np.recarray:
    """Returns the tiles of one cluster after the other, in the order in which it computes them."""
    sizes = dataclasses.asdict(problem)
    del sizes["op"], sizes["align"]
    tiles = schedules.tails_apart_tiles(
        np.ascontiguousarray(np.atleast_2d(sizes.pop("group_sizes")), np.int32),
        np.ascontiguousarray(np.atleast_1d(sizes.pop("group_offset")), np.int32),
        **sizes,
        **options,
    )
    names = ["owner" if name == "unit" else name for name in FIELDS if name != "owner"]
    return np.rec.fromarrays(tiles.T, names=[*names, "first_step", "partials", "slot"])


def are_tails(problem: Problem, tiles: np.recarray) -> np.ndarray:
    """Returns which tiles have at most three quarters of the rows of a tile, or are unowned."""
    return (tiles.k_tiles == 0) | (tiles.extent - tiles.m <= problem.tile_m * 3 // 4)


def check(problem: Problem, tiles: np.recarray) -> None:
    check_noncontracting(problem, tiles)
    assert (tiles.head == 0).all() and (
        tiles.share == (LHS if problem.cluster > 1 else NOTHING)
    ).all()
    units = tiles[:: problem.cluster]
    for rank in range(problem.cluster):
        of_rank = tiles[rank :: problem.cluster].copy()
        of_rank.n -= rank * problem.tile_n
        assert (of_rank["rank"] == rank).all()
        for name in ("owner", "batch", "begin", "m", "n", "k_tiles"):
            np.testing.assert_array_equal(of_rank[name], units[name])
    # The first clusters get the whole tiles that are left over, and the last clusters the tails.
    clusters, tails = problem.clusters, are_tails(problem, units)
    places = np.arange(clusters)
    for chosen, before in (~tails, places), (tails, places[::-1]):
        counts = np.bincount(units.owner[chosen], minlength=clusters)
        np.testing.assert_array_equal(counts, (chosen.sum() - before + clusters - 1) // clusters)
    # Each cluster takes the groups in order, and the tails of a group after its whole tiles.
    position = (units.batch.astype(np.int64) * problem.m + units.begin) * 2 + tails
    is_same = np.diff(units.owner) == 0
    assert (np.diff(position)[is_same] >= 0).all()


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_random_problems(tile, schedules, rng):
    whole = tails = 0
    for _ in range(2000):
        problem = random_problem(rng, "ragged_noncontracting", [tile])
        clusters = int(rng.choice([1, 2, 3, 5, 24, 132]))
        problem = dataclasses.replace(problem, align=1, clusters=clusters)
        tiles = listed(schedules, problem)
        try:
            check(problem, tiles)
        except AssertionError as error:
            raise AssertionError(f"{problem}: {error}") from error
        of_problem = are_tails(problem, tiles)
        tails += of_problem.sum()
        whole += (~of_problem).sum()
    assert whole > 2000 and tails > 2000


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_clusters_get_equal_shares_of_unequal_groups(tile, schedules, rng):
    """No cluster has two tiles more than another one, and none has two whole tiles more."""
    for _ in range(20):
        sizes = sizes_of.multinomial(rng, 32768, 32)
        clusters = 132 // tile["cluster"]
        problem = Problem(
            "ragged_noncontracting", sizes, np.array(0), 1, 32, m=32768, k=64, n=2880,
            clusters=clusters, **tile,
        )  # fmt: skip
        tiles = listed(schedules, problem)
        check(problem, tiles)
        units = tiles[:: problem.cluster]
        for chosen in units, units[~are_tails(problem, units)]:
            totals = np.bincount(chosen.owner, minlength=clusters)
            assert totals.max() - totals.min() <= 1


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("offset", [0, 2])
def test_unowned_rows_can_do_without_tiles(tile, offset, schedules, rng):
    sizes = rng.integers(0, 600, 6)
    problem = Problem(
        "ragged_noncontracting", sizes, np.array([offset]), 1, 3, m=int(sizes.sum()) + 700, k=100,
        n=600, clusters=5, **tile,
    )  # fmt: skip
    tiles, owned = listed(schedules, problem), listed(schedules, problem, zeroes_unowned=False)
    assert (tiles.k_tiles == 0).any() and (owned.k_tiles > 0).all()

    def places(of):
        return sorted(zip(of.group, of.begin, of.m, of.n, strict=True))

    assert places(owned) == places(tiles[tiles.k_tiles > 0])
