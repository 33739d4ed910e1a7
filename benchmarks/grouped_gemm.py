"""Lists of unequal products: our schedulers, CUTLASS's grouped kernels, and a loop of cuBLAS.

python -m benchmarks.grouped_gemm --output benchmarks/results/grouped_gemm.json
python -m benchmarks.grouped_gemm --dtype float32 --precision highest
python -m benchmarks.grouped_gemm --dtype float64

The loop is one `jnp.matmul` a problem, all in one jitted function, with the autotuner and matmul
kernels of XLA off, so that all are those of cuBLAS. CUTLASS's kernels, of bfloat16, are those of
its examples 24 and 57, built by `benchmarks/cutlass/build.sh`. Schedulers come with and without
sorting by k. Everything is timed as the other benchmarks are: device time, interleaved round by
round, cold cache. Ratios are the loop's time over another's; gaps between its kernels count only in
the wall time, which is in the JSON file.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks import machine, recorders, results_file, timing
from benchmarks.measure import first_line, geometric_mean
from benchmarks.peers import cutlass
from benchmarks.peers.bandwidth import copy_call
from benchmarks.peers.base import Call, jax_call, on_gpu

Problem = tuple[int, int, int]  # m, k, n

# In CUTLASS's notes on its grouped schedulers: what sorting is for.
FOUR_PROBLEMS = ((1152, 128, 768), (1152, 1024, 768), (768, 128, 1152), (768, 1024, 1152))
VARIANTS = {
    f"{scheduler} {'sorted' if sort else 'unsorted'}": dict(scheduler=scheduler, sort_problems=sort)
    for scheduler in ("host_precomputed", "device")
    for sort in (True, False)
}
# The kernel of `benchmarks.peers.cutlass`, and whether problems are sorted.
CUTLASS = {
    f"CUTLASS {kernel} {'sorted' if sort else 'unsorted'}": (kernel, sort)
    for kernel in cutlass.PRODUCTS
    for sort in (True, False)
}
LOOP = "cuBLAS loop"
DEFAULT = "host_precomputed sorted"
CUBLAS_ONLY = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


@dataclass(frozen=True)
class Kind:
    """What is multiplied, and what a result may be off by, relative to the largest element."""

    dtype: str
    precision: str
    error_limit: float

    def named(self, name: str) -> str:
        """The name of a list with such operands in the results."""
        return name if self.dtype == "bfloat16" else f"{name}/{self.dtype}/{self.precision}"

    @property
    def exact_dtype(self) -> str:
        """In which products are checked."""
        return "float32" if self.dtype == "bfloat16" else "float64"


BFLOAT16 = Kind("bfloat16", "default", 0.02)
KINDS = (
    BFLOAT16,
    Kind("float32", "default", 2e-3),
    Kind("float32", "highest", 5e-6),
    Kind("float64", "default", 1e-13),
)


def random_problems(count: int, low: int, high: int, multiple: int, seed: int) -> list[Problem]:
    """Sides that are multiples, drawn evenly from [low, high]."""
    sides = np.random.default_rng(seed).integers(low // multiple, high // multiple + 1, (count, 3))
    return [tuple(int(x) for x in multiple * row) for row in sides]


def lists() -> dict[str, list[Problem]]:
    """The lists by name; the random ones are the same in every run."""
    return {
        "four": list(FOUR_PROBLEMS),
        # The sides of CUTLASS's tests of its grouped kernels.
        "cutlass_24": random_problems(24, 24, 24 + 8 * 63, 8, seed=0),
        **{
            f"random_{count}": random_problems(count, 24, 1024, 8, seed=count)
            for count in (24, 79, 150, 300)
        },
        "big_8": random_problems(8, 2048, 8192, 256, seed=1),
        "deep_and_shallow": [(2048, k, 2048) for k in (256, 8192) * 8],
    }


TINY = {"tiny": random_problems(5, 8, 40, 8, seed=0)}


def loop(lhs: list[jax.Array], rhs: list[jax.Array], precision: str) -> list[jax.Array]:
    """One product after the other."""
    return [jnp.matmul(a, b, precision=precision) for a, b in zip(lhs, rhs, strict=True)]


def ours(variant: str, precision: str):
    """The public function with the options of a variant."""
    implementation = "cuda" if on_gpu() else "reference"
    options = dict(implementation=implementation, precision=precision)
    return functools.partial(jgg.grouped_gemm, **options, **VARIANTS[variant])


def _cublas_only() -> dict[str, object] | None:
    return CUBLAS_ONLY if on_gpu() else None


def operands(problems: Sequence[Problem], dtype: str) -> tuple[list[jax.Array], list[jax.Array]]:
    """Normally distributed."""
    rng = np.random.default_rng(0)

    drawn = np.float64 if dtype == "float64" else np.float32

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape, drawn), dtype)

    return [random(m, k) for m, k, _ in problems], [random(k, n) for _, k, n in problems]


class Check:
    """Results of a list against more precise products.

    Those come from the host, and results are compared as one array, because there is no program for
    so many shapes that XLA compiles quickly.
    """

    def __init__(self, lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], dtype: str):
        exact = [
            np.asarray(a).astype(dtype) @ np.asarray(b).astype(dtype)
            for a, b in zip(lhs, rhs, strict=True)
        ]
        scales = np.stack([np.abs(x).max() for x in exact])
        flat = np.concatenate([x.ravel() / scale for x, scale in zip(exact, scales, strict=True)])
        with jax.enable_x64(True):
            self._exact = jnp.asarray(flat)
            self._inverse = jnp.asarray(np.repeat(1 / scales, [x.size for x in exact]))

    def error(self, outs: Sequence[jax.Array]) -> float:
        """The worst problem's largest error relative to its largest element."""
        with jax.enable_x64(True):
            return float(_largest_error(outs, self._exact, self._inverse))


@jax.jit
def _largest_error(outs: Sequence[jax.Array], exact: jax.Array, inverse: jax.Array) -> jax.Array:
    flat = jnp.concatenate([out.ravel() for out in outs])
    return jnp.max(jnp.abs(flat.astype(exact.dtype) * inverse - exact))


def contenders(
    lhs: list[jax.Array], rhs: list[jax.Array], kind: Kind
) -> tuple[dict[str, Call], dict[str, dict]]:
    """Calls whose results are right with their errors, and why others of CUTLASS's are left out.

    Raises:
      RuntimeError: if a result of ours is wrong.
    """
    check = Check(lhs, rhs, kind.exact_dtype)
    functions = {variant: jax.jit(ours(variant, kind.precision)) for variant in VARIANTS}
    functions[LOOP] = jax.jit(
        functools.partial(loop, precision=kind.precision), compiler_options=_cublas_only()
    )
    calls = {name: jax_call(function, lhs, rhs) for name, function in functions.items()}
    errors = {name: check.error(call.run()) for name, call in calls.items()}
    if not max(errors[variant] for variant in VARIANTS) < kind.error_limit:
        raise RuntimeError(f"our results are wrong: errors {errors}")
    left_out = {}
    if kind is not BFLOAT16 or (reason := cutlass.unavailable_reason()):
        left_out["CUTLASS"] = reason if kind is BFLOAT16 else "built for bfloat16"
        return calls, {"error": errors, "left_out": left_out}
    for name, (kernel, sort) in CUTLASS.items():
        try:
            call = cutlass.products(kernel, lhs, rhs, sort)
            errors[name] = check.error(call.to_jax(call.run()))
        except RuntimeError as problem:
            left_out[name] = first_line(problem)
            continue
        if errors[name] < kind.error_limit:
            calls[name] = call
        else:
            left_out[name] = f"wrong: error {errors[name]:.1e}"
    return calls, {"error": errors, "left_out": left_out}


def measure(
    name: str, problems: Sequence[Problem], recorder, rounds: int, flush, kind: Kind = BFLOAT16
):
    """Times every variant, CUTLASS's kernels and the loop on one list."""
    lhs, rhs = operands(problems, kind.dtype)
    calls, checked = contenders(lhs, rhs, kind)
    samples = timing.interleave(calls, recorder, rounds, flush)
    plans = {
        variant: jgg.explain(ours(variant, kind.precision), lhs, rhs).plans[0]
        for variant in VARIANTS
    }
    return {
        "list": kind.named(name),
        "dtype": kind.dtype,
        "precision": kind.precision,
        "problems": problems,
        **checked,
        "activities": {variant: found[0].activities for variant, found in samples.items()},
        "predicted_steps": {
            variant: [launch.steps for launch in plan.launches] for variant, plan in plans.items()
        },
        "us": {variant: [sample.us for sample in found] for variant, found in samples.items()},
        "wall_us": {
            variant: timing.host_times(call, samples[variant][0].us).wall_us
            for variant, call in calls.items()
        },
    }


def ratios(case: dict[str, object]) -> dict[str, float]:
    """The loop's time over that of each of the others."""
    times = case["us"]
    return {
        variant: timing.median_ratio(times[LOOP], found)
        for variant, found in times.items()
        if variant != LOOP
    }


def lines(case: dict[str, object]) -> list[str]:
    """What is printed: ours and the loop in one line, CUTLASS's kernels in the next."""
    flops = sum(2 * m * k * n for m, k, n in case["problems"])
    found, errors = ratios(case), case["error"]

    def column(variant):
        us = statistics.median(case["us"][variant])
        ratio = f", {found[variant]:.2f}" if variant in found else ""
        return f"{variant} {us:.1f} us ({flops / us / 1e6:.0f}{ratio})"

    head = f"{case['list']:17s} {len(case['problems']):4d}"
    error = f"error {errors[DEFAULT]:.1e}, loop {errors[LOOP]:.1e}"
    rows = [[head, error, *map(column, (*VARIANTS, LOOP))]]
    if others := [variant for variant in CUTLASS if variant in found]:
        rows.append([" " * len(head), *map(column, others)])
    printed = [" | ".join(row) for row in rows]
    return printed + [f"    {name}: {reason}" for name, reason in case["left_out"].items()]


def geometric_means(cases: Sequence[dict[str, object]]) -> dict[str, float]:
    """Of each one's ratios over all lists that it was measured on."""
    found: dict[str, list[float]] = {}
    for case in cases:
        for variant, ratio in ratios(case).items():
            found.setdefault(variant, []).append(ratio)
    return {variant: geometric_mean(values) for variant, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grouped_gemm", description=__doc__)
    parser.add_argument("--lists", nargs="+", choices=list(lists()), help="default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="bfloat16")
    parser.add_argument(
        "--precision", choices=("default", "highest"), default="default", help="of float32"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dry-run", action="store_true", help="a tiny list, any machine")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--output", type=Path, metavar="JSON")
    options = parser.parse_args(arguments)
    found = [x for x in KINDS if (x.dtype, x.precision) == (options.dtype, options.precision)]
    if not found:
        parser.error(f"--precision {options.precision} is for --dtype float32")
    rounds = 2 if options.dry_run else options.rounds
    names = ["clock"] if options.dry_run else list(recorders.RECORDERS)
    recorder, skipped = recorders.open_best(names, copy_call())
    flush = timing.CacheFlush(2**20) if options.dry_run else timing.CacheFlush()

    chosen = TINY if options.dry_run else {x: lists()[x] for x in options.lists or lists()}
    cases = []
    print("list, problems, largest error, device time (TFLOP/s, times as fast as the loop)")
    for name, problems in chosen.items():
        with jax.enable_x64(options.dtype == "float64"):
            cases.append(measure(name, problems, recorder, rounds, flush, *found))
        print("\n".join(lines(cases[-1])), flush=True)
        # After each, so that a killed run loses only its last one.
        if options.output:
            record = {**machine.describe(options.commit), "gpu": machine.gpu_state()}
            results_file.save(record | {"recorder": recorder.name, "cases": cases}, options.output)
    means = ", ".join(f"{variant} {x:.2f}" for variant, x in geometric_means(cases).items())
    print(f"geometric means over the loop: {means}")
    print(f"measured with {recorder.name}" + "".join(f"; {reason}" for reason in skipped))


if __name__ == "__main__":
    main()
