"""How evenly schedules spread the work, from the schedules themselves, on any machine.

python -m benchmarks.balance

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
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import rank_k
from benchmarks.harness.cases import DISTRIBUTIONS, Shape, group_sizes, select_shapes
from benchmarks.harness.command import Command
from benchmarks.harness.session import Job, Session
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
    longest = int((-(-sizes // TILE_K) + TILE_CHANGE).max())
    owners, _, begin, end, _ = _schedules.chain_ranges(units, length, longest, CLUSTERS).T
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


def gradient_record(shape: Shape, distribution: str, draws: int, seed: int) -> dict:
    """A record of the means over several draws of the sizes; `cut` is missing where none is cut."""
    sizes = [
        group_sizes(distribution, shape.groups, shape.rows, seed + draw) for draw in range(draws)
    ]
    found = [(*imbalance(shape, each), cut_imbalance(shape, each)) for each in sizes]
    means = dict(zip(("turns", "in_turn", "cut"), np.mean(found, axis=0).tolist(), strict=True))
    return {
        "case": f"{shape.name}/balance/{distribution}",
        "shape": dataclasses.asdict(shape),
        "op": "wgrad",
        "distribution": distribution,
        "imbalance": {name: x for name, x in means.items() if not math.isnan(x)},
        "peers": {},
        "ratios": {},
    }


def update_record(shape: rank_k.Shape) -> dict:
    """A record of a symmetric update."""
    triangle, everything = update_steps(shape)
    return {
        "case": f"{rank_k.named(shape)}/balance",
        "shape": dict(zip(("groups", "n", "k"), shape, strict=True))
        | {"name": rank_k.named(shape)},
        "op": "syrk",
        "busiest_steps": {"triangle": triangle, "all_tiles": everything},
        "peers": {},
        "ratios": {},
    }


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """The worst of each column."""
    gradients = [record["imbalance"] for record in records if "imbalance" in record]
    return {
        "wgrad": {
            f"{name}_max": max(found)
            for name in ("turns", "in_turn", "cut")
            if (found := [each[name] for each in gradients if name in each])
        }
    }


def texts(results: Mapping) -> list[str]:
    """A table of each kind."""
    gradients = [f"{'shape':16}{'distribution':14}{'turns':>8}{'in turn':>9}{'cut':>8}"]
    updates = [f"{'update':16}{'triangle':>10}{'all tiles':>11}"]
    for record in results["cases"]:
        name = f"{record['shape']['name']:16}"
        if "imbalance" in record:
            found = {"cut": math.nan} | record["imbalance"]
            numbers = f"{found['turns']:8.3f}{found['in_turn']:9.3f}{found['cut']:8.3f}"
            gradients.append(f"{name}{record['distribution']:14}{numbers}")
        else:
            steps = record["busiest_steps"]
            updates.append(f"{name}{steps['triangle']:>10}{steps['all_tiles']:>11}")
    return ["\n".join(gradients), "\n".join(updates)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Cases of weight gradients."""
    parser.add_argument("--shapes", nargs="+", default=["main", "fine"], metavar="NAME")
    parser.add_argument(
        "--distributions", nargs="+", default=["random", "zipf", "one_hot"], choices=DISTRIBUTIONS
    )
    parser.add_argument("--draws", type=int, default=5, help="lists of sizes to take the mean of")


def complete(options: argparse.Namespace) -> None:
    """Finds the shapes."""
    if options.dry_run:
        options.shapes, options.draws = ["tiny"], 1
    options.shapes = select_shapes(options.shapes)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job a case."""
    gradients = [
        Job(
            f"{shape.name}/balance/{distribution}",
            functools.partial(gradient_record, shape, distribution, options.draws, options.seed),
        )
        for shape in options.shapes
        for distribution in options.distributions
    ]
    updates = rank_k.TINY_SHAPES if options.dry_run else rank_k.BF16_SHAPES
    return gradients + [
        Job(f"{rank_k.named(shape)}/balance", functools.partial(update_record, shape))
        for shape in updates
    ]


COMMAND = Command(
    "benchmarks.balance",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    complete=complete,
    timed=False,
    time_limit=1200,
    summarize=summarize,
    texts=texts,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
