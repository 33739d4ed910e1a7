"""``python -m jax_grouped_gemm``: environment report, then a small MoE language model trains.

With ``--compare`` the same training runs once with every implementation of the ragged matmul, and
with several names after ``--recipe`` once with each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

import jax_grouped_gemm as jgg
from jax_grouped_gemm.demo import data, report
from jax_grouped_gemm.demo.presets import PRESETS

IMPLEMENTATIONS = {
    "auto": None,
    "cuda": "cuda",
    "reference": "reference",
    "jax": jax.lax.ragged_dot,
}


RECIPES = {"bf16": None, "fp8": jgg.Recipe()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grouped_gemm", description=__doc__)
    parser.add_argument(
        "--preset",
        choices=["auto", *PRESETS],
        default="auto",
        help="size of the model; auto: h200 where the CUDA kernels can run, cpu elsewhere",
    )
    parser.add_argument(
        "--steps", type=_at_least_two, help="training steps (default: the preset's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument(
        "--implementation",
        choices=IMPLEMENTATIONS,
        default="auto",
        help="of the ragged matmul; jax is the stock jax.lax.ragged_dot",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        nargs="+",
        default=["bf16"],
        help="of the ragged matmuls: bf16 computes them in the preset's dtype, fp8 quantises",
    )
    parser.add_argument(
        "--compare", action="store_true", help="train with one implementation after the other"
    )
    parser.add_argument("--output", type=Path, help="directory for runs.json and loss.png")
    args = parser.parse_args(argv)

    if "fp8" in args.recipe and args.implementation == "jax":
        parser.error("--recipe fp8: stock JAX has no FP8 ragged matmul")
    print(report.environment(), end="\n\n")
    reason = jgg.unavailable_reason()
    if args.implementation == "cuda" and reason is not None:
        parser.error(f"--implementation cuda: {reason}")
    try:
        from jax_grouped_gemm.demo.train import train
    except ImportError as error:
        parser.error(
            f"training needs more packages ({error}); "
            "install them with: pip install 'jax-grouped-gemm[flax]'"
        )

    name = args.preset
    if name == "auto":
        name = "cpu" if reason else "h200"
    preset = PRESETS[name]
    steps = args.steps or (preset.compare_steps if args.compare else preset.steps)
    runs_to_make = [(args.implementation, recipe) for recipe in args.recipe]
    if args.compare:
        implementations = ["reference", "jax"] if reason else ["auto", "reference", "jax"]
        runs_to_make = [(implementation, "bf16") for implementation in implementations]

    corpus = data.load_corpus()
    print(report.task(name, preset, corpus, steps, args.seed), end="\n\n")
    runs = []
    for implementation, recipe in runs_to_make:
        run = train(
            preset,
            corpus,
            name=implementation if recipe == "bf16" else f"{implementation} {recipe}",
            implementation=IMPLEMENTATIONS[implementation],
            recipe=RECIPES[recipe],
            steps=steps,
            seed=args.seed,
        )
        print("", report.result(run), "", sep="\n", flush=True)
        runs.append(run)
    if len(runs) > 1:
        print(report.comparison(runs))
    if args.output:
        print("Wrote", ", ".join(map(str, report.save(runs, args.output))))


def _at_least_two(text: str) -> int:
    steps = int(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"{steps} is too few: the first step is not timed")
    return steps


if __name__ == "__main__":
    main()
