"""Assigns tiles of a list of products of unequal shapes to clusters.

The schedule is made at trace time by NumPy, because shapes and costs of tiles are static. The
functions repeat the search of the device to predict its balance. `longest_first` returns a schedule
that the device can follow instead. Rows of a schedule are rounds, columns are clusters, and entries
are numbers of units of work, -1 where a cluster has nothing left to do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_grouped_gemm._src.arrays import cdiv, round_up
from jax_grouped_gemm._src.plan import TileConfig

TILE_K = 64
BAND_TILES = 16  # tiles of rows that are swept together, see csrc/scheduler/raster.h

# Costs are in mainloop steps of a full tile of 128x256, which take 1040 cycles. Small tiles are
# bound by loading: a multiprocessor gets 38 bytes a cycle from L2. Changing tiles takes as long as
# two steps. All three were measured on an H200 (docs/notes/lists.md).
FULL_STEP_AREA = 128 * 256
FULL_STEP_BYTES = 1040 * 38
TILE_OVERHEAD = 2.0

# At the edges of a result, kernels skip the rows of a consumer, or half of the columns of a tile.
PART_ROWS, PART_COLUMNS = 64, 128
ROW_BYTES = 2 * TILE_K


class Shape(NamedTuple):
    """`g` products of [m, k] and [k, n]."""

    g: int
    m: int
    n: int
    k: int


class Units(NamedTuple):
    """All units of work of a list, problem by problem: a tile for each CTA of a cluster.

    Attributes:
      problem: the problem that a unit belongs to.
      number: number of the unit within its problem.
      cost: time of the unit, in steps.
    """

    problem: np.ndarray
    number: np.ndarray
    cost: np.ndarray


def list_units(shapes: Sequence[Shape], tile: TileConfig) -> Units:
    """Returns the units of every problem, in the order in which the kernel numbers them."""
    costs = [_unit_costs(shape, tile) for shape in shapes]
    return Units(
        problem=np.repeat(np.arange(len(shapes)), [len(cost) for cost in costs]),
        number=np.concatenate([np.arange(len(cost)) for cost in costs]),
        cost=np.concatenate(costs),
    )


def _unit_costs(shape: Shape, tile: TileConfig) -> np.ndarray:
    rows, columns = raster(cdiv(shape.m, tile.tile_m), cdiv(shape.n, tile.tile_n), tile.cluster)
    height = np.clip(shape.m - rows * tile.tile_m, 0, tile.tile_m)
    width = np.clip(shape.n - columns * tile.tile_n, 0, tile.tile_n)
    height, width = round_up(height, PART_ROWS), round_up(width, PART_COLUMNS)
    # Each CTA of a cluster loads a part of the operand that they share.
    share_lhs = rows[:, :1] == rows[:, -1:]
    loaded = np.where(share_lhs, height / tile.cluster + width, height + width / tile.cluster)
    step = np.maximum(height * width / FULL_STEP_AREA, loaded * ROW_BYTES / FULL_STEP_BYTES)
    cost = step.max(axis=1) * cdiv(shape.k, TILE_K) + TILE_OVERHEAD
    return np.tile(cost, shape.g)


def raster(m_tiles: int, n_tiles: int, cluster: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and columns of each unit's tiles, int [units, cluster], as in `raster.h`."""
    whole, odd = divmod(m_tiles, cluster)
    unit = np.arange(whole * n_tiles + odd * ((n_tiles + 1) // 2))
    bands = max(cdiv(whole, BAND_TILES // cluster), 1)
    band_rows = cdiv(whole, bands)
    band = np.minimum(unit // max(band_rows * n_tiles, 1), bands - 1)
    in_band = unit - band * band_rows * n_tiles
    is_last = band == bands - 1
    rows = np.where(is_last, whole - band * band_rows, band_rows)
    pair, in_pair = np.divmod(in_band, 2 * rows + np.where(is_last, odd, 0))
    in_odd_row = in_pair >= rows * np.minimum(2, n_tiles - 2 * pair)
    column, row = np.divmod(in_pair, np.maximum(rows, 1))
    rank = np.arange(cluster)
    row = np.where(in_odd_row, whole, band * band_rows + row)[:, None] * cluster
    column = (2 * pair + np.where(in_odd_row, 0, column))[:, None]
    odd_row = in_odd_row[:, None]
    return row + np.where(odd_row, 0, rank), column + np.where(odd_row, rank, 0)


def in_turn(num_units: int, clusters: int, *, serpentine: bool) -> np.ndarray:
    """Assigns units in order. If `serpentine`, every second round begins with the last cluster."""
    schedule = np.full((cdiv(num_units, clusters), clusters), -1)
    schedule.ravel()[:num_units] = np.arange(num_units)
    if serpentine:
        schedule[1::2] = schedule[1::2, ::-1].copy()
    return schedule


def longest_first(cost: np.ndarray, clusters: int) -> np.ndarray:
    """Assigns units by falling cost, each to the cluster that is free first (Graham, 1969).

    Units of equal cost keep their order, so that units that share operands run at the same time.
    """
    free_at = [(0.0, cluster) for cluster in range(clusters)]
    lists: list[list[int]] = [[] for _ in range(clusters)]
    for unit in np.argsort(-cost, kind="stable").tolist():
        time, cluster = heapq.heappop(free_at)
        lists[cluster].append(unit)
        heapq.heappush(free_at, (time + cost[unit], cluster))
    schedule = np.full((max(map(len, lists)), clusters), -1)
    for cluster, units in enumerate(lists):
        schedule[: len(units), cluster] = units
    return schedule


def busy_steps(schedule: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Returns the steps that each cluster works."""
    return np.where(schedule < 0, 0, cost[schedule]).sum(axis=0)
