"""Measures the gain of several GPUs under `jax.jit`, if batches and stacks of matrices are split.

python -m benchmarks.data_parallel --output benchmarks/results/data_parallel.json

`training` is a step of the demo's model with `--batch` sequences and all parameters on each GPU.
`muon` is an update of a stack of matrices per GPU. `split` is `optim.orthogonalize` of matrices
whose columns are split over the GPUs. Each matrix is gathered on one GPU. "one" is one GPU with its
share of the work, "ours" is all N GPUs. A speedup is the work of all GPUs over that of one in the
same time; N is perfect. "einsum" computes the same iteration with einsums, which XLA partitions.
Times are wall times of queues of calls. The queues of "one", "ours" and "einsum" alternate.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from benchmarks.fp8_training import model_of
from benchmarks.harness import report
from benchmarks.harness.command import Command
from benchmarks.harness.session import Job, Session
from benchmarks.muon import einsums
from benchmarks.peers.expert_parallel import AXIS, mesh_of
from jax_grouped_gemm import moe
from jax_grouped_gemm.demo.data import batches, load_corpus
from jax_grouped_gemm.demo.model import LanguageModel
from jax_grouped_gemm.demo.presets import PRESETS, Preset
from jax_grouped_gemm.demo.train import adamw, make_train_step

QUEUE = 4
TINY_STACK = 2, 32, 48
# Number and sizes of the matrices of each GPU.
SPLIT = {
    "12x4096x14336": (12, 4096, 14336),
    "48x2048x7168": (48, 2048, 7168),
    "192x768x2048": (192, 768, 2048),
}


def training(
    devices: int, preset: Preset, batch: int, seed: int, xla_defaults: bool = False
) -> Callable[[], object]:
    """Returns a function that takes a step of the demo's model, with `batch` sequences a device."""
    model = LanguageModel(preset.model, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, adamw(preset, preset.steps), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    del model, optimizer
    mesh = mesh_of(devices)
    state = jax.device_put(state, NamedSharding(mesh, P()))
    stream = batches(load_corpus().train, batch * devices, preset.sequence_length, seed)
    window = jax.device_put(next(stream), NamedSharding(mesh, P(AXIS)))
    step = jax.jit(
        make_train_step(graph),
        donate_argnums=0,
        compiler_options=None if xla_defaults else moe.data_parallel_compiler_options(mesh),
    )
    step = step.lower(state, window).compile()
    states = [state]

    def call():
        state, loss = step(states.pop(), window)
        states.append(state)
        return loss

    return call


def muon(devices: int, stack: tuple[int, int, int], seed: int) -> Callable[[], object]:
    """Returns a function that updates a stack of matrices on each device."""
    count, *matrix = stack
    split = NamedSharding(mesh_of(devices), P(AXIS))
    shape = count * devices, *matrix
    draw = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=split)
    gradients = {"w": draw(jax.random.key(seed))}
    optimizer = jgg.optim.muon(1e-3)
    state = jax.tree.map(
        lambda x: jax.device_put(x, split if x.shape == shape else NamedSharding(split.mesh, P())),
        jax.jit(optimizer.init)(gradients),
    )
    update = jax.jit(lambda g, s: optimizer.update(g, s, g)).lower(gradients, state).compile()
    return lambda: update(gradients, state)


def orthogonalization(
    devices: int, stack: tuple[int, int, int], seed: int, plain: bool = False
) -> Callable[[], object]:
    """Returns a function that orthogonalises matrices that are split along their columns."""
    count, *matrix = stack
    split = NamedSharding(mesh_of(devices), P(None, None, AXIS))
    shape = count * devices, *matrix
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=split)
    x = draw(jax.random.key(seed))

    def run(x):
        return einsums([x]) if plain else jgg.optim.orthogonalize([x], shardings=[split])

    call = jax.jit(
        run,
        out_shardings=[split],
        compiler_options=moe.expert_parallel_compiler_options(split.mesh),
    )
    call = call.lower(x).compile()
    return lambda: call(x)


def measure(calls: Mapping[str, Callable[[], object]], devices: int, rounds: int) -> dict:
    """Returns the record of alternating calls of "one", "ours" and, if given, "einsum"."""
    us: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _, (name, call) in itertools.product(range(rounds), calls.items()):
        start = time.perf_counter()
        results = [call() for _ in range(QUEUE)]
        jax.block_until_ready(results[-1])
        us[name].append((time.perf_counter() - start) * 1e6 / QUEUE)
    medians = {name: statistics.median(times) for name, times in us.items()}
    speedups = [devices * a / b for a, b in zip(us["one"], us["ours"], strict=True)]
    ratios = {"speedup": statistics.median(speedups)}
    if "einsum" in us:
        ratios["einsum"] = medians["einsum"] / medians["ours"]
    peers = {
        name: {"status": "measured", "us": us[name], "median_us": medians[name]} for name in us
    }
    return {"devices": devices, "peers": peers, "ratios": ratios}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--devices", type=int, help="default: all")
    add("--preset", default="h200", choices=PRESETS)
    add("--batch", type=int, default=8, help="sequences a GPU")
    add("--xla-defaults", action="store_true", help="no moe.data_parallel_compiler_options")
    add("--split", nargs="*", default=list(SPLIT), choices=SPLIT, metavar="STACK",
        help="stacks whose columns are split")  # fmt: skip
    add("--stack", type=int, nargs=3, default=[192, 768, 2048], metavar="SIZE")


def complete(options: argparse.Namespace) -> None:
    options.devices = options.devices or len(jax.devices())
    options.recorder, options.no_host = "clock", True
    if options.dry_run:
        options.batch, options.stack = 1, TINY_STACK
        options.split = options.split[:1]


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    devices, seed, stack = options.devices, options.seed, tuple(options.stack)
    model, preset = model_of(options)
    functions = {
        f"{model}/training": functools.partial(
            training, preset=preset, batch=options.batch, seed=seed,
            xla_defaults=options.xla_defaults,
        ),
        f"{'x'.join(map(str, stack))}/muon": functools.partial(muon, stack=stack, seed=seed),
    }  # fmt: skip
    for name in options.split:
        matrices = TINY_STACK if options.dry_run else SPLIT[name]
        of = functools.partial(orthogonalization, stack=matrices, seed=seed)
        functions[f"{'tiny' if options.dry_run else name}/split"] = of

    def case(name: str) -> dict:
        shape, op = name.split("/")
        calls = {"one": functions[name](1), "ours": functions[name](devices)}
        if op == "split":
            calls["einsum"] = functions[name](devices, plain=True)
        found = measure(calls, devices, options.rounds)
        return {"case": name, "shape": {"name": shape}, "op": op, **found}

    return [Job(name, functools.partial(case, name)) for name in functions]


def texts(results: Mapping) -> list[str]:
    rows = [
        [record["case"]]
        + [f"{record['peers'][name]['median_us']:.0f}" for name in ("one", "ours")]
        + [f"{record['ratios'].get(name, 0):.3f}" for name in ("speedup", "einsum")]
        for record in results["cases"]
    ]
    header = ["case", "one GPU us", "all us", "times the work", "einsum / ours"]
    return [report.table(header, rows)]


COMMAND = Command(
    "benchmarks.data_parallel", __doc__, jobs, add_arguments, complete, rounds=8, texts=texts
)

if __name__ == "__main__":
    COMMAND.main()
