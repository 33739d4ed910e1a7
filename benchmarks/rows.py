"""Sorting by expert and moving rows of MoE layers, as fractions of copy bandwidth.

python -m benchmarks.rows --output benchmarks/results/rows.json

Experts are random, k different ones a token. `gather_rows` knows the token of every row only,
`dispatch` both the order and its inverse. Bytes are those of every token and of every row, once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import check
from benchmarks.harness.bandwidth import Bandwidth, copy_call
from benchmarks.harness.command import Command
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import Call, JaxPeer, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.peers.ours import kernels_unavailable_reason
from jax_grouped_gemm import moe

# Rounding to the nearest, with sums in float32: no row is further off.
BFLOAT16_ERROR = 2.0**-8


@dataclass(frozen=True)
class Layer:
    """What the rows of an MoE layer follow from."""

    name: str
    tokens: int
    embed: int
    experts: int
    top_k: int


LAYERS = (
    Layer("qwen3_30b", 8192, 2048, 128, 8),
    Layer("sonic_7b", 24576, 1536, 128, 8),
    Layer("sonic_4096", 8192, 4096, 128, 8),
    Layer("dsv3_slice", 4096, 7168, 32, 8),
    Layer("mixtral", 4096, 4096, 8, 2),
    Layer("gptoss", 8192, 2880, 32, 4),
    Layer("decode", 128, 2048, 128, 8),
)
TINY = (Layer("tiny", 24, 40, 5, 3),)


@dataclass(frozen=True)
class Inputs:
    """Tokens and rows of a layer, and where they belong."""

    x: jax.Array  # [T, D] bfloat16
    rows: jax.Array  # [T*k, D] bfloat16
    experts: jax.Array  # [T, k] int32
    weights: jax.Array  # [T, k] float32
    order: moe.ExpertOrder

    @classmethod
    def random(cls, layer: Layer, seed: int) -> Inputs:
        """Normally distributed, with every choice of experts equally likely."""
        tokens, top_k = layer.tokens, layer.top_k
        of_x, of_rows, of_logits, of_weights = jax.random.split(jax.random.key(seed), 4)
        x = jax.random.normal(of_x, (tokens, layer.embed), jnp.bfloat16)
        rows = jax.random.normal(of_rows, (tokens * top_k, layer.embed), jnp.bfloat16)
        logits = jax.random.normal(of_logits, (tokens, layer.experts))
        experts = jax.lax.top_k(logits, top_k)[1]
        order = moe.sort_by_expert(experts, layer.experts, implementation="xla")
        return cls(x, rows, experts, jax.random.normal(of_weights, (tokens, top_k)), order)


def functions(layer: Layer) -> dict[str, Callable[..., Any]]:
    """What is measured, by its name: functions of `operands` with the option `implementation`."""

    def sort_by_expert(experts, implementation):
        return moe.sort_by_expert(experts, layer.experts, implementation=implementation)

    def combine_weighted(rows, order, weights, implementation):
        return moe.combine(rows, order, weights=weights, implementation=implementation)

    return {
        "sort_by_expert": sort_by_expert,
        "gather_rows": moe.gather_rows,
        "dispatch": moe.dispatch,
        "combine": moe.combine,
        "combine_weighted": combine_weighted,
    }


OPS = tuple(functions(TINY[0]))


def operands(op: str, layer: Layer, inputs: Inputs) -> tuple:
    """Those of a function."""
    return {
        "sort_by_expert": (inputs.experts,),
        "gather_rows": (inputs.x, inputs.order.order // layer.top_k),
        "dispatch": (inputs.x, inputs.order),
        "combine": (inputs.rows, inputs.order),
        "combine_weighted": (inputs.rows, inputs.order, inputs.weights),
    }[op]


def peers(op: str, layer: Layer) -> list[Peer]:
    """Ours, XLA's program for the reference, and a copy."""
    function = functions(layer)[op]
    ours = functools.partial(function, implementation=pinned_implementation())
    xla = functools.partial(function, implementation="xla")
    return [
        JaxPeer("ours", Role.OURS, ours, kernels_unavailable_reason),
        JaxPeer("xla", Role.GROUPED, xla),
        Bandwidth("copy", copy_call),
    ]


def work(op: str, layer: Layer, inputs: Inputs, seed: int) -> Workload:
    """An operation, judged by the reference: copies bit by bit, sums by their rounding."""
    given = operands(op, layer, inputs)
    expected = jax.jit(functools.partial(functions(layer)[op], implementation="xla"))(*given)
    is_sum = op.startswith("combine")

    def judge(call: Call) -> tuple[check.Error, bool]:
        result = call.run()
        if is_sum:
            error = check.compare(result, expected.astype(jnp.float32))
            return error, error.within(BFLOAT16_ERROR)
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
        differing = sum(int(jnp.sum(one != other)) for one, other in pairs)
        return check.Error(float(differing)), differing == 0

    written = sum(x.nbytes for x in jax.tree.leaves(expected))
    return Workload(
        f"{layer.name}/{op}",
        (op, layer),
        given,
        judge,
        description={
            "shape": dataclasses.asdict(layer),
            "op": op,
            "dtype": "bfloat16",
            "out_dtype": str(jax.tree.leaves(expected)[0].dtype),
        },
        flops=0,
        bytes=given[0].nbytes + written,
        written_bytes=written,
        seed=seed,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Layers and operations."""
    names = [layer.name for layer in LAYERS]
    parser.add_argument("--layers", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS, metavar="OP")


def complete(options: argparse.Namespace) -> None:
    """Finds the layers."""
    named = [layer for layer in LAYERS if layer.name in options.layers]
    options.layers = TINY if options.dry_run else named


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job a layer and operation."""
    latest: dict[Layer, Inputs] = {}

    def measure(layer: Layer, op: str) -> dict:
        if layer not in latest:
            latest.clear()
            latest[layer] = Inputs.random(layer, options.seed)
        of_case = work(op, layer, latest[layer], options.seed)
        return session.compare(of_case, peers(op, layer))

    return [
        Job(f"{layer.name}/{op}", functools.partial(measure, layer, op))
        for layer in options.layers
        for op in options.ops
    ]


COMMAND = Command("benchmarks.rows", __doc__, jobs, add_arguments=add_arguments, complete=complete)
main = COMMAND.main

if __name__ == "__main__":
    main()
