"""How evenly schedules spread the work, from the schedules themselves, on any machine.

Of weight gradients: a unit of work takes the steps of its group and about two more for the change
of tiles. The clusters work until the last of them is done: *turns* is that time over the mean, for
the turns that the kernels take; *in turn* is the same if cluster i took every unit i, i + clusters,
and so on; *cut*, where the kernel cuts tiles because the sizes are too unequal for turns, is that
of the pieces, over the mean of groups that have rows.

Of symmetric updates: the busiest cluster's steps with the schedule of the triangle, and with that
of all macro tiles in turn, where those on the other side of the diagonal are left as soon as they
are found, which is what grouped schedulers that know nothing of triangles do.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np

from benchmarks import rank_k
from benchmarks.cases import DISTRIBUTIONS, Shape, group_sizes, select_shapes
from jax_grouped_gemm import _schedules
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan

CLUSTERS = 66  # of two CTAs each on an H200
TILE_CHANGE = 2  # in steps
ZEROS_COST = 4  # of a unit of an empty group, in steps, with 16-bit results
RANKS = 2
TILE_M, TILE_N, TILE_K = 128, 256, 64
NARROW_STEPS = 2  # of a narrow tile, in a stage
COLUMNS = "unit rank owner batch group begin extent head m n steps share".split()


def imbalance(shape: Shape, sizes: np.ndarray) -> tuple[float, float]:
    """The busiest cluster's time over the mean: with the kernels' turns, and in turn."""
    tiles = _schedules.ragged_contracting_tiles(
        sizes[None],
        np.zeros(1, np.int32),
        batches=1,
        local_groups=shape.groups,
        m=shape.rows,
        k=shape.k,
        n=shape.n,
        tile_m=TILE_M,
        tile_n=TILE_N,
        cluster=RANKS,
        align=1,
        clusters=CLUSTERS,
    )[::RANKS]
    columns = dict(zip(COLUMNS, tiles.T, strict=True))
    costs = columns["steps"] + TILE_CHANGE

    def of(owners):
        loads = np.bincount(owners, weights=costs, minlength=CLUSTERS)
        return float(loads.max() / loads.mean())

    return of(columns["owner"]), of(columns["unit"] % CLUSTERS)


def cut_imbalance(shape: Shape, sizes: np.ndarray) -> float:
    """The same of tiles that are cut; not a number where the kernel computes whole ones."""
    rows, columns = -(-shape.k // TILE_M), -(-shape.n // TILE_N)
    units = rows // RANKS * columns + rows % RANKS * -(-columns // 2)
    length = _schedules.worthwhile_chain_length(
        sizes[None],
        np.zeros(1, np.int32),
        batches=1,
        local_groups=shape.groups,
        m=shape.rows,
        units=units,
        zeros_cost=ZEROS_COST,
        most_sums=_schedules.most_chain_sums(units, CLUSTERS),
        clusters=CLUSTERS,
    )
    if length == 0:
        return math.nan
    owners, _, begin, end, _ = _schedules.chain_ranges(units, length, CLUSTERS).T
    loads = np.bincount(owners, np.minimum(end, length) - begin, minlength=CLUSTERS)
    return float(loads.max() / loads.mean())


def update_steps(shape: rank_k.Shape) -> tuple[int, int]:
    """The busiest cluster's steps of syrk: with the schedule of the triangle, and of all tiles."""
    matrices, n, k = shape
    steps = -(-k // TILE_K)
    tile = rank_k_plan.RANK_K_TILE.sizes()
    halves = _schedules.rank_k_gains_by_halves(
        matrices, n, steps, upper=False, clusters=CLUSTERS, **tile
    )
    narrow = -(-steps // NARROW_STEPS)  # stages, each of which takes as long as a step
    stack = np.array([[matrices, n, steps, narrow, halves]], np.int32)
    tiles = _schedules.rank_k_tiles(stack, upper=False, clusters=CLUSTERS, **tile)[::RANKS]
    columns = dict(zip(COLUMNS, tiles.T, strict=True))
    triangle = np.bincount(columns["owner"], columns["steps"] + TILE_CHANGE)

    row, column = np.indices(2 * (-(-n // TILE_N),))
    costs = np.tile(np.where(column <= row, steps + TILE_CHANGE, 0).ravel(), matrices)
    everything = np.bincount(np.arange(costs.size) % CLUSTERS, costs)
    return int(triangle.max()), int(everything.max())


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["main", "fine"], metavar="NAME")
    parser.add_argument(
        "--distributions", nargs="+", default=["random", "zipf", "one_hot"], choices=DISTRIBUTIONS
    )
    parser.add_argument("--draws", type=int, default=5, help="lists of sizes to take the mean of")
    options = parser.parse_args(arguments)

    print(f"{'shape':16}{'distribution':14}{'turns':>8}{'in turn':>9}{'cut':>8}")
    for shape in select_shapes(options.shapes):
        for name in options.distributions:
            draws = [
                group_sizes(name, shape.groups, shape.rows, seed) for seed in range(options.draws)
            ]
            means = np.mean(
                [(*imbalance(shape, sizes), cut_imbalance(shape, sizes)) for sizes in draws], axis=0
            )
            turns, in_turn, cut = (f"{mean:.3f}" for mean in means)
            print(f"{shape.name:16}{name:14}{turns:>8}{in_turn:>9}{cut:>8}")

    print(f"\n{'update':16}{'triangle':>10}{'all tiles':>11}")
    for shape in rank_k.BF16_SHAPES:
        triangle, everything = update_steps(shape)
        print(f"{'x'.join(map(str, shape)):16}{triangle:>10}{everything:>11}")


if __name__ == "__main__":
    main()
