"""Reports the environment, trains a small MoE language model, and prints its speed and losses.

If --implementation or --recipe has several names, the same training runs once for each name.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import jax

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm.demo import data, report
from jax_grouped_gemm.demo.presets import PRESETS

IMPLEMENTATIONS: dict[str, moe.Implementation] = {
    "auto": None,
    "cuda": "cuda",
    "xla": "xla",
    "jax": jax.lax.ragged_dot,
}
RECIPES = ("preset", "bf16", "fp8", "fp8-layers")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    args = parser.parse_args(argv)
    implementations = list(dict.fromkeys(args.implementation or ["auto"]))
    recipes = list(dict.fromkeys(args.recipe))
    if args.compare and args.implementation == ["jax"]:
        parser.error("--compare compares with stock JAX: name another --implementation, or none")
    if "jax" in implementations and any(map(_is_fp8, recipes)):
        parser.error("--recipe fp8: stock JAX has no FP8 ragged matmul")
    if args.output:
        _check_output(parser, args.output)
    if args.devices > 1:
        _divide_cpu(args.devices)
    print(report.environment(), end="\n\n")
    if args.devices > len(jax.devices()):
        parser.error(f"--devices: there are {len(jax.devices())}, got {args.devices}")
    reason = jgg.unavailable_reason()
    if "cuda" in implementations and reason is not None:
        parser.error(f"--implementation cuda: {reason}")
    try:
        from jax_grouped_gemm.demo.train import OutOfMemory, TrainingRun, train
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
    if args.compare:
        everything = ["xla"] if reason else ["auto", "xla"]
        implementations = args.implementation or everything
        implementations = [*dict.fromkeys([*implementations, "jax"])]
    runs_to_make = [
        (implementation, recipe)
        for implementation in implementations
        for recipe in recipes
        if implementation != "jax" or not _is_fp8(recipe)
    ]
    if args.compare and "jax" not in dict(runs_to_make):
        runs_to_make.append(("jax", "preset"))

    corpus = data.load_corpus()
    print(report.task(name, preset, corpus, steps, args.seed), end="\n\n")
    if args.devices > 1:
        for what, size in dict(experts=preset.model.num_experts, sequences=preset.batch).items():
            if size % args.devices:
                parser.error(f"--devices must divide the {size} {what}, got {args.devices}")
        print(report.expert_parallelism(preset, args.devices), end="\n\n")
    runs = []
    outcomes: list[
        TrainingRun | OutOfMemory
    ] = []  # a result for each run, also for runs that ran out of memory
    interrupted = False
    for implementation, recipe in runs_to_make:
        try:
            run = train(
                preset.with_dtype(jax.numpy.bfloat16) if recipe == "bf16" else preset,
                corpus,
                name=implementation if recipe == "preset" else f"{implementation} {recipe}",
                implementation=IMPLEMENTATIONS[implementation],
                recipe=jgg.Recipe() if _is_fp8(recipe) else None,
                quantizes="layers" if recipe == "fp8-layers" else "optimizer",
                steps=steps,
                seed=args.seed,
                devices=args.devices,
            )
        except KeyboardInterrupt:
            interrupted = True
            break
        except OutOfMemory as failure:
            outcomes.append(failure)
            print(f"\n{failure.implementation}: {failure}\n", flush=True)
            continue
        runs.append(run)
        outcomes.append(run)
        print("", report.result(run), "", sep="\n", flush=True)
        if interrupted := run.interrupted:
            break
    if len(outcomes) > 1:
        print(report.comparison(outcomes))
    elif runs:
        print("Next: --compare trains with stock JAX too and shows the ratio of the speeds.")
    if args.output and runs:
        print("Wrote", ", ".join(map(str, report.save(runs, args.output))))
        if not report.can_plot():
            print("No loss.png, which needs Matplotlib: pip install matplotlib")
    if interrupted:
        raise KeyboardInterrupt
    if not runs:
        raise SystemExit("No training ran: the model does not fit into the device's memory.")


def _is_fp8(recipe: str) -> bool:
    return recipe.startswith("fp8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_grouped_gemm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {jgg.__version__}")
    parser.add_argument(
        "--preset",
        choices=["auto", *PRESETS],
        default="auto",
        help="size of the model; auto (default) means h200 if the kernels can run, else cpu",
    )
    usual = ", ".join(f"{preset.steps} for {name}" for name, preset in PRESETS.items())
    parser.add_argument(
        "--steps", type=_steps, help=f"training steps, at least 2 (default: the preset's, {usual})"
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, help="of parameters and batches, 0 to 2^32 - 1 (default 0)"
    )
    parser.add_argument(
        "--implementation",
        type=lambda name: "xla" if name == "reference" else name,
        choices=IMPLEMENTATIONS,
        nargs="+",
        help="implementations of the ragged matmul (default: auto); xla is this package's pure "
        "JAX, jax is stock jax.lax.ragged_dot",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        nargs="+",
        default=["preset"],
        help="precision of the model: preset (default) is the preset's dtype, bf16 is bfloat16, "
        "fp8 quantises operands of ragged matmuls, with weights quantised by the optimiser; in "
        "fp8-layers, layers quantise weights in each step",
    )
    parser.add_argument(
        "--devices",
        type=_devices,
        default=1,
        help="number of devices that divide experts and tokens (default 1); without a GPU, the CPU "
        "is split into them",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train with stock JAX too, and with all implementations if none is given; fewer steps",
    )
    parser.add_argument(
        "--output", type=Path, help="directory for runs.json and, with Matplotlib, loss.png"
    )
    return parser


def _divide_cpu(devices: int) -> None:
    """Splits the CPU into `devices` devices, for machines without a GPU, unless XLA_FLAGS does."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        pass  # JAX has started, so its number of devices is fixed


def _check_output(parser: argparse.ArgumentParser, directory: Path) -> None:
    """Ends the program before the training if nothing can be written to `directory`."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        parser.error(f"--output {directory}: cannot write there: {error}")


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _steps(text: str) -> int:
    steps = _whole_number(text)
    if steps < 2:
        raise argparse.ArgumentTypeError(f"{steps} is too few: the first step is not timed")
    return steps


def _devices(text: str) -> int:
    devices = _whole_number(text)
    if devices < 1:
        raise argparse.ArgumentTypeError(f"{devices} is not positive")
    return devices


def _seed(text: str) -> int:
    seed = _whole_number(text)
    if not 0 <= seed < 2**32:
        raise argparse.ArgumentTypeError(f"{seed} is not between 0 and 2^32 - 1")
    return seed


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        # End with the signal, so that a loop in a shell ends too, but print no traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
