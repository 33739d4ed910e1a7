"""Two plots of a results file: a roofline, and speed relative to the best grouped peer."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.measure import best_grouped, geometric_mean

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (the backend has to be chosen first)

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, SKY, BLACK = "#0072B2", "#E69F00", "#56B4E9", "#000000"
OP_MARKERS = {
    "forward": "o",
    "forward_t": "s",
    "dgrad": "^",
    "dgrad_t": "v",
    "wgrad": "D",
    "wgrad_f32": "P",
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
        peer = record["peers"][best_grouped(record)[0]]
        axes.plot(x, peer["tflops"], color=ORANGE, fillstyle="none", **style)
        axes.plot(x, record["peers"]["ours"]["tflops"], color=BLUE, **style)
    for op in dict.fromkeys(record["op"] for record in records):
        axes.plot([], [], OP_MARKERS[op], color=BLUE, label=op)
    axes.plot([], [], "o", color=ORANGE, fillstyle="none", label="best grouped peer")
    axes.set(xscale="log", yscale="log", title=_title(results))
    axes.set(xlabel="FLOP per byte of unavoidable traffic", ylabel="TFLOP/s")
    axes.legend(loc="lower right")
    return figure


def relative_speed(results: Mapping) -> plt.Figure:
    """A bar a case: our speed over the best grouped peer's; marks: over the loop and the floor."""
    records = _compared(results)
    ratios = [best_grouped(record)[1] for record in records]
    rows = np.arange(len(records))

    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.24 * len(records)), layout="constrained")
    axes.barh(rows, ratios, color=SKY, label="over the best grouped peer")
    for row, ratio in zip(rows, ratios, strict=True):
        axes.text(0.02, row, f"{ratio:.2f}", va="center", fontsize=8)
    for name, marker, color, label in (
        ("cublas_loop", "v", ORANGE, f"over a cuBLAS loop (up to {LARGEST_RATIO:g})"),
        ("floor", "|", BLACK, "of the floor (dense cuBLAS or memory traffic)"),
    ):
        values = [record["ratios"].get(name, np.nan) for record in records]
        axes.plot(values, rows, marker, color=color, linestyle="none", label=label)
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.set_yticks(rows, [f"{record['case']}  ({best_grouped(record)[0]})" for record in records])
    axes.set(xlim=(0, LARGEST_RATIO), ylim=(len(records) - 0.5, -0.5), title=_title(results))
    mean = geometric_mean(ratios)
    axes.set_xlabel(f"relative speed (geometric mean of the bars: {mean:.2f})")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _compared(results: Mapping) -> list[Mapping]:
    records = [record for record in results["cases"] if best_grouped(record)]
    if not records:
        raise ValueError("the results have no case with both our time and a grouped peer's")
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
    parser.add_argument("results", type=Path, help="JSON file that benchmarks.run wrote")
    path = parser.parse_args(arguments).results
    results = json.loads(path.read_text())
    for plot in (roofline, relative_speed):
        image = path.with_name(f"{path.stem}_{plot.__name__}.png")
        plot(results).savefig(image, dpi=150)
        print(image)


if __name__ == "__main__":
    main()
