"""The ways to take a step that are compared."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_grouped_gemm as jgg
from benchmarks.harness.peer import Role, pinned_implementation
from benchmarks.moe import Layer, layer_function
from benchmarks.moe import Problem as MoeProblem
from jax_grouped_gemm import optim

ADAMW, APPLY, PROGRAM = "adamw", "apply", "program"
OPS = (ADAMW, APPLY, PROGRAM)
RATE = 1e-3
RECIPE = jgg.Recipe()

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a compiled program depends on."""

    layer: Layer
    op: str
    gradients: str

    @property
    def name(self) -> str:
        return f"{self.layer.name}/{self.op}/{self.gradients}"

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Of the matrices of the experts."""
        e, d, f = self.layer.experts, self.layer.embed, self.layer.hidden
        return dict(wi_0=(e, d, f), wi_1=(e, d, f), wo=(e, f, d))

    @property
    def parameters(self) -> int:
        return 3 * self.layer.experts * self.layer.embed * self.layer.hidden

    def random(self, seed: int, dtype: str = "float32") -> Params:
        """Normal numbers in those shapes."""
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        return {
            name: jax.random.normal(key, shape, dtype)
            for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)
        }


class Step:
    """One way to take a step.

    Attributes:
      start: of the parameters, gives what changes from step to step.
      step: of what changes and the gradients, the same after the step.
      masters: of what changes, the float32 weights.
      quantized: of what changes, the FP8 weights, or None.
    """

    def __init__(
        self,
        start: Callable[[Params], Any],
        step: Callable[[Any, Params], Any],
        masters: Callable[[Any], Params] = lambda state: state[0],
        quantized: Callable[[Any], Any] = lambda state: None,
    ):
        self.start, self.step, self.masters, self.quantized = start, step, masters, quantized


def of_optimizer(optimizer: optim.Optimizer, dtype: str = "float32") -> Step:
    """One of ours, for parameters of `dtype`."""

    def start(params):
        # A copy, since steps are in place.
        params = jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), params)
        return params, jax.jit(optimizer.init)(params)

    def masters(state):
        return state[0] if dtype == "float32" else state[1].master

    return Step(
        start,
        lambda state, gradients: optimizer.step(state[0], gradients, state[1]),
        masters,
        lambda state: state[1].quantized,
    )


def of_optax(transformation: Any, form: Callable[[Params], Any], is_quantized: bool) -> Step:
    """Optax's, and what `form` makes of the new weights."""

    def start(params):
        params = jax.tree.map(jnp.copy, params)
        return params, transformation.init(params), jax.jit(form)(params)

    def step(state, gradients):
        params, inner, _ = state
        # In bfloat16, Optax would square them in bfloat16. XLA converts on the way.
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, inner = transformation.update(wide, inner, params)
        params = optax.apply_updates(params, updates)
        return params, inner, form(params)

    return Step(start, step, quantized=lambda state: state[2] if is_quantized else None)


def bfloat16_copy(params: Params) -> Params:
    """What a layer that computes in bfloat16 reads."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def quantize(implementation: str, params: Params) -> Any:
    """What a layer in FP8 reads."""
    return jgg.quantize_mlp(**params, implementation=implementation)


def layer_gradients(problem: Problem, matrices: Params, batch: Any, **options: Any) -> Params:
    """The gradients of the matrices of a layer that computes in bfloat16, or in FP8."""
    x, experts, weights, dy = batch
    run = layer_function(MoeProblem(problem.layer, "moe_step"), pinned_implementation())
    half = bfloat16_copy(matrices)
    _, _, _, *gradients = run(x, experts, weights, *half.values(), dy, **options)
    return dict(zip(half, gradients, strict=True))


def of_layer(problem: Problem, optimizer: optim.Optimizer | None) -> Step:
    """A layer and its optimiser as one program: ours in FP8, or Optax's with a copy in bfloat16."""
    if optimizer is None:
        inner = of_optax(optax.adamw(RATE), bfloat16_copy, False)
        return Step(
            inner.start,
            lambda state, batch: inner.step(state, layer_gradients(problem, state[2], batch)),
        )
    inner = of_optimizer(optimizer)

    def step(state, batch):
        quantized = dict(recipe=RECIPE, quantized=state[1].quantized)
        return inner.step(state, layer_gradients(problem, state[0], batch, **quantized))

    return Step(inner.start, step, quantized=inner.quantized)


def quantizing_layer(problem: Problem) -> Step:
    """The layer in FP8 that quantises the copy itself, and Optax's AdamW."""
    inner = of_optax(optax.adamw(RATE), bfloat16_copy, False)

    def step(state, batch):
        return inner.step(state, layer_gradients(problem, state[2], batch, recipe=RECIPE))

    return Step(inner.start, step)


def alone(problem: Problem, form: Callable[[Params], Any], **options: Any) -> Step:
    """A layer without an optimiser, whose weights stay as they are. `form` makes quantised ones."""

    def start(params):
        half = bfloat16_copy(params)
        return half, jax.jit(form)(params), jax.tree.map(jnp.copy, half)

    def step(state, batch):
        matrices, quantized, _ = state
        given = options if quantized is None else options | dict(quantized=quantized)
        return matrices, quantized, layer_gradients(problem, matrices, batch, **given)

    return Step(start, step)


def programs(problem: Problem) -> dict[str, tuple[Role, Step]]:
    """Layers with their optimisers, ours first."""
    pinned = dict(implementation=pinned_implementation())
    quantizing = functools.partial(quantize, pinned["implementation"])
    ours = optim.adamw(RATE, recipe=RECIPE, **pinned)
    return {
        "ours": (Role.OURS, of_layer(problem, ours)),
        "bf16": (Role.GROUPED, of_layer(problem, None)),
        "fp8_layer": (Role.GROUPED, quantizing_layer(problem)),
        "part_fp8": (Role.VARIANT, alone(problem, quantizing, recipe=RECIPE)),
        "part_bf16": (Role.VARIANT, alone(problem, lambda params: None)),
    }


def steps(problem: Problem) -> dict[str, tuple[Role, Step]]:
    """What is measured, ours first."""
    op = problem.op
    if op == PROGRAM:
        return programs(problem)
    pinned = dict(implementation=pinned_implementation())
    if op == APPLY:
        identity = optax.identity()
        return {
            "ours": (Role.OURS, of_optimizer(optim.quantized(identity, **pinned))),
            "xla_copy": (Role.GROUPED, of_optax(identity, bfloat16_copy, False)),
        }
    adamw = optax.adamw(RATE)
    ours = optim.adamw(RATE, **pinned)
    quantizing = functools.partial(quantize, pinned["implementation"])
    return {
        "ours": (Role.OURS, of_optimizer(ours)),
        "optax_copy": (Role.GROUPED, of_optax(adamw, bfloat16_copy, False)),
        "optax_quantize": (Role.GROUPED, of_optax(adamw, quantizing, True)),
        "ours_optax": (Role.VARIANT, of_optimizer(optim.quantized(adamw, **pinned))),
        "ours_copy": (Role.VARIANT, of_optimizer(ours, "bfloat16")),
    }
