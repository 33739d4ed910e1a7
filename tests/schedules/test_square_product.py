"""The schedule of lists of FP64 products, run on the CPU by the code that runs on the device."""

import numpy as np
import pytest

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.lists.fp64 import SQUARES
from jax_grouped_gemm._src.lists.grouped_gemm.plan import simulated
from jax_grouped_gemm._src.lists.schedule import Shape
from jax_grouped_gemm._src.plan import TileConfig

FIELDS = "turn block product m n steps".split()
TILE = pytest.mark.parametrize("tile", [64, 128])


@pytest.fixture(scope="module")
def schedule(schedules):
    """Maps products [[m, n, steps]] to their tiles, a record array with FIELDS."""

    def run(products, tile, blocks=132) -> np.recarray:
        tiles = schedules.square_product_tiles(np.asarray(products, np.int32), blocks, tile)
        return np.rec.fromarrays(tiles.T, names=FIELDS)

    return run


def check(tiles, products, tile):
    """Checks that every tile of every result is listed once with its steps, and no other tile."""
    listed = {(t.product, t.m, t.n): t.steps for t in tiles}
    assert len(listed) == len(tiles)
    for index, (m, n, steps) in enumerate(products):
        for row in range(0, m, tile):
            for column in range(0, n, tile):
                assert listed.pop((index, row, column)) == steps
    assert not listed


@TILE
def test_sizes(schedule, tile):
    sides = [1, 2, *(i * tile + d for i in (1, 2, 5) for d in (-1, 0, 1))]
    for m in sides:
        for n in sides:
            check(schedule([[m, n, 3]], tile), [[m, n, 3]], tile)


@TILE
@pytest.mark.parametrize("blocks", [1, 7, 132, 264])
def test_lists(schedule, tile, blocks, rng):
    for count in (1, 2, 3, 127, 128):
        products = rng.integers(1, (700, 700, 20), (count, 3))
        check(schedule(products, tile, blocks), products, tile)


@TILE
def test_longest_first_and_back_and_forth(schedule, tile, rng):
    products = rng.integers(1, (900, 900, 30), (40, 3))
    in_order = schedule(products, tile, blocks=1)
    assert (np.diff(in_order.steps) <= 0).all()
    for blocks in (2, 7, 132):
        tiles = schedule(products, tile, blocks)
        unit = np.where(tiles.turn % 2, blocks - 1 - tiles.block, tiles.block)
        unit += tiles.turn * blocks
        np.testing.assert_array_equal(np.sort(unit), np.arange(len(in_order)))
        for field in ("product", "m", "n", "steps"):
            np.testing.assert_array_equal(tiles[field], in_order[field][unit])


@TILE
def test_a_block_without_a_tile_gets_none_later(schedule, tile, rng):
    """The kernel leaves its loop at the first round without a tile."""
    products = rng.integers(1, (900, 900, 30), (20, 3))
    tiles = schedule(products, tile, 132)
    for block in range(132):
        turns = tiles.turn[tiles.block == block]
        np.testing.assert_array_equal(turns, np.arange(len(turns)))


@pytest.mark.parametrize("dtype", ("float64", "complex64", "complex128"))
def test_the_plan_predicts_the_longest_block(schedule, dtype, rng):
    kernels = tuple(kernel for kernel in SQUARES if dtype in kernel.lhs)
    dtype = np.dtype(dtype)
    for count in (1, 20, 128):
        shapes = tuple(Shape(1, *(int(x) for x in rng.integers(1, 900, 3))) for _ in range(count))
        kernel, blocks, _, steps, _ = simulated(shapes, "device", True, dtype, kernels, H200)
        step = 128 // dtype.itemsize
        products = [[s.m, s.n, -(-s.k // step)] for s in shapes]
        tiles = schedule(products, kernel.side, blocks)
        assert np.bincount(tiles.block, tiles.steps).max() == steps


def test_plans_know_the_compiled_tiles(schedules):
    compiled = {name: [] for name in ("float64", "complex64", "complex128")}
    names = dict(zip(("f64", "c64", "c128"), compiled, strict=True))
    for config in schedules.kernel_configs():
        op, _, name = config.pop("op").rpartition("_")
        if op == "grouped_gemm" and name in names:
            compiled[names[name]].append(TileConfig(**config))
    assert compiled == {
        dtype: [kernel.tile for kernel in SQUARES if dtype in kernel.lhs] for dtype in compiled
    }
