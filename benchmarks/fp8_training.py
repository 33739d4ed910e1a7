"""Whether training in FP8 loses anything: the demo's model, the same steps in bf16 and in FP8.

python -m benchmarks.fp8_training --seeds 3 --output benchmarks/results/fp8_training.json

Equal seeds start from equal parameters and see equal batches, so that the runs of a seed differ by
the arithmetic alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

import jax_grouped_gemm as jgg
from benchmarks import machine
from benchmarks.results_file import save
from jax_grouped_gemm.demo.data import load_corpus
from jax_grouped_gemm.demo.presets import PRESETS, Preset
from jax_grouped_gemm.demo.train import TrainingRun, train

RECIPES = {"bf16": None, "fp8": jgg.Recipe()}


def dry_run_preset() -> Preset:
    """The smallest model that has every part of the others."""
    preset = PRESETS["cpu"]
    model = dataclasses.replace(
        preset.model, num_layers=1, embed=32, num_heads=2, hidden=32, num_experts=4
    )
    return dataclasses.replace(
        preset, model=model, batch=2, sequence_length=32, steps=3, evaluation_batches=1
    )


def compare(preset_name: str, seed: int, steps: int, runs: dict[str, TrainingRun]) -> dict:
    """Held-out losses of one seed, by recipe, and FP8's over bf16's."""
    losses = {name: run.after.held_out for name, run in runs.items()}
    return {
        "preset": preset_name,
        "seed": seed,
        "steps": steps,
        **losses,
        "ratio": losses["fp8"] / losses["bf16"],
    }


def line(comparison: dict) -> str:
    """A comparison in a few words."""
    return (
        f"seed {comparison['seed']}: held-out loss {comparison['bf16']:.4f} in bf16, "
        f"{comparison['fp8']:.4f} in FP8, ratio {comparison['ratio']:.4f}"
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fp8_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="h200", choices=PRESETS, help="size of the model")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow")
    parser.add_argument("--steps", type=int, help="training steps (default: the preset's)")
    parser.add_argument("--output", type=Path, metavar="JSON", help="where to write the results")
    parser.add_argument("--commit", help="the measured commit, in a copy without git")
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny model and few steps, on any machine"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[dict]:
    """Entry point."""
    options = parse_arguments(arguments)
    preset = dry_run_preset() if options.dry_run else PRESETS[options.preset]
    name = "dry run" if options.dry_run else options.preset
    # Pinned on a GPU, so that nothing falls back unnoticed.
    implementation = "cuda" if jax.default_backend() == "gpu" else None
    steps = options.steps or preset.steps
    corpus = load_corpus()
    results: dict = {
        "command": shlex.join(
            [
                "python",
                "-m",
                "benchmarks.fp8_training",
                *(sys.argv[1:] if arguments is None else arguments),
            ]
        ),
        "device": jax.devices()[0].device_kind,
        "machine": machine.describe(options.commit),
        "fp8_training": [],
        "training_runs": [],
    }
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        runs = {
            recipe_name: train(
                preset,
                corpus,
                name=f"{recipe_name}, seed {seed}",
                implementation=implementation,
                recipe=recipe,
                steps=steps,
                seed=seed,
            )
            for recipe_name, recipe in RECIPES.items()
        }
        comparison = compare(name, seed, steps, runs)
        results["fp8_training"].append(comparison)
        results["training_runs"] += [dataclasses.asdict(run) for run in runs.values()]
        if options.output:
            save(results, options.output)
        print(line(comparison), flush=True)
    return results["fp8_training"]


if __name__ == "__main__":
    main()
