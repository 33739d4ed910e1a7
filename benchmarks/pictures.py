"""Draws the pictures of README.md and docs/ from the recorded results.

python -m benchmarks.pictures          # after new records; writes docs/images

Pictures are as wide as a page of a repository.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

from benchmarks.harness.cases import SHAPES
from benchmarks.harness.command import parser_of
from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.harness.peer import Role
from benchmarks.harness.results_file import load
from benchmarks.quotes import PROJECTIONS
from benchmarks.rank_k import UPDATES
from benchmarks.records_by_topic import RESULTS, cases, memory_of, ours

matplotlib.use("Agg")
# The backend has to be chosen first.
from matplotlib import pyplot as plt  # noqa: E402

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, DPI = 9, 100  # inches, and dots per inch
COLUMNS = 2
# Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, SKY, BLACK = "#0072B2", "#E69F00", "#56B4E9", "#000000"
PALETTE = (BLUE, ORANGE, SKY, "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#999999")
OP_MARKERS = {"forward": "o", "dgrad": "^", "wgrad": "D", "wgrad_f32": "P"}
SHORT_NAMES = {
    "torch_grouped_mm": "torch",
    "quack": "QuACK",
    "pallas_mgpu": "Pallas",
    "cublas_loop": "a cuBLAS loop",
}
# Larger ratios are cut off, so that a very slow peer does not squeeze the rest of the plot.
LARGEST_RATIO = 3.0
# Products of published models for which stock JAX's time and memory are recorded.
MODELS = ("mixtral_up", "dsv3_up", "qwen3_up", "qwen3_down")
LAYERS = {"mixtral": "Mixtral 8x7B", "qwen3_30b": "Qwen3-30B-A3B", "gptoss": "GPT-OSS"}
WINDOW = 20


def read(stem: str) -> dict:
    return load([RESULTS / f"{stem}.json"])


def title(results: Mapping) -> str:
    jax_version = results["machine"]["packages"]["jax"]
    return f"{results['device']}, JAX {jax_version}, commit {results['commit']}"


def panels(heights: Sequence[float], count: int) -> tuple[plt.Figure, list[plt.Axes]]:
    """Returns a figure of the page's width with `count` panels; rows have `heights` in inches."""
    figure, grid = plt.subplots(
        len(heights), COLUMNS, figsize=(WIDTH, sum(heights) + 0.9),
        gridspec_kw={"height_ratios": heights}, squeeze=False, layout="constrained",
    )  # fmt: skip
    figure.get_layout_engine().set(w_pad=0.12)
    for unused in grid.ravel()[count:]:
        unused.axis("off")
    return figure, list(grid.ravel()[:count])


def by_op(records: Sequence[Mapping]) -> dict[str, list[Mapping]]:
    ops = dict.fromkeys(record["op"] for record in records)
    return {op: [record for record in records if record["op"] == op] for op in ops}


def in_rows(values: Sequence[float]) -> list[float]:
    return [max(values[i : i + COLUMNS]) for i in range(0, len(values), COLUMNS)]


def beside_stock() -> plt.Figure:
    """Draws time and temporary memory of products, layers and a training step, with our functions
    and with `jax.lax.ragged_dot`."""
    figure, (times, memory) = plt.subplots(
        1, 2, figsize=(WIDTH, 5.4), layout="constrained", sharey=True
    )
    figure.get_layout_engine().set(w_pad=0.1)
    ms: dict[str, list[float]] = {"stock": [], "ours": []}
    size: dict[str, list[float]] = {"stock": [], "ours": []}
    labels = []
    for name in MODELS:
        shape, case = SHAPES[name], f"{name}/forward/random"
        sizes = f"{shape.groups} experts, {shape.rows} rows, {shape.k} to {shape.n}"
        labels.append(f"{PROJECTIONS[name]}\n{sizes}")
        for peer, topic in (("stock", "stock"), ("ours", "ragged")):
            ms[peer].append(cases(topic)[case]["peers"][peer]["median_us"] / 1e3)
            size[peer].append(memory_of(peer, name, "forward"))
    layers = cases("layers_stock").values()
    (step,) = cases("step").values()
    for case in (*layers, step):
        for peer in ms:
            ms[peer].append(case["peers"][peer]["median_us"] / 1e3)
            size[peer].append(case["peers"][peer]["temporary_bytes"])
    for shape in (case["shape"] for case in layers):
        name = f"layer of {LAYERS[shape['name']]}, with gradients"
        sizes = f"{shape['top_k']} of {shape['experts']} experts, {shape['tokens']} tokens"
        labels.append(f"{name}\n{sizes}")
    name = f"training, {ours(step)['run']['num_parameters'] / 1e9:.1f} B parameters"
    shape = step["shape"]
    labels.append(f"{name}\n{shape['batch']} sequences of {shape['length']}")
    _pairs(times, ms, lambda ms: f"{ms:.1f} ms")
    times.set(title="time", xlabel="ms, log scale")
    _pairs(memory, size, _as_memory)
    memory.set(title="temporary memory", xlabel="bytes, log scale")
    times.set_yticks(range(len(labels)), labels, fontsize=9)
    times.invert_yaxis()
    device = read("h200_main")["device"]
    figure.suptitle(f"Ragged products, layers and a step of training in bf16, one {device}")
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _pairs(axes, values, text) -> None:
    rows = np.arange(len(values["ours"]))
    for offset, peer, color, label in (
        (-0.2, "stock", ORANGE, "jax.lax.ragged_dot"),
        (0.2, "ours", BLUE, "jax_grouped_gemm"),
    ):
        bars = axes.barh(rows + offset, values[peer], 0.36, color=color, label=label)
        axes.bar_label(bars, [text(value) for value in values[peer]], padding=3, fontsize=9)
    low, high = (each(map(each, values.values())) for each in (min, max))
    # Leave room to see the shortest bar, and for the label of the longest bar.
    span = np.log10(high / low)
    axes.set(xscale="log", xlim=(low / 10 ** (0.15 * span), high * 10 ** (0.35 * span)))
    axes.spines[["top", "right"]].set_visible(False)


def _as_memory(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def roofline(results: Mapping) -> plt.Figure:
    """Draws TFLOP/s over arithmetic intensity: ours, the best grouped peer's, and measured roofs.

    The roofs are the fastest copy and the fastest dense product of the same run.
    """
    records = [record for record in results["cases"] if best_grouped(record)]
    bandwidth, peak = (
        max(record["peers"][peer].get(number, 0) for record in records)
        for peer, number in (("copy", "tbps"), ("cublas_dense", "tflops"))
    )
    intensity = np.array([record["flops"] / record["bytes"] for record in records])
    figure, axes = plt.subplots(figsize=(WIDTH, 5), layout="constrained")
    span = np.geomspace(intensity.min() / 2, intensity.max() * 2, 200)
    roofs = f"copy {bandwidth:.2f} TB/s, dense cuBLAS {peak:.0f} TFLOP/s"
    axes.plot(span, np.minimum(peak, span * bandwidth), color=BLACK, linewidth=1, label=roofs)
    for record, x in zip(records, intensity, strict=True):
        style = {"marker": OP_MARKERS[record["op"]], "linestyle": "none"}
        peer = record["peers"][best_grouped(record)[0]]
        axes.plot(x, peer["tflops"], color=ORANGE, fillstyle="none", **style)
        axes.plot(x, ours(record)["tflops"], color=BLUE, **style)
    for op in by_op(records):
        axes.plot([], [], OP_MARKERS[op], color=BLUE, label=op)
    axes.plot([], [], "o", color=ORANGE, fillstyle="none", label="best peer")
    axes.set(xscale="log", yscale="log", title=title(results))
    axes.set(xlabel="FLOP per byte of unavoidable traffic", ylabel="TFLOP/s")
    axes.legend(loc="lower right")
    return figure


def relative_speed(results: Mapping) -> plt.Figure:
    """Draws a panel for each op and a bar for each case: our speed over the best grouped peer's.

    The peer's name and the ratio are on the right. Marks show our speed over a cuBLAS loop, and the
    floor over our time.
    """
    ops = by_op([record for record in results["cases"] if best_grouped(record)])
    figure, found = panels(in_rows([0.8 + 0.24 * len(of_op) for of_op in ops.values()]), len(ops))
    for axes, (op, records) in zip(found, ops.items(), strict=True):
        rows = np.arange(len(records))
        best = [best_grouped(record) for record in records]
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
        axes.set(xlim=(0, LARGEST_RATIO), ylim=(len(records) - 0.5, -0.5), title=op)
        axes.set_xlabel(f"geometric mean {geometric_mean(ratios):.2f}")
        axes.set_yticks(rows, [record["shape"]["name"] for record in records], fontsize=8)
        right = axes.twinx()
        right.set_ylim(axes.get_ylim())
        labels = [f"{SHORT_NAMES.get(name, name)} {ratio:.2f}" for name, ratio in best]
        right.set_yticks(rows, labels, fontsize=8)
        right.tick_params(length=0)
    figure.suptitle(title(results))
    labels = found[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def updates(results: Mapping) -> plt.Figure:
    """Draws a panel for each update: speeds over the expressions and calls that it replaces."""

    def others(record: Mapping) -> list[str]:
        roles = {name: peer["role"] for name, peer in record["peers"].items()}
        return [x for x in record["ratios"] if roles.get(x) not in (None, Role.VARIANT)]

    ops = by_op([record for record in results["cases"] if record["op"] in UPDATES])
    names = dict.fromkeys(name for records in ops.values() for x in records for name in others(x))
    colors = dict(zip(names, PALETTE, strict=False))
    bars = [sum(1 + len(others(record)) for record in records) for records in ops.values()]
    figure, found = panels(in_rows([0.8 + 0.13 * count for count in bars]), len(ops))
    for axes, (op, records) in zip(found, ops.items(), strict=True):
        ticks, position = [], 0
        for record in records:
            for offset, name in enumerate(others(record)):
                axes.barh(position + offset, record["ratios"][name], color=colors[name])
            ticks.append(position + (len(others(record)) - 1) / 2)
            position += len(others(record)) + 1
        axes.set_yticks(ticks, [record["shape"]["name"] for record in records], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1, color=BLACK, linewidth=1)
        axes.set(xlabel="times as fast", title=op)
    figure.suptitle(title(results))
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    labels = [f"over {SHORT_NAMES.get(name, name)}" for name in colors]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
    return figure


def layer() -> plt.Figure:
    """Draws the time of the parts of whole layers, forward and with gradients, and QuACK's time."""
    found = list(cases("layers").values())
    parts = list(dict.fromkeys(part for case in found for part in ours(case)["parts_us"]))
    figure, both = plt.subplots(2, 1, figsize=(WIDTH, 6.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    titles = ("forward", "forward and backward")
    for axes, name, records in zip(both, titles, by_op(found).values(), strict=True):
        rows, left = np.arange(len(records)), np.zeros(len(records))
        quack = [_fastest_ms(record, "quack", "quack_tuned") for record in records]
        height, offset = 0.36, -0.19
        for part, color in zip(parts, (*PALETTE, BLACK), strict=False):
            values = np.array([ours(record)["parts_us"].get(part, 0) for record in records]) / 1e3
            axes.barh(rows + offset, values, height, left, color=color, label=part)
            left += values
        style = dict(color="white", edgecolor=BLACK, hatch="//")
        axes.barh(rows - offset, quack, height, label="QuACK, the faster way", **style)
        axes.set_yticks(rows, [record["shape"]["name"] for record in records])
        axes.set(title=name, xlabel="ms")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title(read("h200_moe_quack")))
    figure.legend(*both[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _fastest_ms(case: Mapping, *peers: str) -> float:
    """Returns the least time of the peers that were measured, 0 if none was measured."""
    found = (case["peers"].get(name, {}).get("median_us") for name in peers)
    return min((us / 1e3 for us in found if us), default=0.0)


def losses() -> plt.Figure:
    """Draws smoothed training losses in bf16 and FP8 of one seed, and the ratios of all seeds."""
    found = list(cases("training").values())
    found.sort(key=lambda case: case["seed"])
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
    of_h100, of_h200 = (
        [case for case in cases(topic).values() if case["op"] == "step"]
        for topic in ("muon_h100", "muon_steps")
    )
    found, card = (of_h100, "H100") if of_h100 else (of_h200, "H200")
    labels = {"optax_adamw": "AdamW", "ours": "ours", "optax_muon": "optax.contrib.muon"}
    labels = {peer: label for peer, label in labels.items() if peer in found[0]["peers"]}
    figure, axes = plt.subplots(figsize=(WIDTH, 3.6), layout="constrained")
    rows, height = np.arange(len(found)), 0.8 / len(labels)
    for i, (peer, label) in enumerate(labels.items()):
        ms = [case["peers"][peer]["median_us"] / 1e3 for case in found]
        bars = axes.barh(rows + (i - 1) * height, ms, height, color=PALETTE[i], label=label)
        axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(rows, [case["shape"]["name"] for case in found])
    axes.invert_yaxis()
    axes.set(xlabel=f"ms a step, {card}", title="Steps of an optimiser")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    return figure


def packed() -> plt.Figure:
    """Draws the speeds of layers with packed weights over those with bfloat16 weights."""
    results = read("h200_weight_only")
    layers: dict[str, list[Mapping]] = {}
    for case in results["cases"]:
        layers.setdefault(case["shape"]["name"].rpartition("_")[0], []).append(case)
    figure, found = plt.subplots(1, 3, figsize=(WIDTH, 3.4), layout="constrained", sharey=True)
    for axes, (name, records) in zip(found, layers.items(), strict=True):
        for format, color in zip(("mxfp4", "int4", "int8"), PALETTE, strict=False):
            of_format = [record for record in records if record["weights"] == format]
            tokens = [record["shape"]["tokens"] for record in of_format]
            ratios = [record["ratios"]["bf16"] for record in of_format]
            axes.plot(tokens, ratios, "o-", color=color, label=format)
        axes.axhline(1, color=BLACK, linewidth=1)
        axes.set(xscale="log", title=name, xlabel="tokens")
        axes.spines[["top", "right"]].set_visible(False)
    found[0].set(ylabel="times as fast as bf16 weights", ylim=0)
    found[0].legend()
    figure.suptitle(title(results))
    return figure


PICTURES = {
    "beside_stock": beside_stock,
    "relative_speed": lambda: relative_speed(read("h200_main")),
    "roofline": lambda: roofline(read("h200_main")),
    "updates": lambda: updates(read("h200_rank_k")),
    "layer": layer,
    "losses": losses,
    "muon": muon,
    "packed": packed,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.pictures", __doc__)
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(PICTURES)}")
    parser.add_argument("--folder", type=Path, default=IMAGES, help="folder for the pictures")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(PICTURES):
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    for name in options.names or PICTURES:
        path = options.folder / f"{name}.png"
        PICTURES[name]().savefig(path, dpi=DPI)
        print(path)


if __name__ == "__main__":
    main()
