"""Grouped rank-k and rank-2k updates against the JAX expressions that they replace.

python -m benchmarks.rank_k --output benchmarks/results/rank_k.json

Everything is jitted, takes the same stacks [g, n, k] and is timed as the other benchmarks are:
device time, interleaved round by round, cold cache. Ratios are the expression's time over ours.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks import machine, recorders, timing
from benchmarks.peers.base import Call, jax_call, on_gpu
from benchmarks.peers.copy import copy_call

SHAPES = (
    (8, 2048, 2048),
    (2, 4096, 4096),
    (1, 8192, 8192),
    (16, 1024, 1024),
    (64, 256, 1024),
    (16, 512, 512),
    (32, 1024, 256),
)
TINY_SHAPES = ((2, 24, 16), (1, 40, 8))
ERROR_LIMIT = 0.02  # of the largest element


def product(a, b):
    """A @ B.T of each matrix."""
    return jnp.einsum("gik,gjk->gij", a, b)


def _mirrored(p):
    return p + jnp.swapaxes(p, 1, 2)


# What a JAX user writes today: all of them give both triangles, the last one half the result.
EXPRESSIONS: dict[str, dict[str, Callable[..., jax.Array]]] = {
    "syrk": {"A@A.T": lambda a, b: product(a, a)},
    "syr2k": {
        "A@B.T + B@A.T": lambda a, b: product(a, b) + product(b, a),
        "P + P.T": lambda a, b: _mirrored(product(a, b)),
        "A@B.T": lambda a, b: product(a, b),
    },
}


def ours(op: str, implementation: str, **options) -> Callable[..., jax.Array]:
    """The public function as a function of both operands."""
    if op == "syrk":
        return lambda a, b: jgg.grouped_syrk(a, implementation=implementation, **options)
    return lambda a, b: jgg.grouped_syr2k(a, b, implementation=implementation, **options)


def variants(op: str) -> dict[str, Callable[..., jax.Array]]:
    """Ours, by what becomes of the other triangle and how operands are stored."""
    implementation = "cuda" if on_gpu() else "reference"
    make = functools.partial(ours, op, implementation)

    def transposed(a, b):
        return make(transpose=True)(
            *(x.reshape(x.shape[0], x.shape[2], x.shape[1]) for x in (a, b))
        )

    return {"triangle": make(), "symmetric": make(symmetrize_output=True), "transposed": transposed}


def error(op: str, symmetric: jax.Array, a: jax.Array, b: jax.Array) -> float:
    """The largest error relative to the largest element, against float32 products."""
    with jax.default_matmul_precision("highest"):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        exact = product(a, a) if op == "syrk" else _mirrored(product(a, b))
    return float(jnp.max(jnp.abs(symmetric - exact)) / jnp.max(jnp.abs(exact)))


def calls_of(op: str, a: jax.Array, b: jax.Array) -> dict[str, Call]:
    """Compiles everything that is timed for one op."""
    functions = {**variants(op), **EXPRESSIONS[op]}
    return {name: jax_call(jax.jit(function), a, b) for name, function in functions.items()}


def measure(op, shape, recorder, rounds, flush) -> dict[str, object]:
    """Times one op on one shape."""
    g, n, k = shape
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((g, n, k), np.float32), jnp.bfloat16) for _ in "ab")
    calls = calls_of(op, a, b)
    wrong = error(op, calls["symmetric"].run(), a, b)
    if not wrong < ERROR_LIMIT:
        raise RuntimeError(f"{op} {shape} is wrong: error {wrong}")
    samples = timing.interleave(calls, recorder, rounds, flush)
    times = {name: [sample.us for sample in found] for name, found in samples.items()}
    return {"op": op, "shape": shape, "error": wrong, "us": times}


def ratios(case: dict[str, object], variant: str) -> dict[str, float]:
    """Each expression's time over that of one of our variants."""
    times = case["us"]
    return {
        name: timing.median_ratio(times[name], times[variant]) for name in EXPRESSIONS[case["op"]]
    }


def row(case: dict[str, object]) -> str:
    """One line of the printed table."""
    (g, n, k), times = case["shape"], case["us"]
    flops = (2 if case["op"] == "syr2k" else 1) * g * n * n * k
    columns = [f"{case['op']:5s} {g:3d} x {n} x {k}".ljust(24)]
    for name in variants(case["op"]):
        us = statistics.median(times[name])
        columns.append(f"{name} {us:.1f} us ({flops / us / 1e6:.0f})")
    for variant in ("triangle", "symmetric"):
        found = ", ".join(f"{name} {x:.2f}" for name, x in ratios(case, variant).items())
        columns.append(f"over {variant}: {found}")
    return " | ".join(columns)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_k", description=__doc__)
    parser.add_argument("--ops", nargs="+", default=list(EXPRESSIONS), choices=list(EXPRESSIONS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, any machine")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--output", type=Path, metavar="JSON")
    options = parser.parse_args(arguments)
    rounds = 2 if options.dry_run else options.rounds
    names = ["clock"] if options.dry_run else list(recorders.RECORDERS)
    recorder, skipped = recorders.open_best(names, copy_call())
    flush = timing.CacheFlush(2**20) if options.dry_run else timing.CacheFlush()

    cases = []
    print("device time (TFLOP/s of n n k a product), ratios: expression over ours")
    for shape in TINY_SHAPES if options.dry_run else SHAPES:
        for op in options.ops:
            cases.append(measure(op, shape, recorder, rounds, flush))
            print(row(cases[-1]), flush=True)
    print(f"measured with {recorder.name}" + "".join(f"; {reason}" for reason in skipped))
    if options.output:
        record = {**machine.describe(options.commit), "gpu": machine.gpu_state(), "cases": cases}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
