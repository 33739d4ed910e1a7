"""Whether training in FP8 loses anything: the demo's model, the same steps in bf16 and in FP8.

python -m benchmarks.fp8_training --seeds 3 --output benchmarks/results/fp8_training.json

Equal seeds start from equal parameters and see equal batches, so that the runs of a seed differ by
the arithmetic alone. All recipes of a seed are compared with the same run in bf16.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax

from benchmarks.harness.command import Command
from benchmarks.harness.measure import geometric_mean
from benchmarks.harness.peer import Role
from benchmarks.harness.session import Job, Session
from benchmarks.peers.fp8_layer import RECIPES
from jax_grouped_gemm.demo.data import load_corpus
from jax_grouped_gemm.demo.presets import PRESETS, Preset
from jax_grouped_gemm.demo.train import TrainingRun, train

DEFAULT = "blockwise"


def dry_run_preset() -> Preset:
    """The smallest model that has every part of the others."""
    preset = PRESETS["cpu"]
    model = dataclasses.replace(
        preset.model, num_layers=1, embed=32, num_heads=2, hidden=32, num_experts=4
    )
    return dataclasses.replace(
        preset, model=model, batch=2, sequence_length=32, steps=3, evaluation_batches=1
    )


def record(
    preset: str, recipe: str, seed: int, steps: int, runs: Mapping[str, TrainingRun]
) -> dict:
    """A record of both runs of a seed; `loss_ratio` is FP8's held-out loss over bf16's."""
    losses = {name: run.after.held_out for name, run in runs.items()}
    case = f"{preset}/fp8_training/{seed}"
    return {
        "case": case if recipe == DEFAULT else f"{case}/{recipe}",
        "recipe": recipe,
        "shape": {"name": preset},
        "op": "fp8_training",
        "seed": seed,
        "steps": steps,
        "loss_ratio": losses["ours"] / losses["ours_bf16"],
        "peers": {
            name: {
                "role": (Role.OURS if name == "ours" else Role.VARIANT).value,
                "status": "measured",
                "held_out_loss": losses[name],
                "run": dataclasses.asdict(run),
            }
            for name, run in runs.items()
        },
        "ratios": {},
    }


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Of FP8's held-out losses over bf16's."""
    found = [record["loss_ratio"] for record in records]
    if not found:
        return {}
    numbers = {"geomean": geometric_mean(found), "min": min(found), "max": max(found)}
    return {"fp8_training": {f"loss_ratio_{name}": x for name, x in numbers.items()}}


def texts(results: Mapping) -> list[str]:
    """A line a seed."""
    lines = []
    for record in results["cases"]:
        ours, bf16 = (record["peers"][name]["held_out_loss"] for name in ("ours", "ours_bf16"))
        lines.append(
            f"{record.get('recipe', DEFAULT)}, seed {record['seed']}: held-out loss {bf16:.4f} in "
            f"bf16, {ours:.4f} in FP8, ratio {record['loss_ratio']:.4f}"
        )
    return ["\n".join(lines)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and the seeds, which count from `--seed`."""
    parser.add_argument("--preset", default="h200", choices=PRESETS, help="size of the model")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from --seed on")
    parser.add_argument("--recipe", nargs="+", default=[DEFAULT], choices=RECIPES)
    parser.add_argument("--steps", type=int, help="training steps (default: the preset's)")


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job a seed."""
    preset = dry_run_preset() if options.dry_run else PRESETS[options.preset]
    preset_name = "dry_run" if options.dry_run else options.preset
    # Pinned on a GPU, so that nothing falls back unnoticed.
    implementation = "cuda" if jax.default_backend() == "gpu" else None
    steps = options.steps or preset.steps
    corpus = load_corpus()

    @functools.cache
    def trained(recipe: str | None, seed: int) -> TrainingRun:
        return train(
            preset,
            corpus,
            name=f"{recipe or 'bf16'}, seed {seed}",
            implementation=implementation,
            recipe=recipe and RECIPES[recipe],
            steps=steps,
            seed=seed,
        )

    def compare(recipe: str, seed: int) -> dict:
        runs = {"ours": trained(recipe, seed), "ours_bf16": trained(None, seed)}
        return record(preset_name, recipe, seed, steps, runs)

    return [
        Job(f"{preset_name}/fp8_training/{seed}/{name}", functools.partial(compare, name, seed))
        for seed in range(options.seed, options.seed + options.seeds)
        for name in options.recipe
    ]


COMMAND = Command(
    "benchmarks.fp8_training",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    timed=False,
    time_limit=3600,
    summarize=summarize,
    texts=texts,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
