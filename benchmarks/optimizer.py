"""Measures optimiser steps that write FP8 weights, and Optax's steps with a copy or quantiser.

python -m benchmarks.optimizer --output benchmarks/results/optimizer.json

The weights are float32 weights of a layer's experts. The number of experts is as large as
--parameters allows; the time of a parameter does not depend on it. Each expert has as many rows as
in the whole layer. All steps are in place. `adamw` has these peers:

- `ours`: one kernel for each stack of matrices writes moments, weights and FP8 weights.
- `optax_copy`: `optax.adamw`, and a bfloat16 copy of the new weights.
- `optax_quantize`: `optax.adamw`, and `quantize_mlp` of the new weights.
- `ours_optax`: `optim.quantized(optax.adamw(...))`, in which XLA computes the updates.

In `program`, a layer with gradients and its optimiser are one program. `ours` is in FP8, with
weights that the optimiser quantised. `fp8_layer` is in FP8, with weights that the layer quantises.
`bf16` has the copy of `optax_copy`. `part_fp8` and `part_bf16` are the layers alone, to compare
sums of parts with the programs.

In `apply`, float32 updates are given, as Optax returns them. `ours` adds and quantises, and
`xla_copy` adds and makes a bfloat16 copy. `copy` is the speed of memory.
"""

import argparse
import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_grouped_gemm as jgg
from benchmarks.fp8.quantizers import differing_share
from benchmarks.harness import check
from benchmarks.harness.bandwidth import Bandwidth, copy_call
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import InPlaceCall, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.moe import LAYERS, TINY, Layer, layer_function, operands
from benchmarks.moe import Problem as MoeProblem
from jax_grouped_gemm import optim

OPS = ADAMW, APPLY, PROGRAM = "adamw", "apply", "program"
GRADIENTS = ("bfloat16", "float32")
RATE = 1e-3
RECIPE = jgg.Recipe()
# Weights are about one, and one step differs by rounding alone. But AdamW's first step is the
# learning rate times the sign of the gradient, and signs may differ between FP8 and bfloat16.
TOLERANCE = {ADAMW: 1e-6, APPLY: 1e-6, PROGRAM: 2.1 * RATE}

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static parameters of a compiled program."""

    layer: Layer
    op: str
    gradients: str

    @property
    def name(self) -> str:
        return f"{self.layer.name}/{self.op}/{self.gradients}"

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        e, d, f = self.layer.experts, self.layer.embed, self.layer.hidden
        return dict(wi_0=(e, d, f), wi_1=(e, d, f), wo=(e, f, d))

    @property
    def parameters(self) -> int:
        return 3 * self.layer.experts * self.layer.embed * self.layer.hidden

    def random(self, seed: int, dtype: str = "float32") -> Params:
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        return {
            name: jax.random.normal(key, shape, dtype)
            for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)
        }


@dataclasses.dataclass
class Step:
    """A way to take a step.

    Attributes:
      start: returns the first state for the parameters; a state begins with the float32 weights.
      step: returns the next state for a state and the gradients.
      quantized: returns the FP8 weights of a state, or None.
    """

    start: Callable[[Params], Any]
    step: Callable[[Any, Params], Any]
    quantized: Callable[[Any], Any] = lambda state: None


def of_optimizer(optimizer: optim.Optimizer) -> Step:
    def start(params):
        params = jax.tree.map(jnp.copy, params)  # steps are in place
        return params, jax.jit(optimizer.init)(params)

    return Step(
        start,
        lambda state, gradients: optimizer.step(state[0], gradients, state[1]),
        quantized=lambda state: state[1].quantized,
    )


def of_optax(transformation: Any, form: Callable[[Params], Any], is_quantized: bool) -> Step:
    """Returns an Optax step that also computes `form` of the new weights."""

    def start(params):
        params = jax.tree.map(jnp.copy, params)
        return params, transformation.init(params), jax.jit(form)(params)

    def step(state, gradients):
        params, inner, _ = state
        # Convert, because Optax would square bfloat16 gradients in bfloat16. XLA fuses this.
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, inner = transformation.update(wide, inner, params)
        params = optax.apply_updates(params, updates)
        return params, inner, form(params)

    return Step(start, step, quantized=lambda state: state[2] if is_quantized else None)


def bfloat16_copy(params: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def quantize(params: Params) -> Any:
    return jgg.quantize_mlp(**params, implementation=pinned_implementation())


def layer_gradients(problem: Problem, matrices: Params, batch: Any, **options: Any) -> Params:
    """Returns the gradients of the matrices of a layer that computes in bfloat16, or in FP8."""
    x, experts, weights, dy = batch
    run = layer_function(MoeProblem(problem.layer, "moe_step"), pinned_implementation())
    half = bfloat16_copy(matrices)
    _, _, _, *gradients = run(x, experts, weights, *half.values(), dy, **options)
    return dict(zip(half, gradients, strict=True))


def programs(problem: Problem) -> dict[str, tuple[Role, Step]]:
    """Returns layers with their optimisers, ours first, and layers without an optimiser."""
    ours = of_optimizer(optim.adamw(RATE, recipe=RECIPE, implementation=pinned_implementation()))
    of_copy = of_optax(optax.adamw(RATE), bfloat16_copy, False)

    def step_of_ours(state, batch):
        quantized = dict(recipe=RECIPE, quantized=state[1].quantized)
        return ours.step(state, layer_gradients(problem, state[0], batch, **quantized))

    def step_of_copy(**options):
        return lambda state, batch: of_copy.step(
            state, layer_gradients(problem, state[2], batch, **options)
        )

    def alone(form, **options):
        def start(params):
            half = bfloat16_copy(params)
            return half, jax.jit(form)(params), jax.tree.map(jnp.copy, half)

        def step(state, batch):
            matrices, quantized, _ = state
            given = options if quantized is None else options | dict(quantized=quantized)
            return matrices, quantized, layer_gradients(problem, matrices, batch, **given)

        return Step(start, step)

    return {
        "ours": (Role.OURS, Step(ours.start, step_of_ours, quantized=ours.quantized)),
        "bf16": (Role.GROUPED, Step(of_copy.start, step_of_copy())),
        "fp8_layer": (Role.GROUPED, Step(of_copy.start, step_of_copy(recipe=RECIPE))),
        "part_fp8": (Role.VARIANT, alone(quantize, recipe=RECIPE)),
        "part_bf16": (Role.VARIANT, alone(lambda params: None)),
    }


def steps(problem: Problem) -> dict[str, tuple[Role, Step]]:
    if problem.op == PROGRAM:
        return programs(problem)
    pinned = dict(implementation=pinned_implementation())
    if problem.op == APPLY:
        identity = optax.identity()
        return {
            "ours": (Role.OURS, of_optimizer(optim.quantized(identity, **pinned))),
            "xla_copy": (Role.GROUPED, of_optax(identity, bfloat16_copy, False)),
        }
    adamw, ours = optax.adamw(RATE), optim.adamw(RATE, **pinned)
    return {
        "ours": (Role.OURS, of_optimizer(ours)),
        "optax_copy": (Role.GROUPED, of_optax(adamw, bfloat16_copy, False)),
        "optax_quantize": (Role.GROUPED, of_optax(adamw, quantize, True)),
        "ours_optax": (Role.VARIANT, of_optimizer(optim.quantized(adamw, **pinned))),
    }


@jax.jit
def _largest_difference(found: Params, expected: Params) -> jax.Array:
    differences = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), found, expected)
    return jnp.max(jnp.stack(jax.tree.leaves(differences)))


class Running(InPlaceCall):
    """Successive steps in place. The constructor takes the first step, and judges its result."""

    def __init__(self, step: Step, params: Params, gradients: Params, expected: Params | None):
        super().__init__(step.step, step.start(params), gradients)
        masters, quantized = self.state[0], step.quantized(self.state)
        self.error = 0.0
        if expected is not None:
            self.error = float(_largest_difference(masters, expected))
        if quantized is not None:
            pair = (jax.tree.leaves(x) for x in (quantized, jax.jit(quantize)(masters)))
            self.error = float("inf") if differing_share(*pair) > 0 else self.error


class StepPeer(Peer):
    def __init__(self, name: str, role: Role, step: Step):
        self.name, self.role, self._step = name, role, step

    def prepare(self, problem, params, gradients, expected):
        """Takes the first step. It is judged only with an optimiser, which changes the weights."""
        is_judged = self.name not in ("part_fp8", "part_bf16")
        return Running(self._step, params, gradients, expected if is_judged else None)


def work(problem: Problem, seed: int) -> Workload:
    """Returns the workload of a step, judged by Optax's new weights and by FP8 bits."""
    if problem.op == PROGRAM:
        x, experts, weights, *matrices, dy = operands(problem.layer, seed)
        params = {
            name: w.astype(jnp.float32) for name, w in zip(problem.shapes, matrices, strict=True)
        }
        given: Any = x, experts, weights, dy
    else:
        params, given = problem.random(seed), problem.random(seed + 1, problem.gradients)
    expected = of_optax(
        optax.identity() if problem.op == APPLY else optax.adamw(RATE), lambda params: None, False
    )

    @jax.jit
    def once(params, given):
        gradients = layer_gradients(problem, params, given) if problem.op == PROGRAM else given
        return expected.step(expected.start(params), gradients)[0]

    # FP8 weights are written in both layouts.
    moments = 0 if problem.op == APPLY else 8
    written = moments + 4 + 2
    traffic = jnp.dtype(problem.gradients).itemsize + moments + 4 + written
    return Workload(
        problem.name,
        problem,
        (params, given, once(params, given)),
        lambda call: (check.Error(call.error), call.error <= TOLERANCE[problem.op]),
        description=dict(shape=dataclasses.asdict(problem.layer), op=problem.op)
        | dict(parameters=problem.parameters, dtype=problem.gradients),
        flops=0,
        bytes=traffic * problem.parameters,
        written_bytes=written * problem.parameters,
        seed=seed,
    )


def fitting(layer: Layer, parameters: float) -> Layer:
    """Returns the layer with as many experts as `parameters` allow, and their share of tokens."""
    most = int(parameters // (3 * layer.embed * layer.hidden))
    experts = max(layer.top_k, min(layer.experts, most))
    tokens = layer.tokens * experts // layer.experts
    return dataclasses.replace(layer, experts=experts, tokens=tokens)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--layers", LAYERS)
    add_choices(parser, "--ops", OPS)
    add_choices(parser, "--gradients", GRADIENTS)
    parser.add_argument("--parameters", type=float, default=6.1e8, help="most parameters of a step")


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    def measure(problem: Problem) -> dict:
        gc.collect()  # frees calls of earlier cases, which are cycles of references
        compared = [StepPeer(name, *of) for name, of in steps(problem).items()]
        compared.append(Bandwidth("copy", copy_call))
        return session.compare(work(problem, options.seed), compared, host=False)

    problems = []
    for layer in [TINY] if options.dry_run else map(LAYERS.get, options.layers):
        for op in options.ops:
            # A program has the gradients that layers return.
            dtypes = {PROGRAM: ["bfloat16"], APPLY: ["float32"]}.get(op, options.gradients)
            of_op = fitting(layer, options.parameters)
            problems += [Problem(of_op, op, gradients) for gradients in dtypes]
    return [Job(problem.name, functools.partial(measure, problem)) for problem in problems]


COMMAND = Command("benchmarks.optimizer", __doc__, jobs, add_arguments, time_limit=600)

if __name__ == "__main__":
    COMMAND.main()
