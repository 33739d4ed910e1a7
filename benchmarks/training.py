"""Measures training steps of the demo's model with our kernels, the reference and stock JAX.

python -m benchmarks.training --output benchmarks/results/training.json

All peers start from equal parameters and see equal batches. A peer that runs out of memory is
recorded as failed; with a smaller `--batch` all may fit. Times are wall times of all steps except
the first. Memory is the temporary memory that XLA plans for a step.
"""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

import jax_grouped_gemm as jgg
from benchmarks.fp8_training import model_of
from benchmarks.harness import report
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.peer import Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from jax_grouped_gemm.demo.data import load_corpus
from jax_grouped_gemm.demo.presets import PRESETS
from jax_grouped_gemm.demo.train import OutOfMemory, train

OURS = object()  # stands for `pinned_implementation()`
# Role, implementation of the ragged matmul, and recipe of each peer.
PEERS: dict[str, tuple[Role, Any, jgg.Recipe | None]] = {
    "ours": (Role.OURS, OURS, None),
    "ours_fp8": (Role.VARIANT, OURS, jgg.Recipe()),
    "ours_fp8_layers": (Role.VARIANT, OURS, jgg.Recipe()),
    "reference": (Role.VARIANT, "xla", None),
    "stock": (Role.GROUPED, jax.lax.ragged_dot, None),
}


def texts(results: Mapping) -> list[str]:
    rows = [
        [name, f"{peer['median_us'] / 1e3:.1f}", f"{peer['temporary_bytes'] / 2**30:.1f}",
         f"{peer['run']['after']['held_out']:.3f}"]
        for record in results["cases"]
        for name, peer in record["peers"].items()
        if peer["status"] == "measured"
    ]  # fmt: skip
    table = report.table(["peer", "ms a step", "GiB", "held-out loss"], rows)
    return [table, report.missing_lines(results["cases"])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="h200", choices=PRESETS, help="size of the model")
    parser.add_argument("--steps", type=int, help="training steps (default: those of --compare)")
    parser.add_argument("--batch", type=int, help="sequences of a step (default: the preset's)")
    add_choices(parser, "--peers", PEERS)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    model, preset = model_of(options)
    if options.batch:
        preset = dataclasses.replace(preset, batch=options.batch)
    steps = options.steps or (preset.steps if options.dry_run else preset.compare_steps)
    corpus, case = load_corpus(), f"{model}/training/{options.seed}"

    def run(name: str) -> dict:
        role, implementation, recipe = PEERS[name]
        if implementation is OURS:
            implementation = pinned_implementation()
        quantizes = "layers" if name == "ours_fp8_layers" else "optimizer"
        arguments = dict(implementation=implementation, recipe=recipe, quantizes=quantizes)
        try:
            found = train(preset, corpus, name=name, steps=steps, seed=options.seed, **arguments)
        except OutOfMemory as failure:
            return {"role": role.value, "status": "failed", "reason": str(failure)}
        measured = dict(role=role.value, status="measured", median_us=found.step_seconds * 1e6)
        run = dataclasses.asdict(found)
        return measured | dict(temporary_bytes=found.temporary_bytes, run=run)

    def compare() -> dict:
        # Run stock JAX first, because it needs the most memory, which is not yet fragmented.
        peers = {name: run(name) for name in reversed(PEERS) if name in options.peers}
        times = {name: peer["median_us"] for name, peer in peers.items() if "median_us" in peer}
        ours = times.pop("ours", None)
        return {
            "case": case,
            "shape": {"name": model, "batch": preset.batch, "length": preset.sequence_length},
            "op": "training",
            "seed": options.seed,
            "peers": {name: peers[name] for name in options.peers},
            "ratios": {name: time / ours for name, time in times.items() if ours},
        }

    return [Job(case, compare)]


COMMAND = Command(
    "benchmarks.training", __doc__, jobs, add_arguments, timed=False, time_limit=600, texts=texts
)

if __name__ == "__main__":
    COMMAND.main()
