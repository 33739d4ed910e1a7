"""How evenly the schedule of weight gradients spreads the work, from the schedule itself, on any
machine.

A unit of work takes the steps of its group and about two more for the change of tiles. The clusters
work until the last of them is done: *turns* is that time over the mean, for the turns that the
kernels take; *in turn* is the same if cluster i took every unit i, i + clusters, and so on; *cut*,
where the kernel cuts tiles because the sizes are too unequal for turns, is that of the pieces, over
the mean of groups that have rows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np

from benchmarks.cases import DISTRIBUTIONS, Shape, group_sizes, select_shapes
from jax_grouped_gemm import _extension

CLUSTERS = 66  # of two CTAs each on an H200
TILE_CHANGE = 2  # in steps
ZEROS_COST = 4  # of a unit of an empty group, in steps, with 16-bit results
RANKS = 2
COLUMNS = "unit rank owner batch group begin extent head m n steps share".split()


def imbalance(shape: Shape, sizes: np.ndarray) -> tuple[float, float]:
    """The busiest cluster's time over the mean: with the kernels' turns, and in turn."""
    tiles = _extension.ragged_contracting_tiles(
        sizes[None],
        np.zeros(1, np.int32),
        batches=1,
        local_groups=shape.groups,
        m=shape.rows,
        k=shape.k,
        n=shape.n,
        tile_m=128,
        tile_n=256,
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
    rows, columns = -(-shape.k // 128), -(-shape.n // 256)
    units = rows // RANKS * columns + rows % RANKS * -(-columns // 2)
    length = _extension.worthwhile_chain_length(
        sizes[None],
        np.zeros(1, np.int32),
        batches=1,
        local_groups=shape.groups,
        m=shape.rows,
        units=units,
        zeros_cost=ZEROS_COST,
        most_sums=_extension.most_chain_sums(units, CLUSTERS),
        clusters=CLUSTERS,
    )
    if length == 0:
        return math.nan
    owners, _, begin, end, _ = _extension.chain_ranges(units, length, CLUSTERS).T
    loads = np.bincount(owners, np.minimum(end, length) - begin, minlength=CLUSTERS)
    return float(loads.max() / loads.mean())


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


if __name__ == "__main__":
    main()
