"""The schedule of the FP64 rank-k updates, run on the CPU by the code that runs on the device."""

import numpy as np
import pytest

from jax_grouped_gemm._src.lists.fp64 import SQUARES
from jax_grouped_gemm._src.plan import TileConfig

FIELDS = "turn block stack matrix m n steps on_diagonal".split()
UPLO = pytest.mark.parametrize("uplo", ["lower", "upper"])
TILE = pytest.mark.parametrize("tile", [64, 128])


@pytest.fixture(scope="module")
def schedule(schedules):
    """Maps stacks [[g, n, steps, steps on the diagonal]] to tiles, a record array with FIELDS."""

    def run(stacks, uplo, tile, blocks=132) -> np.recarray:
        stacks = np.asarray(stacks, np.int32)
        tiles = schedules.square_triangle_tiles(stacks, uplo == "upper", blocks, tile)
        return np.rec.fromarrays(tiles.T, names=FIELDS)

    return run


def check(tiles, stacks, uplo, tile):
    """Checks that every tile of the triangle is listed once with its steps, and no other tile."""
    listed = {(t.stack, t.matrix, t.m, t.n): t for t in tiles}
    assert len(listed) == len(tiles)
    for index, (g, n, steps, diagonal_steps) in enumerate(stacks):
        rows = -(-n // tile)
        for matrix in range(g):
            for row in range(rows):
                for column in range(row + 1):
                    place = (row, column) if uplo == "lower" else (column, row)
                    t = listed.pop((index, matrix, *(tile * x for x in place)))
                    assert t.on_diagonal == (row == column)
                    assert t.steps == (diagonal_steps if row == column else steps)
    assert not listed


@TILE
@UPLO
def test_sizes(schedule, uplo, tile):
    sizes = [*range(1, 700, 61), *(m * tile + d for m in range(1, 7) for d in (-1, 0, 1))]
    for n in sizes:
        stacks = [[2, n, 6, 3]]
        check(schedule(stacks, uplo, tile), stacks, uplo, tile)


@TILE
@UPLO
def test_lists(schedule, uplo, tile, rng):
    for _ in range(60):
        count = rng.integers(1, 65)
        steps = rng.integers(1, 30, count)
        halved = rng.integers(2)
        diagonal = -(-steps // 2) if halved else steps
        sizes = rng.integers(1, 5, count), rng.integers(1, 600, count)
        stacks = np.stack([*sizes, steps, diagonal], axis=1)
        check(schedule(stacks, uplo, tile), stacks, uplo, tile)


@UPLO
def test_large_matrix(schedule, uplo):
    tiles = schedule([[1, 40_000, 2, 1]], uplo, 64)
    assert len(tiles) == 625 * 626 // 2
    assert len(np.unique(np.stack([tiles.m, tiles.n]), axis=1).T) == len(tiles)


@UPLO
def test_longest_first_and_back_and_forth(schedule, uplo, rng):
    stacks = [[3, 500, 4, 2], [2, 300, 20, 10], [5, 64, 9, 9]]
    # A block first computes the tile that is dealt to it last.
    in_order = np.roll(schedule(stacks, uplo, 64, blocks=1), -1)
    assert (np.diff(in_order["steps"]) <= 0).all()
    for blocks in (2, 7, 132):
        tiles = schedule(stacks, uplo, 64, blocks)
        rounds = np.bincount(tiles.block, minlength=blocks)[tiles.block]
        turn = np.where(tiles.turn == 0, rounds - 1, tiles.turn - 1)
        unit = turn * blocks + np.where(turn % 2, blocks - 1 - tiles.block, tiles.block)
        np.testing.assert_array_equal(np.sort(unit), np.arange(len(in_order)))
        for field in ("stack", "matrix", "m", "n"):
            np.testing.assert_array_equal(tiles[field], in_order[field][unit])


def test_blocks_are_out_of_step(schedule):
    """About half of the blocks begin with a tile on the diagonal, so blocks are out of step."""
    tiles = schedule([[16, 1024, 128, 64]], "lower", 128)
    first = tiles[tiles.turn == 0]
    assert 0.4 < np.mean(first.on_diagonal) < 0.7


def test_the_end_is_even(schedule):
    """Tiles on the diagonal are half as long and are dealt last, so blocks end together."""
    tiles = schedule([[8, 2048, 256, 128]], "lower", 128)
    busy = np.bincount(tiles.block, tiles.steps, 132)
    assert tiles.steps.sum() / (132 * busy.max()) > 0.96


def test_plans_know_the_compiled_tiles(schedules):
    compiled = {name: [] for name in ("float64", "complex64", "complex128")}
    names = {"rank_k_f64": "float64", "rank_k_c64": "complex64", "rank_k_c128": "complex128"}
    for config in schedules.kernel_configs():
        op = config.pop("op")
        if op in names:
            compiled[names[op]].append(TileConfig(**config))
    assert compiled == {
        dtype: [kernel.tile for kernel in SQUARES if dtype in kernel.lhs] for dtype in compiled
    }
