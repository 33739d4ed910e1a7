"""How evenly the schedule of weight gradients spreads the work, from the schedule itself, on any
machine.

A unit of work takes the steps of its group and about two more for the change of tiles. The clusters
work until the last of them is done: *turns* is that time over the mean, for the turns that the
kernels take; *in turn* is the same if cluster i took every unit i, i + clusters, and so on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.cases import DISTRIBUTIONS, Shape, group_sizes, select_shapes
from jax_grouped_gemm import _extension

CLUSTERS = 66  # of two CTAs each on an H200
TILE_CHANGE = 2  # in steps
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["main", "fine"], metavar="NAME")
    parser.add_argument(
        "--distributions", nargs="+", default=["random", "zipf", "one_hot"], choices=DISTRIBUTIONS
    )
    parser.add_argument("--draws", type=int, default=5, help="lists of sizes to take the mean of")
    options = parser.parse_args(arguments)

    print(f"{'shape':16}{'distribution':14}{'turns':>8}{'in turn':>9}")
    for shape in select_shapes(options.shapes):
        for name in options.distributions:
            draws = [
                imbalance(shape, group_sizes(name, shape.groups, shape.rows, seed))
                for seed in range(options.draws)
            ]
            turns, in_turn = np.mean(draws, axis=0)
            print(f"{shape.name:16}{name:14}{turns:8.3f}{in_turn:9.3f}")


if __name__ == "__main__":
    main()
