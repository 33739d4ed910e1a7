"""Trains the demo's model in bf16 and in FP8, and compares the losses.

python -m benchmarks.fp8_training --seeds 3 --output benchmarks/results/fp8_training.json

Equal seeds start from equal parameters and see equal batches, so the two runs of a seed differ only
in their arithmetic.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping

import jax_grouped_gemm as jgg
from benchmarks.harness.command import Command
from benchmarks.harness.peer import Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from jax_grouped_gemm.demo.data import load_corpus
from jax_grouped_gemm.demo.presets import PRESETS, Preset
from jax_grouped_gemm.demo.train import train


def model_of(options: argparse.Namespace) -> tuple[str, Preset]:
    """Returns the preset's name and the preset. A dry run has a tiny one with every part."""
    if not options.dry_run:
        return options.preset, PRESETS[options.preset]
    preset = PRESETS["cpu"]
    model = dataclasses.replace(
        preset.model, num_layers=1, embed=32, num_heads=2, hidden=32, num_experts=4
    )
    return "dry_run", dataclasses.replace(
        preset, model=model, batch=2, sequence_length=32, steps=3, evaluation_batches=1
    )


def texts(results: Mapping) -> list[str]:
    return [
        f"{record['case']}: held-out loss of FP8 over that of bf16 {record['loss_ratio']:.4f}"
        for record in results["cases"]
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="h200", choices=PRESETS, help="size of the model")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from --seed on")
    parser.add_argument("--steps", type=int, help="training steps (default: the preset's)")


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    name, preset = model_of(options)
    steps, corpus = options.steps or preset.steps, load_corpus()

    def compare(seed: int) -> dict:
        """Returns the record of a seed; `loss_ratio` is FP8's held-out loss over bf16's."""
        given = dict(implementation=pinned_implementation(), steps=steps, seed=seed)
        runs = {
            peer: train(preset, corpus, name=f"{peer}, seed {seed}", recipe=recipe, **given)
            for peer, recipe in (("ours", jgg.Recipe()), ("ours_bf16", None))
        }
        losses = {name: run.after.held_out for name, run in runs.items()}
        return {
            "case": f"{name}/fp8_training/{seed}",
            "shape": {"name": name},
            "op": "fp8_training",
            "seed": seed,
            "steps": steps,
            "loss_ratio": losses["ours"] / losses["ours_bf16"],
            "peers": {
                peer: dict(role=(Role.OURS if peer == "ours" else Role.VARIANT).value)
                | dict(status="measured", held_out_loss=losses[peer], run=dataclasses.asdict(run))
                for peer, run in runs.items()
            },
            "ratios": {},
        }

    return [
        Job(f"{name}/fp8_training/{seed}", functools.partial(compare, seed))
        for seed in range(options.seed, options.seed + options.seeds)
    ]


OPTIONS = dict(timed=False, time_limit=3600, texts=texts)
COMMAND = Command("benchmarks.fp8_training", __doc__, jobs, add_arguments, **OPTIONS)

if __name__ == "__main__":
    COMMAND.main()
