"""The schedule of rank-k updates, run on the CPU by the code that runs on the device.

Every tile with an element of the triangle is computed exactly once. Nothing else is computed except
the padding that the schedule documents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan
from tests.support.dtypes import BF16

TILE_M = rank_k_plan.RANK_K_TILE.tile_m
FIELDS = "unit rank owner batch group begin extent head m n k_tiles share".split()
NOTHING, LHS, RHS = range(3)
UPLO = pytest.mark.parametrize("uplo", ["lower", "upper"])


@pytest.fixture(scope="module")
def tile(schedules):
    return config_of(schedules, rank_k_plan.RANK_K_TILE)


def config_of(schedules, tile) -> dict[str, int]:
    """Returns the compiled configuration of a plan's tile."""
    configs = [c for c in schedules.kernel_configs() if c.pop("op") == "rank_k"]
    (config,) = [c for c in configs if c == tile.sizes()]
    return config


@pytest.fixture(scope="module")
def schedule(schedules, tile):
    """Maps stacks [[g, n, steps]] to their tiles, a record array with FIELDS, in order."""

    def run(stacks, uplo, clusters=1, halves=False) -> np.recarray:
        stacks = np.asarray(stacks, np.int32)
        # A stage holds two steps of a narrow tile, so a narrow tile takes half as many stages.
        narrow = -(-stacks[:, 2:] // 2)
        stacks = np.concatenate([stacks, narrow, np.full_like(narrow, halves)], axis=1)
        tiles = schedules.rank_k_tiles(stacks, upper=uplo == "upper", clusters=clusters, **tile)
        return np.rec.fromarrays(tiles.T, names=FIELDS)

    return run


class TestTriangleEntries:
    def test_the_first_million(self, schedules):
        self.check(schedules, np.arange(1_000_000))

    def test_around_the_beginning_of_every_row(self, schedules):
        rows = np.arange(1, 2**16, dtype=np.int64)
        begins = rows * (rows + 1) // 2
        for offset in (-1, 0, 1):
            self.check(schedules, begins[begins + offset < 2**31] + offset)

    def test_the_last(self, schedules):
        self.check(schedules, np.array([2**31 - 1]))

    def test_anywhere(self, schedules, rng):
        self.check(schedules, rng.integers(0, 2**31, 100_000))

    @staticmethod
    def check(schedules, numbers):
        entries = np.array(schedules.triangle_entries(numbers.astype(np.int32)), np.int64)
        row, column = entries.T
        np.testing.assert_array_equal(row * (row + 1) // 2 + column, numbers)
        assert ((0 <= column) & (column <= row)).all()


def check(tiles, stacks, uplo, tile, halves=False):
    tile_m, tile_n = tile["tile_m"], tile["tile_n"]
    units = len(tiles) // 2
    np.testing.assert_array_equal(tiles.unit, np.repeat(np.arange(units), 2))
    np.testing.assert_array_equal(tiles.rank, np.tile([0, 1], units))
    first, second = tiles[0::2], tiles[1::2]
    for field in ("group", "k_tiles", "share"):
        np.testing.assert_array_equal(first[field], second[field])
    shared = first.share == RHS
    assert (shared | (first.share == NOTHING)).all()
    for field in ("batch", "n"):
        np.testing.assert_array_equal(first[field][shared], second[field][shared])

    if halves:
        # Both CTAs take half the steps of the same narrow tile. Count only the first CTA's tile.
        pairs = is_narrow(first, uplo, tile_m) & (first.m < first.extent)
        for field in ("batch", "m", "n"):
            np.testing.assert_array_equal(first[field][pairs], second[field][pairs])
        tiles = tiles[~np.repeat(pairs, 2) | (tiles.rank == 0)]

    for index, (g, n, steps) in enumerate(stacks):
        mine = tiles[tiles.group == index]
        assert (mine.extent == n).all()
        real = mine[mine.m < n]
        # Padding: lower tiles of macro tiles at the edge, and the last tile of each diagonal run.
        outside = mine[mine.m >= n]
        assert (outside.share == NOTHING).sum() <= 2
        assert (outside.m[outside.share == RHS] == -(-n // tile_n) * tile_n - tile_m).all()
        assert ((0 <= real.batch) & (real.batch < g)).all()

        narrow = is_narrow(real, uplo, tile_m)
        assert (real.k_tiles[~narrow] == steps).all()
        assert (real.k_tiles[narrow] == -(-steps // (4 if halves else 2))).all()

        # Count in squares of tile_m x tile_m: a narrow tile is one square, other tiles are two.
        count = -(-n // tile_m)
        computed = np.zeros((g, count, 2 * -(-count // 2) + 1), int)
        at = real.batch, real.m // tile_m, real.n // tile_m
        np.add.at(computed, at, 1)
        batch, row, column = (x[~narrow] for x in at)
        np.add.at(computed, (batch, row, column + 1), 1)
        row, column = np.indices(computed.shape[1:])
        needed = (column <= row) if uplo == "lower" else (column >= row) & (column < count)
        assert (computed[:, needed] == 1).all()
        # A wide tile may end past the matrix. No other square outside the triangle is computed.
        past = column >= count
        assert (computed[:, ~needed & ~past] == 0).all()


def is_narrow(tiles, uplo, tile_m):
    odd = tiles.m // tile_m % 2 == 1
    return (tiles.m == tiles.n) & (odd == (uplo == "upper"))


@UPLO
def test_every_size(schedule, tile, uplo):
    for n in range(1, 1600, 7):
        check(schedule([[1, n, 3]], uplo), [[1, n, 3]], uplo, tile)


@UPLO
def test_around_the_tiles_edges(schedule, tile, uplo):
    edges = [m * tile["tile_m"] + d for m in range(1, 10) for d in (-1, 0, 1)]
    for n in edges:
        for g in (1, 2, 3):
            check(schedule([[g, n, 5]], uplo), [[g, n, 5]], uplo, tile)


@UPLO
def test_lists(schedule, tile, uplo, rng):
    for _ in range(200):
        count = rng.integers(1, 70)
        stacks = np.stack(
            [
                rng.integers(1, 5, count),
                rng.integers(1, 900, count),
                rng.integers(1, 30, count),
            ],
            axis=1,
        )
        check(schedule(stacks, uplo), stacks, uplo, tile)


@UPLO
def test_narrow_tiles_in_halves(schedule, tile, uplo, rng):
    for n in [*range(1, 1600, 97), 128, 256, 384]:
        stacks = [[int(rng.integers(1, 6)), n, int(rng.integers(1, 40))]]
        check(schedule(stacks, uplo, halves=True), stacks, uplo, tile, halves=True)


@UPLO
def test_halves_where_the_last_cluster_is_done_sooner(schedules, schedule, tile, uplo, rng):
    """The kernel and the plan halve narrow tiles exactly if clusters then end sooner."""

    def end(stack, halves):
        tiles = schedule([stack], uplo, 66, halves)
        return np.bincount(tiles.owner[0::2], unit_costs(tiles, [stack], uplo, halves)).max()

    taken = 0
    for _ in range(100):
        stack = [int(rng.integers(1, most)) for most in (60, 1500, 80)]
        g, n, steps = stack
        (plan,) = jgg.explain(
            lambda a: jgg.grouped_syrk(a, uplo=uplo, implementation="cuda"),
            jax.ShapeDtypeStruct((g, n, 64 * steps), BF16),
        ).plans
        expected = end(stack, True) < end(stack, False)
        problem = plan.kernel_problem
        assert rank_k_plan.gains_by_halves(problem, problem.stacks, H200) == expected, stack
        sizes = dict(clusters=66, upper=uplo == "upper", **tile)
        assert schedules.rank_k_gains_by_halves(g, n, steps, **sizes) == expected, stack
        taken += expected
    assert 0 < taken < 100


@UPLO
def test_large_matrix(schedule, tile, uplo):
    check(schedule([[1, 20_000, 7]], uplo), [[1, 20_000, 7]], uplo, tile)


def narrow_units(tiles, uplo):
    """Returns for each unit whether it has a narrow tile. The other tile may be padding."""
    narrow = is_narrow(tiles, uplo, TILE_M) & (tiles.m < tiles.extent)
    return np.reshape(narrow, (-1, 2)).any(axis=1)


def half_steps(tiles, stacks, uplo, halves=False):
    """Returns the work of each unit in half steps, in order."""
    steps = np.asarray(stacks)[:, 2][tiles.group].reshape(-1, 2).max(axis=1)
    return np.where(narrow_units(tiles, uplo), steps // 2 if halves else steps, 2 * steps)


def unit_costs(tiles, stacks, uplo, halves=False):
    """Returns how many half steps each unit keeps a cluster busy, in order."""
    costs = half_steps(tiles, stacks, uplo, halves) + rank_k_plan.CHANGE_HALF_STEPS
    return costs + rank_k_plan.EXCHANGE_HALF_STEPS * (narrow_units(tiles, uplo) & halves)


@UPLO
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("clusters", [1, 2, 5, 66, 72])
def test_each_unit_goes_to_the_cluster_that_is_free_first(schedule, uplo, halves, clusters, rng):
    """The tiles and their order are the same for any number of clusters."""
    stacks = np.stack([rng.integers(1, 6, 20), rng.integers(1, 1200, 20)], axis=1)
    steps = np.sort(rng.integers(1, 30, 20))[::-1]
    stacks = np.concatenate([stacks, steps[:, None]], axis=1)
    tiles = schedule(stacks, uplo, clusters, halves)
    alone = schedule(stacks, uplo, 1, halves)
    for field in set(FIELDS) - {"owner"}:
        np.testing.assert_array_equal(tiles[field], alone[field])
    free_at = np.zeros(clusters, int)
    costs = unit_costs(tiles, stacks, uplo, halves)
    for owner, cost in zip(tiles.owner[0::2], costs, strict=True):
        assert owner == np.argmin(free_at)
        free_at[owner] += cost
    np.testing.assert_array_equal(tiles.owner[0::2], tiles.owner[1::2])


@UPLO
def test_no_cluster_takes_a_unit_that_another_could_begin_earlier(schedule, uplo, rng):
    for _ in range(20):
        count = rng.integers(5, 60)
        steps = np.sort(rng.integers(1, 64, count))[::-1]
        sizes = [rng.integers(1, 5, count), rng.integers(64, 2048, count), steps]
        stacks = np.stack(sizes, axis=1)
        tiles = schedule(stacks, uplo, 66)
        costs = unit_costs(tiles, stacks, uplo)
        busy = np.bincount(tiles.owner[0::2], costs, 66)
        last = {owner: cost for owner, cost in zip(tiles.owner[0::2], costs, strict=True)}
        assert max(busy[owner] - cost for owner, cost in last.items()) <= busy.mean()


@UPLO
def test_utilization_is_that_of_the_schedule(schedule, uplo):
    lists = [[(2, 1000, 256), (1, 2048, 4096), (3, 128, 4096), (5, 640, 1024)], [(8, 2048, 2048)]]
    for shapes in lists:
        check_utilization(schedule, uplo, shapes, halves=len(shapes) == 1)


def check_utilization(schedule, uplo, shapes, halves):
    (plan,) = jgg.explain(
        lambda *a: jgg.grouped_syrk(list(a), uplo=uplo),
        *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes),
    ).plans
    order = rank_k_plan.launch_order(plan.problem)
    stacks = [(g, n, -(-k // 64)) for g, n, k in (shapes[i] for i in order)]
    tiles = schedule(stacks, uplo, 66, halves)
    longest = np.bincount(tiles.owner[0::2], half_steps(tiles, stacks, uplo, halves)).max()
    useful = sum(g * n * (n + 1) / 2 * k for g, n, k in shapes)
    assert plan.utilization == pytest.approx(useful / (longest * 66 * 256 * 256 * 64 / 2))


@UPLO
def test_no_more_than_half_the_work_of_the_full_grid(schedule, uplo):
    tiles = schedule([[4, 4096, 1]], uplo)
    narrow = is_narrow(tiles, uplo, 128).sum()
    assert (len(tiles) - narrow / 2) / (4 * 32 * 16) < 0.52
