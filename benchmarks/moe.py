"""Measures whole mixture-of-experts layers without router: forward, and forward and backward.

python -m benchmarks.moe --output benchmarks/results/moe.json

`ours` is `moe.dropless_mlp`, which sorts by expert. `ours_unfused` has separate gathers, products
and activation. `quack` consists of QuACK's fused kernels, and gets sorted rows. `quack_tuned` has
the fastest known configurations, or finds them among `--sweep N`; `--sweep 44 --retune` tries all.
`--recipe` adds layers in FP8: `fp8_NAME_quantized` gets quantised weights, as in an optimiser step
of many microbatches; `fp8_NAME` quantises them in each call, as in a step of one microbatch.
`--tokens` measures layers of few tokens, as in decoding, where only visited experts count as read.
`--batch-invariant` adds `ours_batch_invariant`. Parts are sums of times of kernels with the same
purpose.
"""

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks.harness import check, report
from benchmarks.harness.cases import by_name
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.inputs import LatestInputs
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import Call, JaxPeer, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.peers.fp8_layer import RECIPES, Fp8Layer
from benchmarks.peers.quack_moe import QuackLayer
from benchmarks.peers.sweep import Sweep
from jax_grouped_gemm import moe

# The error of products whose intermediate results are rounded to bfloat16.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Layer:
    """A layer for T tokens of D features, each of which visits K of E experts of F features."""

    name: str
    tokens: int
    embed: int
    hidden: int
    experts: int
    top_k: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


LAYERS = by_name(
    Layer("qwen3_30b", 8192, 2048, 768, 128, 8),
    Layer("sonic_7b", 24576, 1536, 256, 128, 8),
    Layer("sonic_4096", 8192, 4096, 512, 128, 8),
    Layer("dsv3_slice", 4096, 7168, 2048, 32, 8),
    Layer("mixtral", 4096, 4096, 14336, 8, 2),
    Layer("gptoss", 8192, 2880, 2880, 32, 4),
    Layer("nano", 16384, 1280, 128, 192, 8),
    Layer("granular", 16384, 1536, 192, 160, 6),
    Layer("qwen3_next", 8192, 2048, 512, 512, 10),
    Layer("sonic_30b", 32768, 4096, 256, 256, 16),
)
TINY = Layer("tiny", 48, 64, 32, 4, 2)
OPS = ("moe_forward", "moe_step")


@dataclass(frozen=True)
class Problem:
    """The static parameters of a compiled program."""

    layer: Layer
    op: str

    @property
    def is_step(self) -> bool:
        return self.op == "moe_step"


Run = Callable[..., tuple[jax.Array, ...]]


def layer_function(problem: Problem, implementation: object, **more: object) -> Run:
    """Returns a function of (x, experts, weights, wi_0, wi_1, wo, dy), which returns y and, in a
    step, all gradients. `more` are arguments of the layer."""

    def forward(experts, options, x, weights, *matrices):
        # The layer reads only the shape of the logits.
        logits = jnp.zeros((*experts.shape[:-1], problem.layer.experts), jnp.float32)
        routing = moe.Routing(logits, experts, weights)
        options = dict(implementation=implementation) | more | options
        return moe.dropless_mlp(x, routing, *matrices, **options)

    def run(x, experts, weights, wi_0, wi_1, wo, dy, **options):
        of = functools.partial(forward, experts, options)
        if not problem.is_step:
            return (of(x, weights, wi_0, wi_1, wo),)
        y, vjp = jax.vjp(of, x, weights, wi_0, wi_1, wo)
        return y, *vjp(dy)

    return run


# The part of a kernel is that of the first pattern that its name matches.
PARTS = (
    ("products of packed weights", r"Streaming|Decoding"),
    ("dequantise", r"unpack"),
    ("products of few rows", r"few_rows"),
    ("gate, up, activation", r"GatedProduct"),
    ("gradients of gate and up", r"GatedGradient"),
    ("gradient of x", r"Paired"),
    ("gradients of weights", r"Contracting"),
    ("products of rows", r"Noncontracting"),
    ("hidden and gradients, quantised", r"quantize_(hidden|(ragged_)?gradients)"),
    ("quantise", r"quantize"),
    ("sort", r"sort|Sort|scan|histogram|count"),
    ("gather", r"gather|dispatch"),
    ("combine", r"combine"),
)


def part_of(kernel: str) -> str:
    return next((part for part, names in PARTS if re.search(names, kernel)), "XLA")


def peers(problem: Problem, options: argparse.Namespace) -> list[Peer]:
    """Returns the fused layer, layers of separate products, QuACK's layers, and FP8 layers."""
    implementation = pinned_implementation()
    products = functools.partial(jgg.ragged_dot, implementation=implementation)

    def ours(name: str, role: Role, implementation: object, **more: object) -> Peer:
        function = layer_function(problem, implementation, **more)
        return JaxPeer(name, role, function, part_of=part_of)

    invariant = ours("ours_batch_invariant", Role.VARIANT, implementation, batch_invariant=True)
    return [
        ours("ours", Role.OURS, implementation),
        ours("ours_unfused", Role.VARIANT, products),
        *([invariant] if options.batch_invariant else []),
        QuackLayer(),
        QuackLayer(Sweep("quack_moe", options.sweep, options.retune)),
        *([ours("stock", Role.GROUPED, jax.lax.ragged_dot)] if options.stock else []),
        *(
            Fp8Layer(name, layer_function(problem, implementation), part_of=part_of, quantized=q)
            for name in options.recipe
            for q in (True, False)
        ),
    ]


def operands(layer: Layer, seed: int) -> tuple[jax.Array, ...]:
    """Returns x, experts (of Dirichlet(4) popularity), weights, wi_0, wi_1, wo and dy."""
    rng = np.random.default_rng([seed, layer.tokens, layer.experts])
    popularity = np.log(rng.dirichlet(np.full(layer.experts, 4.0)))
    scores = popularity + rng.gumbel(size=(layer.tokens, layer.experts))
    experts = np.argsort(-scores, axis=1)[:, : layer.top_k].astype(np.int32)
    weights = rng.uniform(0.1, 1, experts.shape).astype(np.float32)
    weights /= weights.sum(axis=1, keepdims=True)
    t, d, f, e = layer.tokens, layer.embed, layer.hidden, layer.experts
    shapes = [(t, d), (e, d, f), (e, d, f), (e, f, d), (t, d)]
    scales = [1, d**-0.5, d**-0.5, f**-0.5, 1]
    x, wi_0, wi_1, wo, dy = (
        (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)
        for key, shape, scale in zip(
            jax.random.split(jax.random.key(seed), 5), shapes, scales, strict=True
        )
    )
    return x, jnp.asarray(experts), jnp.asarray(weights), wi_0, wi_1, wo, dy


@jax.jit
def relative_errors(results, expected):
    """Returns the norm of the error of each array, over the norm of the expected array."""

    def error(one, other):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        return jnp.linalg.norm((one - other).ravel()) / jnp.linalg.norm(other.ravel())

    return [error(*pair) for pair in zip(results, expected, strict=True)]


def work(problem: Problem, of_layer: tuple[jax.Array, ...], seed: int) -> Workload:
    """Returns the workload of a layer, judged by the pure JAX reference."""
    layer, passes = problem.layer, 3 if problem.is_step else 1
    expected = jax.jit(layer_function(problem, "xla"))(*of_layer)

    def judge(call: Call) -> tuple[check.Error, bool]:
        errors = relative_errors(tuple(call.to_jax(call.run())), expected)
        error = check.Error(max(map(float, errors)))
        return error, error.within(call.tolerance or TOLERANCE)

    t, d, f, e = layer.tokens, layer.embed, layer.hidden, layer.experts
    visited = len(np.unique(of_layer[1]))  # experts whose weights are read
    written = 2 * (t * d + (problem.is_step * (t * d + 3 * e * d * f)))
    read = 2 * (t * d * (1 + problem.is_step) + 3 * visited * d * f)
    return Workload(
        f"{layer.name}/{problem.op}",
        problem,
        of_layer,
        judge,
        description=dict(shape=dataclasses.asdict(layer), op=problem.op, distribution="random")
        | dict(dtype="bfloat16", out_dtype="bfloat16"),
        flops=passes * 6 * layer.rows * d * f,
        bytes=read + written,
        written_bytes=written,
        seed=seed,
    )


def temporary_bytes(peer: Peer, of_layer: tuple[jax.Array, ...]) -> int | None:
    """Returns the bytes of temporary memory that XLA plans, None for peers that do not use JAX."""
    if not isinstance(peer, JaxPeer) or peer.unavailable_reason():
        return None
    arguments = peer.arguments(*of_layer) if isinstance(peer, Fp8Layer) else of_layer
    compiled = jax.jit(peer.function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--layers", LAYERS)
    add_choices(parser, "--ops", OPS)
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, metavar="T", help="numbers of tokens of layers")
    add("--stock", action="store_true", help="add jax.lax.ragged_dot, which takes up to 100 GiB")
    add("--recipe", nargs="+", default=[], choices=RECIPES, help="add layers in FP8")
    add("--batch-invariant", action="store_true", help="add a layer with batch_invariant=True")
    add("--sweep", type=int, default=3, metavar="N", help="tiles to try for a QuACK product")
    add("--retune", action="store_true", help="sweep again if the fastest tiles are known")


def complete(options: argparse.Namespace, known: dict[str, Layer] = LAYERS) -> None:
    options.layers = [TINY] if options.dry_run else [known[name] for name in options.layers]
    if options.tokens:
        options.layers = [
            dataclasses.replace(layer, name=f"{layer.name}_{tokens}", tokens=tokens)
            for layer in options.layers
            for tokens in options.tokens
        ]


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    inputs = LatestInputs(lambda layer: operands(layer, options.seed))

    def measure(problem: Problem) -> dict:
        of_layer = inputs.of(problem.layer)
        compared = peers(problem, options)
        record = session.compare(work(problem, of_layer, options.seed), compared)
        for peer in compared:
            if (size := temporary_bytes(peer, of_layer)) is not None:
                record["peers"][peer.name]["temporary_bytes"] = size
        return record

    return [
        Job(f"{layer.name}/{op}", functools.partial(measure, Problem(layer, op)))
        for layer in options.layers
        for op in options.ops
    ]


def texts(results: Mapping) -> list[str]:
    rows = [
        [case["case"], name, f"{peer['temporary_bytes'] / 2**20:.0f}"]
        for case in results["cases"]
        for name, peer in case["peers"].items()
        if "temporary_bytes" in peer
    ]
    return [*report.texts(results), report.table(["temporary memory", "peer", "MiB"], rows)]


COMMAND = Command(
    "benchmarks.moe", __doc__, jobs, add_arguments, complete, time_limit=480, texts=texts
)

if __name__ == "__main__":
    COMMAND.main()
