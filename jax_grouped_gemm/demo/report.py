"""Writes the text and the files of the demo."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jaxlib
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm.demo.data import Corpus
from jax_grouped_gemm.demo.presets import Preset
from jax_grouped_gemm.moe import explain_expert_parallel

if TYPE_CHECKING:  # Training needs Flax; the environment report does not.
    from jax_grouped_gemm.demo.train import OutOfMemory, TrainingRun


def environment() -> str:
    """Describes device and versions, and whether the CUDA kernels can run here."""
    devices = jax.devices()
    reason = jgg.unavailable_reason()
    return _section(
        "Environment",
        {
            "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
            "Python": platform.python_version(),
            "jax, jaxlib": f"{jax.__version__}, {jaxlib.__version__}",
            "flax, optax": f"{_version('flax')}, {_version('optax')}",
            "jax_grouped_gemm": jgg.__version__,
            "CUDA kernels": "available" if reason is None else f"not available: {reason}",
        },
    )


def task(name: str, preset: Preset, corpus: Corpus, steps: int, seed: int) -> str:
    """Describes model, data and amount of training."""
    model = preset.model
    megabytes = [f"{len(text) / 1e6:.1f} MB" for text in (corpus.train, corpus.held_out)]
    return _section(
        f"Task (preset {name})",
        {
            "model": f"{model.num_layers} layers, embed {model.embed}, {model.num_heads} heads, "
            f"{np.dtype(model.dtype).name}",
            "experts": f"{model.num_experts} of width {model.hidden}, {model.top_k} a token",
            "text": f"{corpus.num_files} files of Python's standard library: {megabytes[0]} to "
            f"train on, {megabytes[1]} held out",
            "training": f"{steps} steps of {preset.batch} x {preset.sequence_length} bytes, "
            f"seed {seed}",
        },
    )


def result(run: TrainingRun) -> str:
    """Describes speed and losses of one run."""
    return _section(
        f"Result ({run.implementation}"
        + (f", interrupted after {len(run.curve)} steps)" if run.interrupted else ")"),
        {
            "ragged matmuls": _what_ran(run),
            **_of_devices(run),
            "parameters": f"{run.num_parameters / 1e6:.1f} M",
            "speed": f"{run.tokens_per_second:,.0f} tokens/s, {_milliseconds(run)} ms a step"
            + _caveat(run),
            "compilation": f"{run.compile_seconds:.1f} s",
            "temporary memory": f"{_gibibytes(run)} GiB",
            "training loss": f"{run.before.train:.3f} -> {run.after.train:.3f} nats/byte",
            "held-out loss": f"{run.before.held_out:.3f} -> {run.after.held_out:.3f} nats/byte",
        },
    )


def expert_parallelism(preset: Preset, devices: int) -> str:
    """Describes the bytes that devices send each other, as predicted for H200 GPUs."""
    model = preset.model
    explanation = explain_expert_parallel(
        preset.tokens_per_step // devices,
        model.embed,
        model.hidden,
        model.num_experts,
        model.top_k,
        devices,
        dtype=model.dtype,
    )
    return f"Communication of a layer, predicted for H200 GPUs of one host\n  {explanation}"


def comparison(outcomes: Sequence[TrainingRun | OutOfMemory]) -> str:
    """Returns a table with a row for each run of a training, and speeds relative to stock JAX.

    An implementation that ran out of memory has a row that says so.
    """
    runs = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
    stock = next((run for run in runs if _is_stock(run)), None)
    header = "", "tokens/s", "x stock", "step ms", "temp GiB", "train loss", "held-out loss", "ran"
    rows: list[tuple[str, ...]] = [header]
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            rows.append((outcome.implementation, *["-"] * (len(header) - 2), str(outcome)))
            continue
        rows.append(
            (
                outcome.implementation,
                f"{outcome.tokens_per_second:,.0f}",
                f"{stock.step_seconds / outcome.step_seconds:.2f}" if stock else "-",
                _milliseconds(outcome),
                _gibibytes(outcome),
                f"{outcome.after.train:.3f}",
                f"{outcome.after.held_out:.3f}",
                _what_ran(outcome),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *cells, last]))
    return "\n".join(["Comparison", *lines])


def save(runs: Sequence[TrainingRun], directory: Path) -> list[Path]:
    """Writes ``runs.json`` and, if Matplotlib is installed, ``loss.png``; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "runs.json"
    data.write_text(json.dumps([asdict(run) for run in runs], indent=2) + "\n")
    if not can_plot():
        return [data]

    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(run.curve, label=run.implementation)
    axes.set(xlabel="step", ylabel="training loss (nats/byte)")
    axes.legend()
    picture = directory / "loss.png"
    figure.savefig(picture, dpi=150)
    return [data, picture]


def can_plot() -> bool:
    """Returns whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def _section(title: str, entries: dict[str, str]) -> str:
    return "\n".join([title, *(f"  {name:<18}{value}" for name, value in entries.items())])


def _what_ran(run: TrainingRun) -> str:
    if run.kernel_calls:
        return f"CUDA kernels, {run.kernel_calls} calls a step"
    return "jax.lax.ragged_dot" if _is_stock(run) else "reference in pure JAX"


def _caveat(run: TrainingRun) -> str:
    return "" if run.kernel_calls else " (without kernels: it says nothing about their speed)"


def _of_devices(run: TrainingRun) -> dict[str, str]:
    if run.devices == 1:
        return {}
    return {
        "devices": f"{run.devices} divide experts and tokens; the busiest has "
        f"{run.largest_share:.2f} times its share of the rows"
    }


def _is_stock(run: TrainingRun) -> bool:
    return run.implementation.split()[0] == "jax"


def _milliseconds(run: TrainingRun) -> str:
    return f"{run.step_seconds * 1e3:.1f}"


def _gibibytes(run: TrainingRun) -> str:
    return f"{run.temporary_bytes / 2**30:.2f}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
