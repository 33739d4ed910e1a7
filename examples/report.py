"""Reports the speed and the losses of a training run of the examples."""

from __future__ import annotations

import csv
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness import machine, results_file
from examples.moe_model import Config

# Options that are left out of the name of a record's case.
OF_THE_RUN = ("preset", "steps", "seed", "commit", "curve", "checkpoints", "save_every", "profile")
PEAK_TFLOPS = {"H100": 989, "H200": 989}  # dense, in bfloat16, of the SXM cards


class Report:
    """Losses and times of the steps of a run.

    Args:
      config: sizes of the model.
      tokens: tokens of a step, on all devices.
      devices: number of devices.
      parameters: number of the model's parameters.
    """

    def __init__(self, config: Config, tokens: int, devices: int, parameters: int):
        self.config, self.tokens, self.devices = config, tokens, devices
        self.parameters = parameters
        self.losses: dict[int, float] = {}  # by step
        self.ends: list[float] = []
        self.pending: tuple[int, jax.Array] | None = None

    def add(self, step: int, loss: jax.Array) -> float | None:
        """Records a started step, waits for the previous step, and returns the previous loss."""
        last, self.pending = self.pending, (step, loss)
        return None if last is None else self._wait(*last)

    def finish(self) -> None:
        """Waits for the last step."""
        if self.pending is not None:
            self._wait(*self.pending)

    def _wait(self, step: int, loss: jax.Array) -> float:
        self.losses[step] = float(loss)
        self.ends.append(time.perf_counter())
        return self.losses[step]

    def print(self) -> None:
        """Prints losses and, after enough steps, the speed and the formula of its FLOPs."""
        if self.losses:
            first, last = min(self.losses), max(self.losses)
            print(f"loss {self.losses[first]:.4f} nats a token in step {first}", end=", ")
            print(f"{self.losses[last]:.4f} in step {last}")
        if len(self.ends) > 3:
            print("\n".join(self._speed()))

    def save(self, path: Path, given: Mapping[str, object]) -> None:
        """Writes a record in the format of benchmarks/results, after at least four steps.

        Args:
          path: file to write.
          given: options of the command line that are not the defaults.
        """
        flags = {name: _flag(name, value) for name, value in given.items() if name != "output"}
        seconds, rate, tflops = self.speed()
        kind = jax.devices()[0].device_kind
        ours = {
            "us": [1e6 * each for each in np.diff(self.ends)],  # of every step after the first
            "median_us": 1e6 * seconds,
            "tokens_per_second": rate,
            "tflops": tflops,
            "mfu": next((tflops / peak for x, peak in PEAK_TFLOPS.items() if x in kind), None),
            "losses": list(self.losses.values()),
        }
        case = {
            "case": " ".join(flag for name, flag in flags.items() if name not in OF_THE_RUN),
            "op": "pretrain",
            "shape": dataclasses.asdict(self.config) | {"dtype": np.dtype(self.config.dtype).name},
            "devices": self.devices,
            "tokens": self.tokens,
            "peers": {"ours": {"status": "measured", **ours}},
            "ratios": {},
        }
        record = {
            "command": " ".join(["python -m examples.pretrain_moe", *flags.values()]),
            "device": kind,
            "commit": machine.commit(given.get("commit")),
            "seed": given.get("seed", 0),
            "machine": machine.versions(),
            "cases": [case],
            "summary": {},
        }
        results_file.save(record, path)

    def speed(self) -> tuple[float, float, float]:
        """Returns seconds per step, tokens per second, and TFLOP/s per device."""
        # Leave out the first steps, which compile and fill the queue.
        seconds = float(statistics.median(np.diff(self.ends)[1:]))
        rate = self.tokens / seconds
        return seconds, rate, self.config.flops_per_token * rate / self.devices / 1e12

    def _speed(self) -> Iterator[str]:
        config, (seconds, rate, tflops) = self.config, self.speed()
        yield (
            f"{self.parameters:.3g} parameters; {config.active_parameters:.3g} are active a token, "
            "without embedding and head"
        )
        yield (
            "FLOPs a token = 6 x active parameters + 12 x layers x length x heads x head_dim / 2 "
            f"(causal) = {config.flops_per_token:.4g}; time includes embedding, head, loss, "
            "rematerialisation and optimiser"
        )
        yield (
            f"step {1e3 * seconds:.1f} ms, {rate:,.0f} tokens/s, "
            f"{tflops:.1f} model TFLOP/s a device"
        )
        kind = jax.devices()[0].device_kind
        for name, peak in PEAK_TFLOPS.items():
            if name in kind:
                yield f"MFU {tflops / peak:.1%} of {peak} TFLOP/s, {kind}'s peak in dense bfloat16"


def _flag(name: str, value: object) -> str:
    """Returns an option in the syntax of a command line."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value}"


def write_curve(path: Path, losses: dict[int, float]) -> None:
    """Writes losses by step as a table, and as a picture next to it if Matplotlib is installed.

    Earlier steps stay in the table, so that a resumed run continues its curve.
    """
    table = path.with_suffix(".csv")
    if table.exists():
        with table.open() as file:
            before = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}
        losses = {n: x for n, x in before.items() if n < min(losses)} | losses
    with table.open("w", newline="") as file:
        csv.writer(file).writerows([("step", "loss"), *losses.items()])
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.plot(list(losses), list(losses.values()))
    axes.set(xlabel="step", ylabel="loss, nats a token")
    figure.savefig(path.with_suffix(".png"), dpi=150)
