"""Measures mixture-of-experts layers whose experts are divided among the GPUs of one host.

python -m benchmarks.expert_parallel --output benchmarks/results/expert_parallel.json

`ours` is `moe.expert_parallel_mlp` with its own choices. Other names are other strategies. All are
compiled with `moe.expert_parallel_compiler_options`, so that copy engines send ppermutes, except
those named after NCCL. `apart` first sends gradients of tokens, and then computes gradients of
weights. `naive` gathers all tokens, runs `ragged_mlp` over the rows of all experts with a group
offset, and scatters the sums, as MaxText's "ring of experts" does. `local` is one GPU's share of
the layer without communication: T tokens and E/N experts. A fraction is the time of `local` over
that of a strategy. Backward passes start from the forward pass's result, so that they cannot begin
before the forward pass has ended. `links` are the layer's collectives alone.

Each `--layer T,D,F,E,K` (T tokens per GPU) measures a step of a layer in each way that
`moe.expert_parallel_mlp` could choose, and compares its choice with the fastest way.
`--layers auto` means the default layers and six others.

Times are wall times of queues of calls.
"""

import argparse
import dataclasses
import functools
import math
import os
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

# On a shared host, not everybody may use multicast memory.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402

from benchmarks.harness import check, report  # noqa: E402
from benchmarks.harness.cases import by_name  # noqa: E402
from benchmarks.harness.command import Command, add_choices  # noqa: E402
from benchmarks.harness.inputs import LatestInputs  # noqa: E402
from benchmarks.harness.measure import Workload  # noqa: E402
from benchmarks.harness.peer import Call  # noqa: E402
from benchmarks.harness.session import Job, Session  # noqa: E402
from benchmarks.moe import Layer, relative_errors  # noqa: E402
from benchmarks.peers.expert_parallel import (  # noqa: E402
    AXIS,
    FORWARD,
    SPLIT,
    STEP,
    STRATEGIES,
    WAYS,
    Problem,
    QueuedCall,
    mesh_of,
    naive,
    peers,
    result_and_gradients,
    ways,
)
from jax_grouped_gemm import moe  # noqa: E402
from jax_grouped_gemm._src.expert_parallel.prediction import Shape, choose, predict  # noqa: E402

# The error of products and sums whose intermediate results are rounded to bfloat16.
TOLERANCE = 0.02


LAYERS = by_name(
    Layer("qwen3_30b", 8192, 2048, 768, 128, 8),
    Layer("dsv3", 4096, 7168, 2048, 64, 8),
    Layer("mixtral", 4096, 4096, 14336, 8, 2),
)
"""Layers by name, with the tokens of one GPU."""


def layer_of(t: int, d: int, f: int, e: int, k: int) -> Layer:
    return Layer(f"t{t}_d{d}_f{f}_e{e}_k{k}", t, d, f, e, k)


UNTUNED = (
    layer_of(8192, 2048, 512, 512, 10),
    layer_of(8192, 2880, 2880, 32, 4),
    # Drawn at random among layers whose step takes two GPUs milliseconds.
    layer_of(2048, 6400, 2752, 32, 3),
    layer_of(16384, 4224, 576, 112, 3),
    layer_of(16384, 3200, 896, 56, 4),
    layer_of(4096, 3584, 3712, 8, 3),
)
"""Layers for which nothing was tuned."""

TINY = Layer("tiny", 48, 64, 32, 8, 2)
OPS = (FORWARD, STEP)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _random_operands(problem_shape, devices, key):
    tokens, embed, hidden, experts, top_k = problem_shape
    keys = jax.random.split(key, 6)
    scores = jax.random.uniform(keys[0], (tokens * devices, experts))
    chosen = lax.top_k(scores, top_k)[1]
    weights = jax.random.uniform(keys[1], chosen.shape, minval=0.1)
    weights /= weights.sum(axis=1, keepdims=True)

    def normal(key, *shape, scale):
        # Uniform numbers of the same variance take a tenth of the time to draw.
        bound = scale * 3**0.5
        return jax.random.uniform(key, shape, jnp.bfloat16, -bound, bound)

    return (
        normal(keys[2], tokens * devices, embed, scale=1),
        chosen.astype(jnp.int32),
        weights,
        normal(keys[3], experts, embed, hidden, scale=embed**-0.5),
        normal(keys[4], experts, embed, hidden, scale=embed**-0.5),
        normal(keys[5], experts, hidden, embed, scale=hidden**-0.5),
    )


def operands_of(layer: Layer, devices: int, seed: int) -> tuple[jax.Array, ...]:
    """Returns x, experts (uniformly drawn), weights, wi_0, wi_1 and wo, split over the devices."""
    made = _random_operands(_numbers(layer), devices, jax.random.key(seed))
    return jax.device_put(made, NamedSharding(mesh_of(devices), SPLIT))


def max_over_mean(experts: jax.Array, problem: Problem) -> float:
    """Returns the rows of the busiest device over the mean."""
    owner = np.asarray(experts).reshape(-1) // (problem.layer.experts // problem.devices)
    rows = np.bincount(owner, minlength=problem.devices)
    return float(rows.max() / rows.mean())


def work(problem: Problem, operands: tuple[jax.Array, ...], seed: int) -> Workload:
    """Returns the workload of a layer, whose results are compared with those of `naive`."""
    layer = problem.layer
    expected = jax.jit(result_and_gradients(naive(problem), problem.op))(*operands)

    def judge(call: Call) -> tuple[check.Error, bool]:
        errors = relative_errors(tuple(call.run()), tuple(expected))
        error = check.Error(max(map(float, errors)))
        return error, error.within(call.tolerance or TOLERANCE)

    passes = 3 if problem.op == STEP else 1
    return Workload(
        f"{layer.name}/{problem.op}",
        problem,
        operands,
        judge,
        description=dict(shape=dataclasses.asdict(layer), op=problem.op, devices=problem.devices)
        | dict(distribution="uniform", max_over_mean=max_over_mean(operands[1], problem))
        | dict(dtype="bfloat16", copy_engines=bool(_compiler_options(problem.devices)))
        | dict(xla_flags=os.environ.get("XLA_FLAGS", "")),
        flops=passes * 6 * layer.rows * layer.embed * layer.hidden,
        bytes=0,
        written_bytes=0,
        seed=seed,
    )


LINKS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all_to_all": lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(
        x, AXIS, [(i, (i + 1) % lax.axis_size(AXIS)) for i in range(lax.axis_size(AXIS))]
    ),
}


def _compiler_options(devices: int) -> dict[str, str]:
    return moe.expert_parallel_compiler_options(mesh_of(devices))


def measure_links(layer: Layer, devices: int, rounds: int) -> dict:
    """Returns microseconds and GB/s of every collective for the tokens of the layer."""
    mesh = mesh_of(devices)
    tokens = jnp.zeros((layer.tokens * devices, layer.embed), jnp.bfloat16)
    partial_sums = jnp.zeros((layer.tokens * devices**2, layer.embed), jnp.bfloat16)
    sent = tokens.nbytes // devices * (devices - 1)
    results = {}
    for name, collective in LINKS.items():
        x = tokens if name == "ppermute" else partial_sums
        x = jax.device_put(x, NamedSharding(mesh, SPLIT))
        function = jax.shard_map(collective, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
        compiled = jax.jit(function).lower(x).compile(_compiler_options(devices))
        jax.block_until_ready(compiled(x))
        call = QueuedCall(functools.partial(compiled, x))
        us = statistics.median(call.elapsed_us() for _ in range(rounds + 1))
        results[name] = {"us": us, "gb_per_s": sent / us / 1e3}
    return results


def fractions(record: Mapping) -> dict[str, float]:
    """Returns the time of `local` over that of every strategy, medians over the rounds."""
    alone = record["peers"].get("local", {}).get("us")
    if not alone:
        return {}
    return {
        name: statistics.median(a / b for a, b in zip(alone, peer["us"], strict=True))
        for name, peer in record["peers"].items()
        if name != "local" and "us" in peer
    }


def texts(results: Mapping) -> list[str]:
    header = ["case", "peer", "us", "fraction", "MiB", "error", "predicted us"]
    rows, lines = [], []
    for record in results["cases"]:
        for name, peer in record["peers"].items():
            if "median_us" not in peer:
                lines.append(f"{record['case']} {name} {peer['status']}: {peer.get('reason', '')}")
                continue
            found = {
                "us": peer["median_us"],
                "fraction": record["fractions"].get(name),
                "MiB": peer.get("temporary_bytes", 0) / 2**20,
                "error": peer.get("error", {}).get("total"),
                "predicted us": peer.get("predicted_us"),
            }
            cells = (f"{x:.3g}" if x and x < 100 else f"{x or 0:.0f}" for x in found.values())
            rows.append([record["case"], name, *cells])
        if choice := record.get("choice"):
            lines.append(
                f"{record['case']}: the layer chose {choice['chosen_like']}, "
                f"{choice['over_fastest']:.3f} times the fastest, {choice['fastest']}"
            )
        for name, link in record.get("links", {}).items():
            lines.append(f"link {name}: {link['us']:.0f} us, {link['gb_per_s']:.0f} GB/s")
    return [report.table(header, rows), "\n".join(lines)]


def choices(record: Mapping) -> dict[str, float | str]:
    """Returns the way that the layer chose, the fastest way, and the ratio of their times."""
    medians = {
        name: peer["median_us"] for name, peer in record["peers"].items() if "median_us" in peer
    }
    chosen = medians.pop("ours", math.nan)
    if not medians:
        return {}
    fastest = min(medians, key=lambda name: medians[name])
    return {
        "fastest": fastest,
        "over_fastest": chosen / medians[fastest],
        "chosen_like": record["chosen_like"],
    }


def _layer(text: str) -> Layer:
    numbers = [int(number) for number in text.split(",")]
    if len(numbers) != 5 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be T,D,F,E,K, five positive integers, got {text!r}")
    return layer_of(*numbers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--layers", [*LAYERS, "auto"], list(LAYERS))
    parser.add_argument("--layer", action="append", type=_layer, metavar="T,D,F,E,K")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling threads")
    add_choices(parser, "--ops", OPS)
    parser.add_argument("--devices", type=int, help="default: all")
    add_choices(parser, "--strategies", STRATEGIES)
    others = [peer.name for peer in peers() if peer.name not in STRATEGIES]
    parser.add_argument("--peers", nargs="*", default=others, choices=others, metavar="NAME")


def complete(options: argparse.Namespace) -> None:
    options.compares_ways = options.layer is not None or "auto" in options.layers
    if "auto" in options.layers:
        options.layer = [*LAYERS.values(), *UNTUNED, *(options.layer or ())]
    if options.compares_ways:
        options.layers, options.ops = options.layer, [STEP]
    else:
        options.layers = [LAYERS[name] for name in options.layers]
    if options.dry_run:
        options.layers = [TINY]
    options.devices = options.devices or len(jax.devices())
    if options.devices > len(jax.devices()):
        raise ValueError(f"--devices: there are {len(jax.devices())}, got {options.devices}")
    # Measure wall time, because kernels of several GPUs overlap.
    options.recorder, options.no_host = "clock", True


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    devices = options.devices
    inputs = LatestInputs(lambda layer: operands_of(layer, devices, options.seed))
    wanted = {*options.strategies, *options.peers}
    compared = ways() if options.compares_ways else [p for p in peers() if p.name in wanted]
    problems = [Problem(layer, op, devices) for layer in options.layers for op in options.ops]
    if options.compares_ways:
        _compile_before(compared, problems, options.workers)

    def measure(problem: Problem) -> dict:
        operands = inputs.of(problem.layer)
        record = session.compare(work(problem, operands, options.seed), compared)
        for peer in compared:
            if problem in peer.temporary_bytes and peer.name in record["peers"]:
                size = peer.temporary_bytes[problem]
                record["peers"][peer.name]["temporary_bytes"] = size
        record["fractions"] = fractions(record)
        if options.compares_ways:
            shape = Shape(*_numbers(problem.layer), devices)
            record["chosen_like"] = _chosen(shape)
            for name, way in WAYS.items():
                seconds = predict(shape, **way, copy_engines=True).step_seconds
                record["peers"].get(name, {})["predicted_us"] = seconds * 1e6
            record["choice"] = choices(record)
        if problem.op == FORWARD:
            record["links"] = measure_links(problem.layer, devices, options.rounds)
        return record

    return [
        Job(f"{problem.layer.name}/{problem.op}", functools.partial(measure, problem))
        for problem in problems
    ]


def _chosen(shape: Shape) -> str:
    """Returns the name of the way that the layer chooses."""
    chosen = choose(shape)
    options = {name: getattr(chosen, name) for name in ("strategy", "combine", "overlap", "save")}
    return next(n for n, way in WAYS.items() if all(options[o] == x for o, x in way.items()))


def _compile_before(compared, problems, workers: int) -> None:
    """Compiles all programs in parallel, because XLA compiles without Python's lock."""
    with ThreadPoolExecutor(workers) as pool:
        for problem in problems:
            split = NamedSharding(mesh_of(problem.devices), SPLIT)
            shapes = jax.eval_shape(
                functools.partial(_random_operands, _numbers(problem.layer), problem.devices),
                jax.random.key(0),
            )
            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in shapes]
            for peer in compared:
                pool.submit(peer.compile_before, problem, *avals)


def _numbers(layer: Layer) -> tuple[int, ...]:
    return layer.tokens, layer.embed, layer.hidden, layer.experts, layer.top_k


COMMAND = Command(
    "benchmarks.expert_parallel", __doc__, jobs, add_arguments, complete, rounds=6, texts=texts
)

if __name__ == "__main__":
    COMMAND.main()
