"""Draws the pictures of README.md and docs/ from the recorded results.

python -m benchmarks.pictures          # after recording anew; writes docs/images

`benchmarks.plots` draws any results; this draws those that the pages show.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import plots, quotes
from benchmarks.harness.cases import SHAPES
from benchmarks.harness.results_file import load
from benchmarks.plots import BLACK, BLUE, DPI, ORANGE, PALETTE, WIDTH, plt
from benchmarks.quotes_first_page import PROJECTIONS
from benchmarks.records_by_topic import memory_of

IMAGES = Path(__file__).parents[1] / "docs" / "images"
# Products of published models, of which stock JAX's time and memory are recorded.
MODELS = ("mixtral_up", "dsv3_up", "qwen3_up", "qwen3_down")
LAYERS = {"mixtral": "Mixtral 8x7B", "qwen3_30b": "Qwen3-30B-A3B", "gptoss": "GPT-OSS"}


def beside_stock() -> plt.Figure:
    """Time and temporary memory of products, of layers and of a training step, ours and with
    `jax.lax.ragged_dot`."""
    figure, (times, memory) = plt.subplots(
        1, 2, figsize=(WIDTH, 5.4), layout="constrained", sharey=True
    )
    figure.get_layout_engine().set(w_pad=0.1)
    stock_ms, ours_ms, stock_bytes, ours_bytes = [], [], [], []
    for shape in MODELS:
        case = f"{shape}/forward/random"
        stock_ms.append(quotes.cases("stock")[case]["peers"]["stock"]["median_us"] / 1e3)
        ours_ms.append(quotes.ours(quotes.cases("ragged")[case])["median_us"] / 1e3)
        stock_bytes.append(memory_of("stock", shape, "forward"))
        ours_bytes.append(memory_of("ours", shape, "forward"))
    layers = quotes.cases("layers_stock").values()
    (step,) = quotes.cases("step").values()
    for case in (*layers, step):
        for peer, ms, count in (("stock", stock_ms, stock_bytes), ("ours", ours_ms, ours_bytes)):
            ms.append(case["peers"][peer]["median_us"] / 1e3)
            count.append(case["peers"][peer]["temporary_bytes"])
    _pairs(times, stock_ms, ours_ms, lambda ms: f"{ms:.1f} ms")
    times.set(title="time", xlabel="ms, log scale")
    _pairs(memory, stock_bytes, ours_bytes, _as_memory)
    memory.set(title="temporary memory", xlabel="bytes, log scale")
    labels = [*map(_with_sizes, MODELS), *map(_layer_label, layers), _training_label(step)]
    times.set_yticks(range(len(labels)), labels, fontsize=9)
    times.invert_yaxis()
    device = load([quotes.RESULTS / "h200_main.json"])["device"]
    figure.suptitle(f"Ragged products, layers and a step of training in bf16, one {device}")
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _with_sizes(name: str) -> str:
    shape = SHAPES[name]
    return f"{PROJECTIONS[name]}\n{shape.groups} experts, {shape.rows} rows, {shape.k} to {shape.n}"


def _layer_label(case: Mapping) -> str:
    shape = case["shape"]
    name = f"layer of {LAYERS[shape['name']]}, with gradients"
    return f"{name}\n{shape['top_k']} of {shape['experts']} experts, {shape['tokens']} tokens"


def _training_label(step: Mapping) -> str:
    shape, parameters = step["shape"], quotes.ours(step)["run"]["num_parameters"]
    name = f"training, {parameters / 1e9:.1f} B parameters"
    return f"{name}\n{shape['batch']} sequences of {shape['length']}"


def _pairs(
    axes: plt.Axes, stock: Sequence[float], ours: Sequence[float], text: Callable[[float], str]
) -> None:
    rows = np.arange(len(stock))
    for offset, values, color, label in (
        (-0.2, stock, ORANGE, "jax.lax.ragged_dot"),
        (0.2, ours, BLUE, "jax_grouped_gemm"),
    ):
        bars = axes.barh(rows + offset, values, 0.36, color=color, label=label)
        axes.bar_label(bars, [text(value) for value in values], padding=3, fontsize=9)
    low, high = min(*stock, *ours), max(*stock, *ours)
    # Room for the shortest bar to be seen, and for the label of the longest.
    span = np.log10(high / low)
    axes.set(xscale="log", xlim=(low / 10 ** (0.15 * span), high * 10 ** (0.35 * span)))
    axes.spines[["top", "right"]].set_visible(False)


def _as_memory(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def layer() -> plt.Figure:
    """Where the time of a whole layer goes, forward and with its gradients, beside QuACK's."""
    results = load([quotes.RESULTS / "h200_moe.json"])
    beside_quack = quotes.cases("layers_quack")
    cases = [beside_quack.get(case["case"], case) for case in results["cases"]]
    parts = list(dict.fromkeys(part for case in cases for part in quotes.ours(case)["parts_us"]))
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH, 6.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    for axes, op, title in zip(
        panels, ("moe_forward", "moe_step"), ("forward", "forward and backward"), strict=True
    ):
        _layer_panel(axes, [case for case in cases if case["op"] == op], parts)
        axes.set(title=title, xlabel="ms")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{plots.title(results)}; beside QuACK {quotes.commits('layers_quack')}")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _layer_panel(axes: plt.Axes, cases: Sequence[Mapping], parts: Sequence[str]) -> None:
    rows = np.arange(len(cases))
    quack = [_fastest_ms(case, "quack", "quack_tuned") for case in cases]
    height, offset = (0.36, -0.19) if any(quack) else (0.7, 0)
    left = np.zeros(len(cases))
    for part, color in zip(parts, (*PALETTE, BLACK), strict=False):
        values = np.array([quotes.ours(case)["parts_us"].get(part, 0) for case in cases]) / 1e3
        axes.barh(rows + offset, values, height, left, color=color, label=part)
        left += values
    if any(quack):
        style = dict(color="white", edgecolor=BLACK, hatch="//")
        axes.barh(rows - offset, quack, height, label="QuACK, the faster way", **style)
    axes.set_yticks(rows, [case["shape"]["name"] for case in cases])


def _fastest_ms(case: Mapping, *peers: str) -> float:
    """The least time of the peers that were measured; 0 if none was."""
    found = (case["peers"].get(name, {}).get("median_us") for name in peers)
    return min((us / 1e3 for us in found if us), default=0.0)


def losses() -> plt.Figure:
    """Training losses in bf16 and in FP8 of one seed, and their ratios of all; smoothed."""
    cases = quotes.cases("training").values()
    found = sorted((x for x in cases if x["recipe"] == "blockwise"), key=lambda x: x["seed"])
    figure, (curves, ratios) = plt.subplots(1, 2, figsize=(WIDTH, 3.6), layout="constrained")
    for case, color in zip(found, PALETTE, strict=False):
        runs = (case["peers"][peer]["run"]["curve"] for peer in ("ours_bf16", "ours"))
        bf16, fp8 = (np.convolve(run, np.ones(WINDOW) / WINDOW, "valid") for run in runs)
        steps = np.arange(len(bf16)) + WINDOW
        if case is found[0]:
            curves.plot(steps, bf16, color=ORANGE, label="bf16")
            curves.plot(steps, fp8, "--", color=BLUE, label="FP8")
        ratios.plot(steps, fp8 / bf16, color=color, label=f"seed {case['seed']}")
    ratios.axhline(1, color=BLACK, linewidth=1)
    curves.set(title=f"seed {found[0]['seed']}", ylabel="training loss, nats a byte")
    ratios.set(title="FP8 over bf16")
    for axes in (curves, ratios):
        axes.set_xlabel(f"step (mean of {WINDOW})")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend()
    return figure


def muon() -> plt.Figure:
    """Whole steps of optimisers, in milliseconds."""
    found = [case for case in quotes.cases("muon").values() if case["op"] == "step"]
    labels = {"adamw": "AdamW", "ours": "ours", "optax_muon": "optax.contrib.muon"}
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6), layout="constrained")
    rows, height = np.arange(len(found)), 0.8 / len(labels)
    for i, (peer, label) in enumerate(labels.items()):
        ms = [case["peers"][peer]["median_us"] / 1e3 for case in found]
        bars = axes.barh(rows + (i - 1) * height, ms, height, color=PALETTE[i], label=label)
        axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(rows, [case["shape"]["name"] for case in found])
    axes.invert_yaxis()
    axes.set(xlabel="ms a step, H200", title="Steps of an optimiser")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    return figure


WINDOW = 20


def _of(drawing: Callable, *stems: str) -> Callable[[], plt.Figure]:
    return lambda: drawing(load([quotes.RESULTS / f"{stem}.json" for stem in stems]))


PICTURES: dict[str, Callable[[], plt.Figure]] = {
    "beside_stock": beside_stock,
    "relative_speed": _of(plots.relative_speed, "h200_main"),
    "roofline": _of(plots.roofline, "h200_main"),
    "updates": _of(plots.updates, "h200_rank_k"),
    "layer": layer,
    "losses": losses,
    "muon": muon,
    "scaling": _of(plots.expert_parallel, "h200_x2_expert_parallel"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", help=f"which, by default all: {', '.join(PICTURES)}", metavar="name"
    )
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where to")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(PICTURES)
    if unknown:
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        path = options.folder / f"{name}.png"
        PICTURES[name]().savefig(path, dpi=DPI)
        print(path)


if __name__ == "__main__":
    main()
