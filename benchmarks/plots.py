"""Two plots of results: a roofline, and speed relative to the best grouped peer.

Where no grouped peer was measured, a dense cuBLAS product takes its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.harness.results_file import load

matplotlib.use("Agg")
# The backend has to be chosen first.
from matplotlib import pyplot as plt  # noqa: E402

from benchmarks.plots_rank_k import updates  # noqa: E402
from benchmarks.rank_k import UPDATES  # noqa: E402

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, SKY, BLACK = "#0072B2", "#E69F00", "#56B4E9", "#000000"
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
# A peer that is many times slower must not squeeze the rest of the plot.
LARGEST_RATIO = 3.0


def roofline(results: Mapping) -> plt.Figure:
    """TFLOP/s over arithmetic intensity: ours, the best grouped peer, and the measured roofs.

    The roofs are the fastest copy and the fastest dense product of the same run.
    """
    records = _compared(results)
    bandwidth = _best_of(records, "copy", "tbps")
    peak = _best_of(records, "cublas_dense", "tflops")
    intensity = np.array([record["flops"] / record["bytes"] for record in records])

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    span = np.geomspace(intensity.min() / 2, intensity.max() * 2, 200)
    axes.plot(span, np.minimum(peak, span * bandwidth), color=BLACK, linewidth=1)
    roofs = f"copy {bandwidth:.2f} TB/s, dense cuBLAS {peak:.0f} TFLOP/s"
    axes.annotate(roofs, (0.02, 0.95), xycoords="axes fraction")
    for record, x in zip(records, intensity, strict=True):
        style = {"marker": OP_MARKERS[record["op"]], "linestyle": "none"}
        peer = record["peers"][compared_with(record)[0]]
        axes.plot(x, peer["tflops"], color=ORANGE, fillstyle="none", **style)
        axes.plot(x, record["peers"]["ours"]["tflops"], color=BLUE, **style)
    for op in dict.fromkeys(record["op"] for record in records):
        axes.plot([], [], OP_MARKERS[op], color=BLUE, label=op)
    axes.plot([], [], "o", color=ORANGE, fillstyle="none", label="best peer")
    axes.set(xscale="log", yscale="log", title=_title(results))
    axes.set(xlabel="FLOP per byte of unavoidable traffic", ylabel="TFLOP/s")
    axes.legend(loc="lower right")
    return figure


def relative_speed(results: Mapping) -> plt.Figure:
    """A panel an op, a bar a case: our speed over the best grouped peer's, whose name it bears.

    Marks: over a cuBLAS loop, and over the floor.
    """
    records = _compared(results)
    ops = list(dict.fromkeys(record["op"] for record in records))
    cases = list(dict.fromkeys(_sizes(record) for record in records))
    size = (1.5 + 3.2 * len(ops), 1.8 + 0.24 * len(cases))
    figure, panels = plt.subplots(
        1, len(ops), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for axes, op in zip(panels[0], ops, strict=True):
        _relative_speed_panel(axes, [record for record in records if record["op"] == op], cases)
        axes.set_title(op)
    panels[0, 0].set_yticks(range(len(cases)), cases)
    panels[0, 0].set_ylim(len(cases) - 0.5, -0.5)
    figure.suptitle(_title(results))
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=1 if len(ops) < 3 else 3)
    return figure


def _relative_speed_panel(axes: plt.Axes, records: Sequence[Mapping], cases: Sequence[str]) -> None:
    rows = [cases.index(_sizes(record)) for record in records]
    best = [compared_with(record) for record in records]
    ratios = [ratio for _, ratio in best]
    axes.barh(rows, ratios, color=SKY, label="over the best peer")
    for row, (name, ratio) in zip(rows, best, strict=True):
        text = f"{name}  {ratio:.2f}"
        axes.text(LARGEST_RATIO - 0.03, row, text, ha="right", va="center", fontsize=7)
    for name, marker, color, label in (
        ("cublas_loop", "v", ORANGE, f"over a cuBLAS loop (up to {LARGEST_RATIO:g})"),
        ("floor", "|", BLACK, "of the floor (dense cuBLAS or memory traffic)"),
    ):
        values = [record["ratios"].get(name, np.nan) for record in records]
        axes.plot(values, rows, marker, color=color, linestyle="none", label=label)
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_xlim(0, LARGEST_RATIO)
    axes.set_xlabel(f"geometric mean {geometric_mean(ratios):.2f}")


def _sizes(record: Mapping) -> str:
    return f"{record['shape']['name']} {record['distribution']}"


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


def _title(results: Mapping) -> str:
    machine = results["machine"]
    return f"{results['device']}, JAX {machine['packages']['jax']}, commit {machine['commit']}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="+", help="JSON files of run, fp8 or rank_k, read as one"
    )
    paths = parser.parse_args(arguments).results
    results = load(paths)
    figures = {}
    if any(record["op"] in OP_MARKERS for record in results["cases"]):
        figures = {"roofline": roofline(results), "relative_speed": relative_speed(results)}
    if any(record["op"] in UPDATES for record in results["cases"]):
        figures["updates"] = updates(results, _title(results))
    for name, figure in figures.items():
        image = paths[0].with_name(f"{paths[0].stem}_{name}.png")
        figure.savefig(image, dpi=110)
        print(image)


if __name__ == "__main__":
    main()
