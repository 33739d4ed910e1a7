"""The schedules of lists of products, run on the CPU by the code that runs on the device.

Every tile of every result is computed exactly once, for every way to deal out the units of work and
any number of clusters. Nothing else is computed except the padding that the schedule documents.
"""

import numpy as np
import pytest

from jax_grouped_gemm._src.lists import schedule as list_schedule
from jax_grouped_gemm._src.lists.grouped_gemm import plan as grouped_gemm_plan
from jax_grouped_gemm._src.lists.schedule import Shape
from jax_grouped_gemm._src.plan import TileConfig
from tests.support.products import FOUR_PROBLEMS

FIELDS = "unit rank owner batch group begin extent head m n k_tiles share".split()
NOTHING, LHS, RHS = range(3)
TILE_K = 64
ON_DEVICE = np.zeros((0, 0, 2), np.int32)

COMPILED = [choice.tile for choice in grouped_gemm_plan.COMPILED if "bfloat16" in choice.lhs]
TILES = pytest.mark.parametrize("tile", COMPILED, ids=lambda t: str(t.tile_n))
# Schedules are made for the 132 multiprocessors of an H200, but fewer or more may walk them.
CLUSTERS = pytest.mark.parametrize("clusters", [None, 1, 7, 57, 200])


def random_shapes(rng, count, low=8, high=1024, stacks=False) -> list[Shape]:
    sides = rng.integers(low, high + 1, (count, 3))
    g = rng.integers(1, 4, count) if stacks else np.ones(count, int)
    return [Shape(int(g), *map(int, row)) for g, row in zip(g, sides, strict=True)]


def table(shapes) -> np.ndarray:
    return np.array([[s.g, s.m, s.n, -(-s.k // TILE_K)] for s in shapes], np.int32)


def most_clusters(tile: TileConfig) -> int:
    return 132 // tile.cluster


def schedules(shapes, tile):
    """Yields how units are dealt out: by the device, or on the host in one of two orders."""
    units = list_schedule.list_units(shapes, tile)
    yield "device", ON_DEVICE
    for name, schedule in (
        ("in turn", list_schedule.in_turn(len(units.cost), most_clusters(tile), serpentine=False)),
        ("longest first", list_schedule.longest_first(units.cost, most_clusters(tile))),
    ):
        pairs = np.stack([units.problem[schedule], units.number[schedule]], axis=-1)
        yield name, np.where(schedule[..., None] < 0, -1, pairs).astype(np.int32)


@pytest.fixture(scope="module")
def tiles_of(schedules):
    """Returns a function that maps a list and a schedule to tiles, a record array of FIELDS."""

    def run(shapes, schedule, clusters, tile) -> np.recarray:
        tiles = schedules.grouped_gemm_tiles(
            table(shapes), schedule, clusters, tile.tile_m, tile.tile_n, tile.cluster
        )
        return np.rec.fromarrays(tiles.T, names=FIELDS)

    return run


def check(tiles, shapes, tile):
    if tile.cluster == 2:
        check_sharing(tiles[0::2], tiles[1::2])
    else:
        assert (tiles.share == NOTHING).all()
    sides = table(shapes)
    # Padding of a schedule has no rows, and padding of a raster has no columns.
    real = tiles[tiles.extent > 0]
    real = real[real.n < sides[real.group, 2]]
    np.testing.assert_array_equal(real.extent, sides[real.group, 1])
    np.testing.assert_array_equal(real.k_tiles, sides[real.group, 3])
    assert (real.m % tile.tile_m == 0).all() and (real.n % tile.tile_n == 0).all()

    rows, columns = -(-sides[:, 1] // tile.tile_m), -(-sides[:, 2] // tile.tile_n)
    count = sides[:, 0] * rows * columns
    first = np.concatenate([[0], np.cumsum(count)])
    row, column = real.m // tile.tile_m, real.n // tile.tile_n
    assert (row < rows[real.group]).all() and (real.batch < sides[real.group, 0]).all()
    number = (real.batch * rows[real.group] + row) * columns[real.group] + column
    computed = np.bincount(first[real.group] + number, minlength=first[-1])
    np.testing.assert_array_equal(computed, 1)


def check_sharing(first, second):
    """Checks that both CTAs of a cluster have the same tile of the operand that they share."""
    for field in ("unit", "group", "batch", "k_tiles", "share"):
        np.testing.assert_array_equal(first[field], second[field])
    by_rhs, by_lhs = first.share == RHS, first.share == LHS
    np.testing.assert_array_equal(first.n[by_rhs], second.n[by_rhs])
    np.testing.assert_array_equal(first.m[by_lhs], second.m[by_lhs])


@TILES
@CLUSTERS
def test_random_lists(tiles_of, tile, clusters, rng):
    for count in (1, 24, 31, 32, 33, 64, 79, 300):
        shapes = random_shapes(rng, count, stacks=True)
        # Empty results have no tiles, wherever in the list they are.
        empty = rng.permutation(count)[: count // 8]
        for i in empty:
            shapes[i] = shapes[i]._replace(**{rng.choice(["g", "m", "n"]): 0})
        for _, schedule in schedules(shapes, tile):
            check(tiles_of(shapes, schedule, clusters or most_clusters(tile), tile), shapes, tile)


@TILES
def test_every_small_grid(tiles_of, tile):
    """Grids have up to nine by nine tiles, of which the last ones are full or not full."""
    for rows in range(1, 10):
        shapes = [
            Shape(2, rows * tile.tile_m - cut, columns * tile.tile_n - cut, 8)
            for columns in range(1, 10)
            for cut in (0, 1, tile.tile_m - 1)
        ]
        for _, schedule in schedules(shapes, tile):
            check(tiles_of(shapes, schedule, most_clusters(tile), tile), shapes, tile)


@TILES
def test_large_results(tiles_of, tile):
    shapes = [Shape(1, 20_000, 9_000, 128), Shape(1, 24, 60_000, 64), Shape(1, 60_000, 24, 8)]
    for _, schedule in schedules(shapes, tile):
        check(tiles_of(shapes, schedule, most_clusters(tile), tile), shapes, tile)


@TILES
def test_python_numbers_the_units_as_the_kernel_does(tiles_of, tile, rng):
    """Python numbers units like the kernel, because the costs of units depend on their tiles."""
    for shape in random_shapes(rng, 50, 1, 6000):
        rows, columns = list_schedule.raster(
            -(-shape.m // tile.tile_m), -(-shape.n // tile.tile_n), tile.cluster
        )
        tiles = tiles_of([shape], ON_DEVICE, 1, tile)
        order = np.argsort(tiles.unit, kind="stable")
        np.testing.assert_array_equal(tiles.m[order], rows.ravel() * tile.tile_m)
        np.testing.assert_array_equal(tiles.n[order], columns.ravel() * tile.tile_n)


@TILES
def test_the_device_takes_turns_back_and_forth(tiles_of, tile, rng):
    """The device deals out units as Python's simulation does."""
    shapes = random_shapes(rng, 40)
    units = list_schedule.list_units(shapes, tile)
    clusters = most_clusters(tile)
    schedule = list_schedule.in_turn(len(units.cost), clusters, serpentine=True)
    pairs = np.stack([units.problem[schedule], units.number[schedule]], axis=-1)
    same = np.where(schedule[..., None] < 0, -1, pairs).astype(np.int32)
    found = tiles_of(shapes, ON_DEVICE, clusters, tile)
    given = tiles_of(shapes, same, clusters, tile)
    given = given[given.extent > 0]
    for field in ("group", "batch", "m", "n", "k_tiles", "share"):
        np.testing.assert_array_equal(found[field], given[field])


class TestBalance:
    """Clusters get equal work in the simulation, which knows what every tile costs."""

    @staticmethod
    def longest(shapes, tile=COMPILED[0]):
        """Returns steps of the busiest cluster by way, of the mean cluster, of the longest unit."""
        cost = list_schedule.list_units(shapes, tile).cost
        clusters = most_clusters(tile)
        ways = {
            "in turn": list_schedule.in_turn(len(cost), clusters, serpentine=False),
            "serpentine": list_schedule.in_turn(len(cost), clusters, serpentine=True),
            "longest first": list_schedule.longest_first(cost, clusters),
        }
        steps = {name: list_schedule.busy_steps(way, cost).max() for name, way in ways.items()}
        return steps, cost.sum() / clusters, cost.max()

    def test_longest_first_keeps_its_guarantee(self, rng):
        """No cluster works longer than the mean and one more unit (Graham, 1966)."""
        for count in (1, 24, 79, 300):
            steps, mean, longest_unit = self.longest(random_shapes(rng, count))
            assert longest_unit <= steps["longest first"] <= mean + longest_unit

    def test_longest_first_is_better_than_turns(self, rng):
        """For lists sorted by falling k, longest-first is better on average than taking turns."""
        ratios = {"in turn": [], "serpentine": []}
        for _ in range(20):
            shapes = sorted(random_shapes(rng, 79, 24), key=lambda s: -s.k)
            steps, _, _ = self.longest(shapes)
            for name, found in ratios.items():
                found.append(steps[name] / steps["longest first"])
        assert np.mean(ratios["in turn"]) > np.mean(ratios["serpentine"]) > 1.02

    def test_sorting_evens_out_the_example_of_cutlass(self):
        """If problems are not sorted, some clusters get only tiles with a large k."""
        shapes = [Shape(1, m, n, k) for m, k, n in FOUR_PROBLEMS]
        tile = COMPILED[1]
        unsorted, _, _ = self.longest(shapes, tile)
        by_k, _, _ = self.longest(sorted(shapes, key=lambda s: -s.k), tile)
        assert by_k["in turn"] < 0.7 * unsorted["in turn"]
        assert unsorted["longest first"] == by_k["longest first"]


def test_the_compiled_limits_are_those_of_the_plan(schedules):
    assert schedules.MAX_LISTED_PROBLEMS == grouped_gemm_plan.MAX_PROBLEMS
    compiled = [c for c in schedules.kernel_configs() if c.pop("op") == "grouped_gemm"]
    assert [TileConfig(**config) for config in compiled] == COMPILED
