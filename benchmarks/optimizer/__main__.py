"""Steps of optimisers that write FP8 weights, next to Optax's with a copy or a pass more.

python -m benchmarks.optimizer --output benchmarks/results/optimizer.json

The weights are those of a layer's experts, float32, as many experts as --parameters allow: what a
parameter costs does not depend on their number. All steps are in place. Peers of `adamw`:

- `ours`: one kernel for each stack of matrices writes moments, weights and FP8.
- `optax_copy`: `optax.adamw`, and a copy of the new weights in bfloat16.
- `optax_quantize`: `optax.adamw`, and `quantize_mlp` of the new weights.
- `ours_optax`: `optim.quantized(optax.adamw(...))`, for any chain: XLA computes the updates.
- `ours_copy`: as `ours` for parameters in bfloat16, with the float32 weights in the state.

In `program`, a layer with gradients and its optimiser are one program: `ours` is in FP8 with the
weights that the optimiser wrote, `bf16` with the copy that `optax_copy` makes, and
`fp8_layer` in FP8 with weights that the layer quantises. `part_fp8` and `part_bf16` are the layers
alone, so that the sums of parts can be compared with the programs.

In `apply`, updates are given: `ours` adds and quantises, and `xla_copy` adds and makes a copy in
bfloat16. `copy` is the speed of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import check
from benchmarks.harness.bandwidth import Bandwidth, copy_call
from benchmarks.harness.command import Command
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import Call, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.moe import LAYERS, TINY, Layer, operands
from benchmarks.optimizer.steps import (
    ADAMW,
    APPLY,
    OPS,
    PROGRAM,
    RATE,
    Params,
    Problem,
    Step,
    layer_gradients,
    quantize,
    steps,
)
from benchmarks.peers.ours import kernels_unavailable_reason

GRADIENTS = ("bfloat16", "float32")
# Weights are about one, and one step differs by rounding alone. In a program, AdamW's first step is
# the learning rate times the sign of the gradient, which may differ between FP8 and bfloat16.
TOLERANCE = {ADAMW: 1e-6, APPLY: 1e-6, PROGRAM: 2.1 * RATE}


@jax.jit
def _largest_difference(found: Params, expected: Params) -> jax.Array:
    differences = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), found, expected)
    return jnp.max(jnp.stack(jax.tree.leaves(differences)))


@jax.jit
def _differing(found: Any, expected: Any) -> jax.Array:
    """Elements of FP8 weights or scales whose bits differ."""

    def count(a, b):
        bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
        a, b = (jax.lax.bitcast_convert_type(x, bits) for x in (a, b))
        return jnp.sum(a != b)

    return sum(jax.tree.leaves(jax.tree.map(count, found, expected)))


class Running(Call):
    """Steps one after the other, each in place of the one before. The first is looked at."""

    def __init__(self, step: Step, params: Params, gradients: Params, expected: Params | None):
        super().__init__(self._step)
        self._compiled = jax.jit(step.step, donate_argnums=0)
        self._gradients = gradients
        self._state = self._compiled(step.start(params), gradients)
        masters, quantized = step.masters(self._state), step.quantized(self._state)
        self.error = 0.0
        if expected is not None:
            self.error = float(_largest_difference(masters, expected))
        if quantized is not None:
            again = jax.jit(functools.partial(quantize, pinned_implementation()))(masters)
            if int(_differing(quantized, again)):
                self.error = float("inf")

    def _step(self) -> Any:
        self._state = self._compiled(self._state, self._gradients)
        return self._state

    def wait(self, result: Any) -> None:
        """Returns when the device has finished: of earlier results, nothing is left."""
        jax.block_until_ready(self._state)


class StepPeer:
    """One of `steps`."""

    slow = False

    def __init__(self, name: str, role: Role, step: Step):
        self.name, self.role, self._step = name, role, step

    def unavailable_reason(self) -> str | None:
        """Why our kernels cannot run here, or None."""
        return kernels_unavailable_reason()

    def prepare(self, problem: Problem, params: Params, gradients: Params, expected: Any) -> Call:
        """Takes the first step. Parameters in 16 bits are other ones, and a layer alone keeps its
        own, so that there is no judge."""
        is_judged = self.name not in ("ours_copy", "part_fp8", "part_bf16")
        return Running(self._step, params, gradients, expected if is_judged else None)


def peers(problem: Problem) -> list[Peer]:
    """All of `steps`, and a copy."""
    found = steps(problem).items()
    return [*(StepPeer(name, *of) for name, of in found), Bandwidth("copy", copy_call)]


def moved_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes that a step has to read and write, and to write, with FP8 weights both ways round."""
    of_gradient = jnp.dtype(problem.gradients).itemsize
    moments = 0 if problem.op == APPLY else 8
    written = moments + 4 + 2
    return problem.parameters * (of_gradient + moments + 4 + written), problem.parameters * written


def work(problem: Problem, seed: int) -> Workload:
    """A step, judged by Optax's weights after it and by the bits of FP8."""
    if problem.op == PROGRAM:
        x, experts, weights, *matrices, dy = operands(problem.layer, seed)
        params = {
            name: w.astype(jnp.float32) for name, w in zip(problem.shapes, matrices, strict=True)
        }
        given: Any = x, experts, weights, dy
    else:
        params, given = problem.random(seed), problem.random(seed + 1, problem.gradients)
    expected = optax.identity() if problem.op == APPLY else optax.adamw(RATE)

    @jax.jit
    def once(params, given):
        is_layer = problem.op == PROGRAM
        gradients = layer_gradients(problem, params, given) if is_layer else given
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, _ = expected.update(wide, expected.init(params), params)
        return optax.apply_updates(params, updates)

    traffic, written = moved_bytes(problem)
    return Workload(
        problem.name,
        problem,
        (params, given, once(params, given)),
        lambda call: (check.Error(call.error), call.error <= TOLERANCE[problem.op]),
        description={
            "shape": dataclasses.asdict(problem.layer),
            "op": problem.op,
            "parameters": problem.parameters,
            "dtype": problem.gradients,
        },
        flops=0,
        bytes=traffic,
        written_bytes=written,
        seed=seed,
    )


def fitting(layer: Layer, parameters: float) -> Layer:
    """The layer with as many experts as have no more parameters than that."""
    most = int(parameters // (3 * layer.embed * layer.hidden))
    return dataclasses.replace(layer, experts=max(1, min(layer.experts, most)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Layers, steps and gradients."""
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS, metavar="NAME")
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS)
    parser.add_argument("--gradients", nargs="+", default=list(GRADIENTS), choices=GRADIENTS)
    parser.add_argument(
        "--parameters", type=float, default=3.1e8, help="of all experts of a step, at most"
    )


def complete(options: argparse.Namespace) -> None:
    """Finds the layers."""
    options.layers = [TINY] if options.dry_run else [LAYERS[name] for name in options.layers]


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job for each layer, step and dtype of gradients."""

    def measure(problem: Problem) -> dict:
        return session.compare(work(problem, options.seed), peers(problem), host=False)

    problems = []
    for layer in options.layers:
        fewer = fitting(layer, options.parameters)
        for op in options.ops:
            # Rows of an expert are as many as they are, and gradients what layers return.
            of_op = layer if op == PROGRAM else fewer
            dtypes = ["bfloat16"] if op == PROGRAM else options.gradients
            problems += [Problem(of_op, op, gradients) for gradients in dtypes]
    return [Job(problem.name, functools.partial(measure, problem)) for problem in problems]


COMMAND = Command(
    "benchmarks.optimizer",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    complete=complete,
    time_limit=600,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
