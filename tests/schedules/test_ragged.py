"""The kernels' tile schedulers, run on the CPU by the same code that runs on the device.

Whatever the group sizes, every element of the result belongs to exactly one tile, no tile reads or
writes outside its group, and CTAs of a cluster share an operand only where they need the same one.
Every cluster computes by itself which units it takes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.support import group_sizes as sizes_of
from tests.support.oracle import group_rows

TILE_K = 64  # rows or columns of 128 bytes
FIELDS = "unit rank owner batch group begin extent head m n k_tiles share".split()
NOTHING, LHS, RHS = range(3)
TILE_CHANGE = 2  # cost of the change of tiles, in steps of the mainloop
FEW_STEPS = 66  # units go in turn if the units of an average group have at most so many


class Tiles:
    """Some tiles. Each of FIELDS is an array, because a record array would take far longer."""

    def __init__(self, columns):
        self.columns = columns
        vars(self).update(zip(FIELDS, columns, strict=True))

    def __len__(self):
        return self.columns.shape[1]

    def __getitem__(self, chosen):
        """Returns the field of a name, or the tiles that a slice or a mask chooses."""
        if isinstance(chosen, str):
            return getattr(self, chosen)
        return Tiles(self.columns[:, chosen])


def check_equal(found, wanted):
    if not np.array_equal(found, wanted):  # faster than NumPy's assertion
        np.testing.assert_array_equal(found, wanted)


@dataclass(frozen=True)
class Problem:
    """One product: group_sizes [b?, G], group_offset [b?], and the extents of the dimensions."""

    op: str
    group_sizes: np.ndarray
    group_offset: np.ndarray
    batches: int
    local_groups: int
    m: int
    k: int
    n: int
    tile_m: int
    tile_n: int
    cluster: int
    align: int = 1  # tiles start at multiples of this many rows
    clusters: int = 1

    def windows(self) -> np.ndarray:
        """Returns the rows [start, end) of each local group: [batches, local_groups, 2]."""
        sizes = np.broadcast_to(self.group_sizes, (self.batches, self.group_sizes.shape[-1]))
        offsets = np.broadcast_to(self.group_offset, self.batches)
        return np.array(
            [
                group_rows(s, o, self.local_groups, self.m)
                for s, o in zip(sizes, offsets, strict=True)
            ]
        )


@pytest.fixture(scope="module")
def schedule(schedules):
    """Maps a problem to its tiles, in the order of their units."""

    def run(problem: Problem, **options: bool) -> Tiles:
        function = getattr(schedules, f"{problem.op}_tiles")
        tiles = function(
            np.ascontiguousarray(np.atleast_2d(problem.group_sizes), np.int32),
            np.ascontiguousarray(np.atleast_1d(problem.group_offset), np.int32),
            batches=problem.batches,
            local_groups=problem.local_groups,
            m=problem.m,
            k=problem.k,
            n=problem.n,
            tile_m=problem.tile_m,
            tile_n=problem.tile_n,
            cluster=problem.cluster,
            align=problem.align,
            clusters=problem.clusters,
            **options,
        )
        return Tiles(np.ascontiguousarray(tiles.T))

    return run


@pytest.fixture(scope="module")
def compiled_tiles(schedules):
    """Maps an op to the tiles that kernels were compiled for, as arguments of Problem.

    How the warpgroups of a CTA divide tiles does not change which tiles the CTA gets.
    """

    def of(op: str) -> list[dict[str, int]]:
        names = ("tile_m", "tile_n", "cluster")
        configs = [config for config in schedules.kernel_configs() if config["op"] == op]
        assert configs
        found = {tuple(config[name] for name in names): None for config in configs}
        return [dict(zip(names, tile, strict=True)) for tile in found]

    return of


def check(problem: Problem, tiles: Tiles) -> None:
    check_units(problem, tiles)
    check_pairs(problem, tiles)
    if problem.op == "ragged_noncontracting":
        check_noncontracting(problem, tiles)
    else:
        check_contracting(problem, tiles)


def check_units(problem, tiles):
    """Checks that units count from zero, and that each has a tile for every CTA of a cluster."""
    units = len(tiles) // problem.cluster
    check_equal(tiles.unit, np.repeat(np.arange(units), problem.cluster))
    check_equal(tiles.rank, np.tile(np.arange(problem.cluster), units))
    assert ((tiles.batch >= 0) & (tiles.batch < problem.batches)).all()
    assert (tiles.m % problem.tile_m == 0).all() and (tiles.n % problem.tile_n == 0).all()
    assert (tiles.begin % problem.align == 0).all()
    assert ((0 <= tiles.head) & (tiles.head < problem.align)).all()


def check_pairs(problem, tiles):
    """Checks that CTAs of a unit take the same steps of one group, and share what `share` says."""
    for rank in range(problem.cluster):
        check_turns(problem, tiles[rank :: problem.cluster])
    if problem.cluster == 1:
        assert (tiles.share == NOTHING).all()
        return
    first, second = tiles[0::2], tiles[1::2]
    for field in ("owner", "batch", "group", "begin", "extent", "head", "k_tiles", "share"):
        check_equal(first[field], second[field])
    by_lhs, by_rhs = first.share == LHS, first.share == RHS
    assert (by_lhs | by_rhs).all()
    check_equal((second.m - first.m), np.where(by_rhs, problem.tile_m, 0))
    check_equal((second.n - first.n), np.where(by_lhs, problem.tile_n, 0))
    assert (first.n < problem.n).all()


def are_small(problem, units):
    units_of_groups = np.bincount(units.batch * problem.local_groups + units.group)
    mean_rows = problem.m // problem.group_sizes.shape[-1]
    steps = -(-mean_rows // TILE_K) + TILE_CHANGE
    return units_of_groups.max(initial=0) * steps <= FEW_STEPS


def check_turns(problem, units):
    """Checks that units of equal cost go to clusters in turn, others to the one that is free first.

    If groups have little work, all units go in turn, because to find the cluster that is free first
    would take longer than the work.
    """
    if problem.op == "ragged_noncontracting" or are_small(problem, units):
        check_equal(units.owner, units.unit % problem.clusters)
        return
    loads = [(0, cluster) for cluster in range(problem.clusters)]
    rows = np.where(units.extent > 0, units.extent - units.head, 0)
    for owner, cost in zip(units.owner, -(-rows // TILE_K) + TILE_CHANGE, strict=True):
        load, cluster = loads[0]
        assert owner == cluster
        heapq.heapreplace(loads, (load + cost, cluster))
    check_large_first(problem, units, times_mean=2)


def check_large_first(problem, units, times_mean):
    """Checks that groups of more than `times_mean` times the mean come first.

    If a long tile came last, other clusters would wait. With few steps a group, writing results
    takes most of the time, and long tiles between others hide that.
    """
    rows = np.where(units.extent > 0, units.extent - units.head, 0)
    mean = problem.m // problem.group_sizes.shape[-1]
    if mean > 2 * TILE_K:
        large = rows > times_mean * mean
        assert (large[:-1] >= large[1:]).all()


def in_columns(problem, tiles):
    """Returns the tiles inside the result. In an odd row, the last pair has one tile outside."""
    outside = tiles.n >= problem.n
    assert (tiles.rank[outside] == 1).all() and (tiles.share[outside] == LHS).all()
    return tiles[~outside]


def check_noncontracting(problem, tiles):
    """Checks that each row of the result, owned or not, is in one tile of each tile column."""
    tiles = in_columns(problem, tiles)
    windows = problem.windows()
    start, end = tiles.begin + tiles.head, tiles.begin + tiles.extent
    first = tiles.begin + np.maximum(tiles.m, tiles.head)
    assert ((0 <= start) & (start <= first) & (first < end) & (end <= problem.m)).all()

    # +1 where a tile's rows start, -1 behind them.
    edges = np.zeros((problem.batches, -(-problem.n // problem.tile_n), problem.m + 1), int)
    column = tiles.n // problem.tile_n
    np.add.at(edges, (tiles.batch, column, first), 1)
    np.add.at(
        edges, (tiles.batch, column, np.minimum(tiles.begin + tiles.m + problem.tile_m, end)), -1
    )
    assert (np.cumsum(edges, axis=-1)[..., :-1] == 1).all()

    owned = tiles.k_tiles > 0
    assert (tiles.k_tiles[owned] == -(-problem.k // TILE_K)).all()
    own_windows = windows[tiles.batch[owned], tiles.group[owned]]
    check_equal(own_windows, np.stack([start[owned], end[owned]], axis=-1))
    overlap = (windows[..., 0] < windows[..., 1])[tiles.batch]
    overlap &= windows[tiles.batch, :, 0] < end[:, None]
    overlap &= windows[tiles.batch, :, 1] > start[:, None]
    assert not overlap[~owned].any()


def check_contracting(problem, tiles):
    """Checks that each tile of a local group is there once, with the steps of the group's rows."""
    tiles = in_columns(problem, tiles)
    assert ((0 <= tiles.m) & (tiles.m < problem.k)).all()
    assert ((0 <= tiles.group) & (tiles.group < problem.local_groups)).all()
    rows, columns = -(-problem.k // problem.tile_m), -(-problem.n // problem.tile_n)
    covered = np.zeros((problem.batches, problem.local_groups, rows, columns), int)
    at = tiles.batch, tiles.group, tiles.m // problem.tile_m, tiles.n // problem.tile_n
    np.add.at(covered, at, 1)
    assert (covered == 1).all()

    start, end = np.moveaxis(problem.windows()[tiles.batch, tiles.group], -1, 0)
    check_equal(tiles.k_tiles, -(-tiles.extent // TILE_K))
    check_equal(tiles.extent == 0, start == end)
    own = tiles.extent > 0
    check_equal((tiles.begin + tiles.head)[own], start[own])
    check_equal((tiles.begin + tiles.extent)[own], end[own])


def random_problem(rng: np.random.Generator, op: str, tiles: list[dict[str, int]]) -> Problem:
    """Returns a random problem, mostly small, with sizes around the boundaries that matter."""
    m = int(rng.choice([1, 2, 63, 64, 65, 127, 128, 129, 256, 257, 700, 2500]))
    groups = int(rng.choice([1, 2, 3, 8, 31, 32, 33, 40, 64, 65, 100]))
    local = groups if rng.random() < 0.5 else int(rng.integers(1, groups + 1))
    batches = int(rng.choice([1, 1, 1, 2, 3]))
    by_batch = [(batches,) if rng.random() < 0.5 else () for _ in range(2)]
    sizes = np.array([sizes_of.any_kind(rng, m, groups) for _ in range(batches)])
    if not by_batch[0]:
        sizes = sizes[0]
    reach = groups + local + 1
    offset = rng.integers(-reach, reach, by_batch[1]) if rng.random() < 0.5 else np.zeros((), int)
    if rng.random() < 0.05:
        offset = np.array(rng.choice([-(2**31), 2**31 - 1]))
    return Problem(
        op=op,
        group_sizes=sizes,
        group_offset=np.asarray(offset),
        batches=batches,
        local_groups=local,
        m=m,
        k=int(rng.choice([1, 64, 65, 128, 300, 1000])),
        n=int(rng.choice([1, 127, 128, 129, 191, 192, 193, 255, 256, 257, 600, 1024, 1300])),
        align=int(rng.choice([1, 8])),
        clusters=int(rng.choice([1, 1, 2, 3])),
        **rng.choice(tiles),
    )


OPS = pytest.mark.parametrize("op", ["ragged_noncontracting", "ragged_contracting"])


@OPS
def test_random_problems(op, schedule, compiled_tiles, rng):
    tiles = compiled_tiles(op)
    for _ in range(1500 * len(tiles)):
        problem = random_problem(rng, op, tiles)
        try:
            check(problem, schedule(problem))
        except AssertionError as error:
            raise AssertionError(f"{problem}: {error}") from error


@OPS
@pytest.mark.parametrize("clusters", [5, 32, 33, 66, 72])
def test_turns_of_many_clusters(op, clusters, schedule, compiled_tiles, rng):
    tiles = compiled_tiles(op)
    for distribution in (sizes_of.multinomial, sizes_of.zipf):
        for m, groups, k, n in (
            (9000, 40, 500, 1300),
            (20000, 3, 1300, 2000),
            (3000, 100, 200, 500),
        ):
            sizes = distribution(rng, m, groups)
            tile = rng.choice(tiles)
            problem = Problem(
                op, sizes, np.array(0), 1, groups, m=m, k=k, n=n, clusters=clusters, **tile
            )
            check(problem, schedule(problem))


@OPS
def test_all_patterns_of_empty_groups(op, schedule, compiled_tiles, rng):
    for tile in compiled_tiles(op):
        for sizes in sizes_of.zero_patterns(rng, 1000, 8):
            problem = Problem(
                op, sizes, np.array(0), 1, 8, m=1000, k=130, n=300, clusters=3, **tile
            )
            check(problem, schedule(problem))


@OPS
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 9])
def test_every_shape_of_a_groups_grid_of_tiles(op, columns, schedule, compiled_tiles):
    """The order of a group's tiles depends on their number, because they come in bands of rows."""
    for tile in compiled_tiles(op):
        for rows in (*range(1, 20), 24, 25, 33, 64, 65, 66, 129):
            m, k = rows * tile["tile_m"], 100
            if op == "ragged_contracting":
                m, k = k, m
            n = columns * tile["tile_n"]
            problem = Problem(op, np.array([m]), np.array(0), 1, 1, m=m, k=k, n=n, **tile)
            check(problem, schedule(problem))


def test_sizes_of_the_largest_ragged_dimension(schedule, compiled_tiles):
    """The running sum of group sizes neither overflows nor passes m."""
    op, m = "ragged_contracting", 2**31 - 2**10
    sizes = np.array([2**31 - 1, 5, 2**31 - 1, -(2**31), 2**30])
    for tile in compiled_tiles(op):
        for order in (sizes, sizes[::-1], np.roll(sizes, 2)):
            problem = Problem(op, order, np.array(0), 1, 5, m=m, k=128, n=256, **tile)
            check(problem, schedule(problem))


def test_clusters_can_share_all_rows(schedule, compiled_tiles, rng):
    """CTAs of a cluster may share lhs in all tiles, as products that gather rows need."""
    op = "ragged_noncontracting"
    for _ in range(500):
        problem = random_problem(rng, op, compiled_tiles(op))
        found = schedule(problem, shares_lhs=True)
        check(problem, found)
        assert (found.share == LHS).all()


def check_ranges(problem, units):
    """Checks that each cluster has consecutive units, which cost about as much in each cluster."""
    assert (np.diff(units.owner) >= 0).all()
    rows = np.where(units.extent > 0, units.extent - units.head, 0)
    cost = -(-rows // TILE_K) + TILE_CHANGE
    loads = np.bincount(units.owner, cost, minlength=problem.clusters)
    assert np.abs(loads - cost.sum() / problem.clusters).max() <= cost.max() + 1


def test_clusters_can_take_even_ranges(schedule, compiled_tiles, rng):
    """Sizes that are not valid may make ranges uneven, but leave no tile out."""
    op, num_ranges = "ragged_contracting", 0
    for _ in range(1500):
        problem = random_problem(rng, op, compiled_tiles(op))
        problem = replace(problem, clusters=int(rng.choice([problem.clusters, 33, 66])))
        tiles = schedule(problem, gathers=True)
        check_units(problem, tiles)
        check_contracting(problem, tiles)
        units = tiles[:: problem.cluster]
        check_large_first(problem, units, times_mean=1)
        sizes = np.atleast_2d(problem.group_sizes)
        is_valid = (sizes >= 0).all() and (sizes.sum(-1) <= problem.m).all()
        if is_valid and are_small(problem, units):
            check_ranges(problem, units)
            num_ranges += len(units) > problem.clusters > 1
    assert num_ranges > 100


@pytest.mark.parametrize("offset", [0, 2])
def test_unowned_rows_can_do_without_tiles(schedule, offset, rng):
    """If unowned rows have no tiles, owned rows keep their tiles, in the same order."""
    sizes = rng.integers(0, 300, 6)
    problem = Problem(
        "ragged_noncontracting", sizes, np.array([offset]), 1, 3, m=int(sizes.sum()) + 700, k=100,
        n=600, tile_m=128, tile_n=256, cluster=2,
    )  # fmt: skip
    tiles, owned = schedule(problem), schedule(problem, zeroes_unowned=False)
    assert (tiles.k_tiles == 0).any() and (owned.k_tiles > 0).all()
    for field in ("group", "begin", "extent", "m", "n", "share"):
        check_equal(owned[field], tiles[tiles.k_tiles > 0][field])
