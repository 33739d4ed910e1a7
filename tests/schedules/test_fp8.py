"""The schedules of FP8 products, run on the CPU by the code that runs on the device."""

from __future__ import annotations

import numpy as np
import pytest

from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from tests.support import group_sizes as sizes_of
from tests.support.oracle import group_rows

FIELDS = "unit rank owner batch group begin extent head m n k_tiles share".split()
TILE = dict(tile_m=128, tile_n=256, cluster=2)
BLOCK = 128


def blocks(size):
    return -(-size // BLOCK)


def padded_starts(sizes: np.ndarray, offset: int, local_groups: int, m: int) -> np.ndarray:
    """Returns the first row of each local group in the padded operands."""
    rows = np.array(group_rows(sizes, 0, len(sizes), m))
    starts = BLOCK * np.cumsum([0, *blocks(rows[:, 1] - rows[:, 0])])
    index = np.clip(np.arange(local_groups) + offset, 0, len(sizes))
    return starts[index]


@pytest.mark.parametrize(
    "tile", [c.tile for c in plan_fp8.NONCONTRACTING_KERNELS if not c.tile.stream_k], ids=str
)
def test_rows_that_stay(tile, schedules, rng):
    """Each row is in one tile of each column of tiles. Only rows of a local group have steps."""
    for _ in range(3000):
        m = int(rng.choice([1, 63, 64, 65, 128, 129, 700, 2500]))
        groups = int(rng.choice([1, 2, 8, 31, 32, 33, 64, 65, 100]))
        local = int(rng.integers(1, groups + 1))
        batches = int(rng.integers(1, 4))
        k, n = int(rng.choice([1, 128, 129, 1000])), int(rng.choice([8, 128, 136, 256, 264, 1304]))
        sizes = np.array([sizes_of.any_kind(rng, m, groups) for _ in range(batches)], np.int32)
        offsets = rng.integers(-local, groups + 1, batches).astype(np.int32)
        extents = dict(batches=batches, local_groups=local, m=m, k=k, n=n)
        clusters = int(rng.choice([1, 2, 5]))
        tiles = np.rec.fromarrays(
            schedules.scaled_ragged_noncontracting_tiles(
                sizes, offsets, clusters=clusters, **extents, **tile.sizes()
            ).T,
            names=FIELDS,
        )
        np.testing.assert_array_equal(tiles.owner, tiles.unit % clusters)
        tiles = tiles[tiles.n < n]
        # Each tile adds its steps where its rows begin and subtracts them where its rows end.
        steps = np.zeros((2, batches, -(-n // tile.tile_n), m + 1), int)
        begin = tiles.begin + tiles.m
        end = tiles.begin + np.minimum(tiles.m + tile.tile_m, tiles.extent)
        end = np.maximum(begin, end)
        has_steps = tiles.k_tiles > 0
        for rows, sign in ((begin, 1), (end, -1)):
            at = tiles.batch, tiles.n // tile.tile_n, rows
            np.add.at(steps[0], at, sign)
            np.add.at(steps[1], at, sign * np.where(has_steps, tiles.group + 1, 0))
        covered, owner = steps.cumsum(-1)[..., :m]
        assert (covered == 1).all()
        assert (tiles.k_tiles[has_steps] == blocks(k)).all()
        for batch in range(batches):
            want = np.full(m, -1)
            windows = group_rows(sizes[batch], offsets[batch], local, m)
            for group, (start, end) in enumerate(windows):
                want[start:end] = group
            assert (owner[batch] == want + 1).all()


def test_rows_that_are_contracted(schedules, rng):
    """Each tile of each group is there once. In the operands, groups begin at multiples of 128."""
    for _ in range(3000):
        m = int(rng.choice([1, 127, 128, 129, 700, 2500]))
        groups = int(rng.choice([1, 2, 8, 31, 32, 33, 64, 65, 100]))
        local = int(rng.integers(1, groups + 1))
        batches = int(rng.integers(1, 4))
        k, n = int(rng.choice([1, 128, 129, 1000])), int(rng.choice([8, 256, 264, 1304]))
        sizes = np.array([sizes_of.any_kind(rng, m, groups) for _ in range(batches)], np.int32)
        offsets = rng.integers(-local, groups + 1, batches).astype(np.int32)
        tiles = np.rec.fromarrays(
            schedules.scaled_ragged_contracting_tiles(
                sizes,
                offsets,
                batches=batches,
                local_groups=local,
                m=m,
                k=k,
                n=n,
                clusters=2,
                **TILE,
            ).T,
            names=FIELDS,
        )
        tiles = tiles[tiles.n < n]
        at = tiles.batch, tiles.group, tiles.m // TILE["tile_m"], tiles.n // TILE["tile_n"]
        covered = np.zeros((batches, local, blocks(k), -(-n // TILE["tile_n"])), int)
        np.add.at(covered, at, 1)
        assert (covered == 1).all()

        windows = np.array(
            [group_rows(s, o, local, m) for s, o in zip(sizes, offsets, strict=True)]
        )
        extents = windows[..., 1] - windows[..., 0]
        starts = np.array(
            [padded_starts(s, o, local, m) for s, o in zip(sizes, offsets, strict=True)]
        )
        here = tiles.batch, tiles.group
        np.testing.assert_array_equal(tiles.extent, extents[here])
        np.testing.assert_array_equal(tiles.k_tiles, blocks(extents[here]))
        own = tiles.extent > 0
        np.testing.assert_array_equal(tiles.begin[own], starts[here][own])
