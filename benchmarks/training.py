"""A step of training the demo's model, with these kernels, the reference and stock JAX.

python -m benchmarks.training --output benchmarks/results/training.json

All start from equal parameters and see equal batches. A peer that runs out of memory is recorded as
failed; with a smaller `--batch` all may fit. Times are the host's, over all steps but the first;
memory is what XLA plans for a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import jax_grouped_gemm as jgg
from benchmarks.fp8_training import dry_run_preset
from benchmarks.harness.command import Command
from benchmarks.harness.measure import geometric_mean
from benchmarks.harness.peer import Role
from benchmarks.harness.session import Job, Session
from jax_grouped_gemm.demo.data import load_corpus
from jax_grouped_gemm.demo.presets import PRESETS, Preset
from jax_grouped_gemm.demo.train import OutOfMemory, TrainingRun, train

OURS = object()  # stands for the kernels, pinned where there is a GPU
# By name: role, implementation of the ragged matmul, and recipe.
PEERS: dict[str, tuple[Role, Any, jgg.Recipe | None]] = {
    "ours": (Role.OURS, OURS, None),
    "ours_fp8": (Role.VARIANT, OURS, jgg.Recipe()),
    "ours_fp8_layers": (Role.VARIANT, OURS, jgg.Recipe()),
    "reference": (Role.VARIANT, "xla", None),
    "stock": (Role.GROUPED, jax.lax.ragged_dot, None),
}


def record(
    model: str, preset: Preset, seed: int, runs: Mapping[str, TrainingRun | OutOfMemory]
) -> dict:
    """A record of all runs; ratios are of the times of a step."""
    peers: dict[str, dict] = {}
    for name, run in runs.items():
        peers[name] = {"role": PEERS[name][0].value}
        if isinstance(run, OutOfMemory):
            peers[name] |= {"status": "failed", "reason": str(run)}
            continue
        peers[name] |= {
            "status": "measured",
            "median_us": run.step_seconds * 1e6,
            "temporary_bytes": run.temporary_bytes,
            "run": dataclasses.asdict(run),
        }
    times = {name: peer["median_us"] for name, peer in peers.items() if "median_us" in peer}
    return {
        "case": f"{model}/training/{seed}",
        "shape": {"name": model, "batch": preset.batch, "length": preset.sequence_length},
        "op": "training",
        "seed": seed,
        "peers": peers,
        "ratios": {
            name: time / times["ours"]
            for name, time in times.items()
            if "ours" in times and name != "ours"
        },
    }


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Of the ratios to stock JAX."""
    found = [record["ratios"]["stock"] for record in records if "stock" in record["ratios"]]
    return {"training": {"stock_geomean": geometric_mean(found)}} if found else {}


def texts(results: Mapping) -> list[str]:
    """A line a run."""
    lines = []
    for record in results["cases"]:
        for name, peer in record["peers"].items():
            if peer["status"] != "measured":
                lines.append(f"{record['case']} {name}: {peer['status']}, {peer['reason']}")
                continue
            run = peer["run"]
            lines.append(
                f"{record['case']} {name}: {peer['median_us'] / 1e3:.1f} ms a step, "
                f"{peer['temporary_bytes'] / 2**30:.1f} GiB, held-out loss "
                f"{run['after']['held_out']:.3f}"
            )
    return ["\n".join(lines)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, how long, and who."""
    parser.add_argument("--preset", default="h200", choices=PRESETS, help="size of the model")
    parser.add_argument("--steps", type=int, help="training steps (default: those of --compare)")
    parser.add_argument("--batch", type=int, help="sequences of a step (default: the preset's)")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """One job."""
    preset = dry_run_preset() if options.dry_run else PRESETS[options.preset]
    name = "dry_run" if options.dry_run else options.preset
    if options.batch:
        preset = dataclasses.replace(preset, batch=options.batch)
    steps = options.steps or (preset.steps if options.dry_run else preset.compare_steps)
    pinned = "cuda" if jax.default_backend() == "gpu" else None
    corpus = load_corpus()

    def run(peer: str) -> TrainingRun | OutOfMemory:
        _, implementation, recipe = PEERS[peer]
        try:
            return train(
                preset,
                corpus,
                name=peer,
                implementation=pinned if implementation is OURS else implementation,
                recipe=recipe,
                quantizes="layers" if peer == "ours_fp8_layers" else "optimizer",
                steps=steps,
                seed=options.seed,
            )
        except OutOfMemory as failure:
            return failure

    def compare() -> dict:
        # Stock JAX first, which needs most memory, while that is in one piece.
        order = sorted(options.peers, key=list(PEERS).index, reverse=True)
        runs = {peer: run(peer) for peer in order}
        return record(name, preset, options.seed, {peer: runs[peer] for peer in options.peers})

    return [Job(f"{name}/training/{options.seed}", functools.partial(compare))]


COMMAND = Command(
    "benchmarks.training",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    timed=False,
    time_limit=600,
    summarize=summarize,
    texts=texts,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
