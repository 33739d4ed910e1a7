"""Plots of results: a roofline, speed relative to the best grouped peer, symmetric updates, and
layers over several GPUs.

python -m benchmarks.plots benchmarks/results/h200_main.json

Where no grouped peer was measured, a dense cuBLAS product takes its place. Figures are as wide as a
page of a repository shows them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.expert_parallel_plots import FORWARD, STEP, draw_parts, draw_scaling
from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.harness.peer import Role
from benchmarks.harness.results_file import load
from benchmarks.rank_k import UPDATES

matplotlib.use("Agg")
# The backend has to be chosen first.
from matplotlib import pyplot as plt  # noqa: E402

# Inches and dots an inch: 900 dots.
WIDTH, DPI = 9, 100
COLUMNS = 2

# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, SKY, BLACK = "#0072B2", "#E69F00", "#56B4E9", "#000000"
PALETTE = (BLUE, ORANGE, SKY, "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#999999")
OP_MARKERS = {
    "forward": "o",
    "forward_t": "s",
    "dgrad": "^",
    "dgrad_t": "v",
    "wgrad": "D",
    "wgrad_f32": "P",
    "fp8_forward": "o",
    "fp8_dgrad": "^",
    "fp8_wgrad": "D",
}
SHORT_NAMES = {
    "torch_grouped_mm": "torch",
    "torch_scaled_grouped_mm": "torch",
    "quack": "QuACK",
    "pallas_mgpu": "Pallas",
    "cublas_dense": "dense",
    "cublas_loop": "a cuBLAS loop",
}
# A peer that is many times slower must not squeeze the rest of the plot.
LARGEST_RATIO = 3.0


def panels(count: int, heights: Sequence[float]) -> tuple[plt.Figure, list[plt.Axes]]:
    """A figure of the page's width with `count` panels, whose rows have so many inches each."""
    rows = -(-count // COLUMNS)
    figure, grid = plt.subplots(
        rows,
        COLUMNS,
        figsize=(WIDTH, sum(heights) + 0.9),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    # The labels of neighbours stay apart.
    figure.get_layout_engine().set(w_pad=0.12)
    found = list(grid.ravel())
    for unused in found[count:]:
        unused.axis("off")
    return figure, found[:count]


def roofline(results: Mapping) -> plt.Figure:
    """TFLOP/s over arithmetic intensity: ours, the best grouped peer, and the measured roofs.

    The roofs are the fastest copy and the fastest dense product of the same run.
    """
    records = _compared(results)
    bandwidth = _best_of(records, "copy", "tbps")
    peak = _best_of(records, "cublas_dense", "tflops")
    intensity = np.array([record["flops"] / record["bytes"] for record in records])

    figure, axes = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    span = np.geomspace(intensity.min() / 2, intensity.max() * 2, 200)
    roofs = f"copy {bandwidth:.2f} TB/s, dense cuBLAS {peak:.0f} TFLOP/s"
    axes.plot(span, np.minimum(peak, span * bandwidth), color=BLACK, linewidth=1, label=roofs)
    for record, x in zip(records, intensity, strict=True):
        style = {"marker": OP_MARKERS[record["op"]], "linestyle": "none"}
        peer = record["peers"][compared_with(record)[0]]
        axes.plot(x, peer["tflops"], color=ORANGE, fillstyle="none", **style)
        axes.plot(x, record["peers"]["ours"]["tflops"], color=BLUE, **style)
    for op in dict.fromkeys(record["op"] for record in records):
        axes.plot([], [], OP_MARKERS[op], color=BLUE, label=op)
    axes.plot([], [], "o", color=ORANGE, fillstyle="none", label="best peer")
    axes.set(xscale="log", yscale="log", title=title(results))
    axes.set(xlabel="FLOP per byte of unavoidable traffic", ylabel="TFLOP/s")
    axes.legend(loc="lower right")
    return figure


def relative_speed(results: Mapping) -> plt.Figure:
    """A panel an op, a bar a case: our speed over the best grouped peer's.

    That peer's name and the ratio stand at the bar's right end, outside of the axes. Marks: over a
    cuBLAS loop, and over the floor.
    """
    records = _compared(results)
    ops = list(dict.fromkeys(record["op"] for record in records))
    of_ops = [[record for record in records if record["op"] == op] for op in ops]
    several = len({record["distribution"] for record in records}) > 1
    rows = [of_ops[i : i + COLUMNS] for i in range(0, len(ops), COLUMNS)]
    heights = [0.8 + 0.24 * max(map(len, row)) for row in rows]
    figure, found = panels(len(ops), heights)
    for axes, op, of_op in zip(found, ops, of_ops, strict=True):
        _relative_speed_panel(axes, of_op, several)
        axes.set_title(op)
    figure.suptitle(title(results))
    _legend(figure, found[0])
    return figure


def _relative_speed_panel(axes: plt.Axes, records: Sequence[Mapping], several: bool) -> None:
    rows = np.arange(len(records))
    best = [compared_with(record) for record in records]
    ratios = [ratio for _, ratio in best]
    axes.barh(rows, np.minimum(ratios, LARGEST_RATIO), color=SKY, label="over the best peer")
    for name, marker, color, label in (
        ("cublas_loop", "v", ORANGE, f"over a cuBLAS loop (> {LARGEST_RATIO:g} at the edge)"),
        ("floor", "|", BLACK, "of the floor (dense cuBLAS or traffic)"),
    ):
        values = np.array([record["ratios"].get(name, np.nan) for record in records])
        shown = np.minimum(values, LARGEST_RATIO - 0.05)
        axes.plot(shown, rows, marker, color=color, linestyle="none", label=label)
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set(xlim=(0, LARGEST_RATIO), ylim=(len(records) - 0.5, -0.5))
    axes.set_xlabel(f"geometric mean {geometric_mean(ratios):.2f}")
    axes.set_yticks(rows, [case_label(record, several) for record in records], fontsize=8)
    right = axes.twinx()
    right.set_ylim(axes.get_ylim())
    labels = [f"{SHORT_NAMES.get(name, name)} {ratio:.2f}" for name, ratio in best]
    right.set_yticks(rows, labels, fontsize=8)
    right.tick_params(length=0)


def case_label(record: Mapping, several: bool) -> str:
    """A case's shape, with the distribution of its sizes where there are several."""
    name = record["shape"]["name"]
    return f"{name} {record['distribution']}" if several else name


def updates(results: Mapping) -> plt.Figure:
    """A panel an update, a group of bars a shape: over each expression or call that it replaces."""
    records = [record for record in results["cases"] if record["op"] in UPDATES]
    ops = list(dict.fromkeys(record["op"] for record in records))
    of_ops = [[record for record in records if record["op"] == op] for op in ops]
    names = list(dict.fromkeys(name for record in records for name in _others(record)))
    colors = dict(zip(names, PALETTE, strict=False))
    rows = [of_ops[i : i + COLUMNS] for i in range(0, len(ops), COLUMNS)]
    heights = [0.8 + 0.13 * max(_bars(of_op) for of_op in row) for row in rows]
    figure, found = panels(len(ops), heights)
    for axes, op, of_op in zip(found, ops, of_ops, strict=True):
        _updates_panel(axes, of_op, colors)
        axes.set_title(op)
    figure.suptitle(title(results))
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    labels = [f"over {SHORT_NAMES.get(name, name)}" for name in colors]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    return figure


def expert_parallel(results: Mapping) -> plt.Figure:
    """Scaling, predicted and measured, and what the time of a call is made of."""
    figure, grid = panels(4, [3.6, 2.6])
    for column, op in enumerate((FORWARD, STEP)):
        draw_scaling(grid[column], results["cases"], op, PALETTE)
        draw_parts(grid[COLUMNS + column], results["cases"], op, PALETTE)
    figure.suptitle(title(results))
    return figure


def _others(record: Mapping) -> list[str]:
    """Whom a record has ratios to, but for our own variants."""
    peers = record["peers"]
    return [
        name
        for name in record["ratios"]
        if peers.get(name, {}).get("role") not in (None, Role.VARIANT)
    ]


def _bars(records: Sequence[Mapping]) -> int:
    return sum(1 + len(_others(record)) for record in records)


def _updates_panel(axes: plt.Axes, records: Sequence[Mapping], colors: Mapping) -> None:
    ticks, position = [], 0
    for record in records:
        others = _others(record)
        for offset, name in enumerate(others):
            axes.barh(position + offset, record["ratios"][name], color=colors[name])
        ticks.append(position + (len(others) - 1) / 2)
        position += len(others) + 1
    axes.set_yticks(ticks, [record["shape"]["name"] for record in records], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_xlabel("times as fast")


def _legend(figure: plt.Figure, axes: plt.Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)


def compared_with(record: Mapping) -> tuple[str, float] | None:
    """The peer that a case is plotted against and its ratio to us; None without one."""
    dense = record["ratios"].get("cublas_dense")
    return best_grouped(record) or (("cublas_dense", dense) if dense else None)


def _compared(results: Mapping) -> list[Mapping]:
    records = [
        record
        for record in results["cases"]
        if record["op"] in OP_MARKERS and compared_with(record)
    ]
    if not records:
        raise ValueError("the results have no case with both our time and a peer's")
    return records


def _best_of(records: Sequence[Mapping], peer: str, number: str) -> float:
    values = [
        record["peers"][peer][number]
        for record in records
        if number in record["peers"].get(peer, {})
    ]
    if not values:
        raise ValueError(f"the results have no measurement of {peer}, which is one of the roofs")
    return max(values)


def title(results: Mapping) -> str:
    """What was measured, on what."""
    jax_version = results["machine"]["packages"]["jax"]
    return f"{results['device']}, JAX {jax_version}, commit {results['commit']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "results", type=Path, nargs="+", help="JSON files of one command, read as one"
    )
    paths = parser.parse_args(arguments).results
    results = load(paths)
    figures = {}
    if any(record["op"] in OP_MARKERS for record in results["cases"]):
        figures = {"roofline": roofline(results), "relative_speed": relative_speed(results)}
    if any(record["op"] in UPDATES for record in results["cases"]):
        figures["updates"] = updates(results)
    if any(record["op"] in (FORWARD, STEP) for record in results["cases"]):
        figures["scaling"] = expert_parallel(results)
    for name, figure in figures.items():
        image = paths[0].with_name(f"{paths[0].stem}_{name}.png")
        figure.savefig(image, dpi=DPI)
        print(image)


if __name__ == "__main__":
    main()
