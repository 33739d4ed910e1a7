"""Measures MoE layers with packed weights and bfloat16 activations, from decoding to prefill.

python -m benchmarks.weight_only --output benchmarks/results/weight_only.json

`ours` is `moe.dropless_mlp` with packed weights. `dequantised` dequantises the weights in each
call, and `bf16` before it. `tokamax` multiplies int4 and int8 weights, `humming` and
`humming_grouped` all formats. All weights are the same numbers. Bytes are the packed bytes of the
experts that tokens visit. With `--chain 16`, a call has 16 layers that visit different experts, and
its wall time includes the gaps between kernels.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks import moe as layers
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.inputs import LatestInputs
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import JaxPeer, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.moe import TINY, Layer, Problem
from benchmarks.peers.humming import GEMM_TYPES, HummingLayer
from benchmarks.peers.tokamax import TokamaxLayer

# This layer is not in benchmarks.moe, because other commands run all layers there by default.
LAYERS = layers.LAYERS | {"gptoss_120b": Layer("gptoss_120b", 8192, 2880, 2880, 128, 4)}
FORMATS = ("mxfp4", "int4", "int8", "fp8", "fp8_128x128")
TOKENS = (1, 16, 128, 512, 8192)

Operands = tuple[tuple[jax.Array, ...], tuple[jgg.QuantizedArray, ...]]


def operands(layer: Layer, format: str, seed: int) -> Operands:
    """Returns the operands of `benchmarks.moe` with dequantised matrices, and packed matrices."""
    x, experts, weights, *matrices, dy = layers.operands(layer, seed)
    packed = tuple(jgg.quantize(w, format) for w in matrices)
    return (x, experts, weights, *map(jgg.dequantize, packed), dy), packed


def peers(problem: Problem, chosen: np.ndarray, chain: int) -> list[Peer]:
    """Returns layers with packed weights, and with weights dequantised before or in each call."""
    one = layers.layer_function(problem, pinned_implementation())

    def layer(x, experts, *others):
        # Make experts constants, because computing them would need more kernels.
        steps = problem.layer.top_k * np.arange(chain)[:, None, None]
        for each in (chosen + steps) % problem.layer.experts if chain > 1 else [experts]:
            (x,) = one(x, each, *others)
        return (x,)

    def of_packed(arrays, packed):
        x, experts, weights, *_, dy = arrays
        return layer(x, experts, weights, *packed, dy)

    def dequantised(arrays, packed):
        # The barrier separates the arrays from the packed weights: the layer sees only arrays.
        matrices = jax.lax.optimization_barrier(tuple(map(jgg.dequantize, packed)))
        return of_packed(arrays, matrices)

    peer = functools.partial(JaxPeer, checked=chain == 1, part_of=layers.part_of)
    of_any = [
        peer("ours", Role.OURS, of_packed),
        peer("bf16", Role.VARIANT, lambda arrays, _: layer(*arrays)),
    ]
    if chain > 1:
        return of_any
    libraries = [TokamaxLayer(), *map(HummingLayer, GEMM_TYPES)]
    return [*of_any, peer("dequantised", Role.VARIANT, dequantised), *libraries]


def work(problem: Problem, given: Operands, format: str, seed: int, chain: int) -> Workload:
    arrays, packed = given
    of_arrays = layers.work(problem, arrays, seed)
    x, chosen, *_ = arrays
    visited = int(jnp.unique(chosen).size) / problem.layer.experts
    read = int(visited * sum(q.nbytes for q in packed)) + x.nbytes
    return dataclasses.replace(
        of_arrays,
        case=f"{problem.layer.name}/{format}{f'/chain_{chain}' if chain > 1 else ''}",
        operands=given,
        description={**of_arrays.description, "op": "weight_only", "weights": format},
        flops=chain * of_arrays.flops,
        bytes=chain * (read + of_arrays.written_bytes),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--layers", LAYERS, ["gptoss"])
    add_choices(parser, "--formats", FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T")
    parser.add_argument("--chain", type=int, default=1, metavar="N", help="layers in a program")


def complete(options: argparse.Namespace) -> None:
    if options.dry_run:
        options.tokens = [TINY.tokens]
    layers.complete(options, LAYERS)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    inputs = LatestInputs(lambda key: operands(*key, options.seed))

    def measure(layer: Layer, format: str) -> dict:
        problem = Problem(layer, "moe_forward")
        given = inputs.of((layer, format))
        compared = peers(problem, np.asarray(given[0][1]), options.chain)
        return session.compare(work(problem, given, format, options.seed, options.chain), compared)

    return [
        Job(f"{layer.name}/{format}", functools.partial(measure, layer, format))
        for format in options.formats
        for layer in options.layers
    ]


COMMAND = Command("benchmarks.weight_only", __doc__, jobs, add_arguments, complete)

if __name__ == "__main__":
    COMMAND.main()
