"""Compares recipes with bf16, in layers and matmuls that quantise their weights in each call.

If the plan of a recipe chooses bf16, the program is the same as without a recipe.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks import moe
from benchmarks.fp8.step import step
from benchmarks.harness import exact
from benchmarks.harness.check import Error
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import Call, Role, pinned_implementation
from benchmarks.never_slower import shapes
from benchmarks.never_slower.programs import Program
from benchmarks.peers.fp8_layer import RECIPES, TOLERANCE
from jax_grouped_gemm._src.fp8.choice import Choice
from jax_grouped_gemm._src.fp8.prediction import Dot, Layer

LAYERS = {"recipe_layer": "moe_forward", "recipe_layer_step": "moe_step"}
DOTS = ("recipe_dot", "recipe_dot_step")
DEFAULT = "blockwise"
# The limit of an element's error over the largest element, which detects missing elements.
LARGEST_ERROR = 0.5
TINY = dict.fromkeys(LAYERS, (48, 64, 32, 4, 2)) | dict.fromkeys(DOTS, (4, 16, 64, 32))


def parsed(op: str) -> tuple[str, jgg.Recipe]:
    """Returns the operation and the recipe of a text such as "recipe_dot blockwise_bf16_wgrad"."""
    name, *recipe = op.split()
    return name, RECIPES[recipe[0] if recipe else DEFAULT]


def choice(op: str, sizes: Sequence[int]) -> Choice:
    """Returns the choice of a plan. Sizes are T, D, F, E and K of a layer, or g, rows of a group, k
    and n of a matmul."""
    name, recipe = parsed(op)
    of: Dot | Layer
    if name in LAYERS:
        t, d, f, e, k = sizes
        of = Layer(e, t * k, t, d, f)
    else:
        g, rows, k, n = sizes
        of = Dot(g, g * rows, k, n)
    return Choice(of, recipe, name.endswith("_step"))


def takes_bf16(op: str, sizes: Sequence[int]) -> bool:
    """Returns whether plans compute in bf16 for training, or for the forward pass alone."""
    training = dataclasses.replace(choice(op, sizes), training=True)
    return training.seconds()[2] or choice(op, sizes).seconds()[2]


def function(op: str, sizes: Sequence[int], implementation: str | None) -> Callable[..., Any]:
    """Returns a function of `operands`, with the recipe that `op` names, or with the default."""
    name, recipe = parsed(op)
    if name in LAYERS:
        problem = moe.Problem(moe.Layer(name, *sizes), LAYERS[name])
        return functools.partial(moe.layer_function(problem, implementation), recipe=recipe)
    product = functools.partial(jgg.fp8_ragged_dot, recipe=recipe, implementation=implementation)
    return _of_dot(name, product)


def operands(op: str, sizes: Sequence[int]) -> tuple[jax.ShapeDtypeStruct, ...]:
    name, _ = parsed(op)
    bf16, of = jnp.bfloat16, jax.ShapeDtypeStruct
    if name in LAYERS:
        t, d, f, e, k = sizes
        rows, matrices = of((t, d), bf16), (of((e, d, f), bf16),) * 2
        routing = of((t, k), jnp.int32), of((t, k), jnp.float32)
        return rows, *routing, *matrices, of((e, f, d), bf16), rows
    g, rows_each, k, n = sizes
    m = g * rows_each
    return of((m, k), bf16), of((g, k, n), bf16), of((g,), jnp.int32), of((m, n), bf16)


def programs(op: str, sizes: Sequence[int]) -> list[Program]:
    """Returns the plan's program, the recipe's kernels if the plan chooses bf16, and bf16."""
    of = functools.partial(function, op, sizes)
    planned, pinned = of(None), of(pinned_implementation())
    name, _ = parsed(op)
    if name in LAYERS:
        bf16 = functools.partial(planned.func, recipe=None)
    else:
        bf16 = _of_dot(name, jgg.ragged_dot)
    return [
        Program("ours", Role.OURS, planned),
        Program("kernel", Role.VARIANT, pinned, unplanned=planned),
        Program("bf16", Role.GROUPED, bf16),
    ]


def work(op: str, sizes: Sequence[int], seed: Sequence[int]) -> Workload:
    given = list(operands(op, sizes))
    rng = np.random.default_rng(seed)
    arrays: list[Any] = [
        exact.normal(x.shape, str(x.dtype), (*seed, i)) if x.dtype == jnp.bfloat16 else x
        for i, x in enumerate(given)
    ]
    name, _ = parsed(op)
    if name in LAYERS:
        t, d, f, e, k = sizes
        arrays[1] = jnp.asarray(np.argsort(rng.random((t, e)), axis=1)[:, :k].astype(np.int32))
        arrays[2] = jnp.full((t, k), 1 / k, jnp.float32)
        fan_in = {3: d, 4: d, 5: f}
        flops, moved = 6 * t * k * d * f, 6 * e * d * f + 4 * t * d
        shape = dict(tokens=t, embed=d, hidden=f, experts=e, top_k=k)
    else:
        g, rows, k, n = sizes
        drawn = rng.multinomial(g * rows, rng.dirichlet(np.full(g, 4.0)))
        arrays[2], fan_in = jnp.asarray(drawn, jnp.int32), {1: k}
        flops, moved = 2 * g * rows * k * n, 2 * (g * rows * (k + n) + g * k * n)
        shape = dict(groups=g, rows=g * rows, k=k, n=n)
    for place, columns in fan_in.items():
        arrays[place] = (arrays[place] * columns**-0.5).astype(jnp.bfloat16)
    expected = jax.jit(programs(op, sizes)[-1].function)(*arrays)

    def judge(call: Call) -> tuple[Error, bool]:
        found, wanted = (jax.tree.leaves(x) for x in (call.to_jax(call.run()), expected))
        error = Error(max(map(float, moe.relative_errors(found, wanted))))
        near = all(
            bool(jnp.max(jnp.abs(a - b)) <= LARGEST_ERROR * jnp.max(jnp.abs(b)))
            for a, b in zip(found, wanted, strict=True)
        )
        return error, near and error.within(TOLERANCE)

    passes = 3 if name.endswith("_step") else 1
    name = "x".join(map(str, sizes))
    return Workload(
        name,
        name,
        tuple(jax.block_until_ready(arrays)),
        judge,
        description=dict(shape=dict(shape, name=name), op=op, dtype="bfloat16"),
        flops=passes * flops,
        bytes=passes * moved,
        written_bytes=passes * moved // 3,
        seed=seed[0],
    )


def random_sizes(op: str, rng: np.random.Generator) -> tuple[int, ...]:
    """Returns sizes of a layer or matmul for which FP8 may or may not pay."""
    while True:
        d, f = shapes.size(rng, 256, 8192), shapes.size(rng, 128, 8192)
        e, rows = 2 ** int(rng.integers(2, 8)), int(2 ** rng.integers(5, 12))
        if e * d * f > 1 << 28 or e * rows * d * f > 1 << 38 or e * rows * (d + f) > 1 << 28:
            continue
        if op in DOTS:
            return e, rows, d, f
        k = int(rng.integers(1, min(e, 8) + 1))
        return max(e * rows // k, 1), d, f, e, k


def _of_dot(name: str, product: Callable[..., Any]) -> Callable[..., Any]:
    if name.endswith("_step"):
        return step(product)
    return lambda lhs, rhs, sizes, _: product(lhs, rhs, sizes)
