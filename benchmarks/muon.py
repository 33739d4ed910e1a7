"""Measures the orthogonalisation of Muon, and whole steps of Muon and of other optimisers.

python -m benchmarks.muon --output benchmarks/results/muon.json

`newton_schulz` orthogonalises matrices of 16 bits in five steps, with `optim.orthogonalize`, and
with batched einsums in bfloat16, which a JAX user would write. FLOPs are those of the einsums.
`iteration` and `einsum_iteration` get normalised matrices and compute no norms. `step` is a whole
step of `optim.muon`, `optax.contrib.muon` or AdamW, with float32 parameters and a bfloat16 copy. It
has fewer matrices, so that all states fit into memory together. `bf16_gradients` has gradients and
momentum in bfloat16.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness import check
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import (
    Call,
    InPlaceCall,
    JaxPeer,
    NotOffered,
    Peer,
    Role,
    once,
    pinned_implementation,
)
from benchmarks.harness.session import Job, Session
from jax_grouped_gemm._src.muon import iteration
from jax_grouped_gemm._src.muon.coefficients import segments
from jax_grouped_gemm._src.muon.orthogonalize import LEAST_GRAM_RATIO
from jax_grouped_gemm.optim import COEFFICIENTS, MuonDimensionNumbers, muon, orthogonalize

Shape = tuple[int, int, int]  # g, n, m: matrices [n, m], no taller than wide
STEPS = 5


def stacks(*names: str) -> dict[str, tuple[Shape, ...]]:
    return {name: (tuple(map(int, name.split("x"))),) for name in names}


SEVEN = {"seven_of_4096": ((4, 4096, 4096), (3, 4096, 11008))}
SHAPES = stacks("384x768x2048", "24x4096x14336", "96x2048x7168", "768x512x7168") | SEVEN
STEP_SHAPES = stacks("384x768x2048", "10x4096x14336", "40x2048x7168", "160x512x7168") | SEVEN
TINY: dict[str, tuple[Shape, ...]] = {"tiny": ((3, 16, 40), (2, 24, 24))}
# Relative errors of the iteration in float16 and bfloat16.
TOLERANCE = {"float16": 0.03, "bfloat16": 0.12}


@jax.jit
def normalized(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide / jnp.linalg.norm(wide, axis=(1, 2), keepdims=True)).astype(x.dtype)


def einsum_iteration(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the iteration with einsums, in the dtype of the matrices."""
    a, b, c = COEFFICIENTS

    def step(x):
        gram = jnp.einsum("gik,gjk->gij", x, x)
        polynomial = b * gram + c * jnp.einsum("gij,gjk->gik", gram, gram)
        return a * x + jnp.einsum("gij,gjk->gik", polynomial, x)

    return [functools.reduce(lambda x, _: step(x), range(STEPS), x) for x in xs]


def einsums(xs: Sequence[jax.Array]) -> list[jax.Array]:
    return einsum_iteration(list(map(normalized, xs)))


def kernel_iteration(xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Computes the iteration with the products that `orthogonalize` takes."""
    triples = [COEFFICIENTS] * STEPS
    products = iteration.Products(pinned_implementation(), [False])

    def one(x):
        if x.shape[2] < LEAST_GRAM_RATIO * x.shape[1]:
            return iteration.standard([x], triples, products)
        return iteration.gram([x], segments(triples, None, x.dtype), products)

    return [y for x in xs for y in one(x)]


class Iteration(JaxPeer):
    """A function of a list of matrices in `dtype`, which have norm one with `norm_one`."""

    def __init__(
        self, name: str, role: Role, dtype: str, function: Callable[..., Any], norm_one=False
    ):
        super().__init__(name, role, lambda *xs: function(xs))
        self.dtype = dtype
        self._norm_one = norm_one

    def prepare(self, problem, *operands):
        xs = [x.astype(self.dtype) for x in operands]
        call = super().prepare(problem, *(map(normalized, xs) if self._norm_one else xs))
        call.detail = self.dtype
        return call


def iterations() -> list[Peer]:

    def ours(**options):
        return functools.partial(orthogonalize, implementation=pinned_implementation(), **options)

    return [
        Iteration("ours", Role.OURS, "float16", ours()),
        Iteration("iteration", Role.VARIANT, "float16", kernel_iteration, norm_one=True),
        Iteration("standard", Role.VARIANT, "float16", ours(method="standard")),
        Iteration("einsum_bf16", Role.LOOP, "bfloat16", einsums),
        Iteration("einsum_iteration", Role.LOOP, "bfloat16", einsum_iteration, norm_one=True),
    ]


class OptimizerStep(Peer):
    """A step of parameters, a state, and a bfloat16 copy of the parameters, in place."""

    def __init__(self, name: str, role: Role, make: Callable[[], Any], gradients: str = "float32"):
        self.name, self.role, self.checked = name, role, False
        self._make, self._gradients = make, gradients

    def prepare(self, problem, params, gradients):
        try:
            optimizer = self._make()
        except TypeError as error:
            raise NotOffered(str(error)) from error
        # Gradients must not be the parameters, because XLA would then read both at once.
        gradients = [x.astype(self._gradients) for x in gradients]

        def step(state, gradients):
            params, inner, _ = state
            updates, inner = optimizer.update(gradients, inner, params)
            params = jax.tree.map(jnp.add, params, updates)
            return params, inner, [x.astype(jnp.bfloat16) for x in params]

        start = list(map(jnp.copy, params)), optimizer.init(params), None
        call = once(InPlaceCall(step, start, gradients))
        call.detail = self._gradients
        return call


def steps() -> list[Peer]:

    def ours(**options):
        return lambda: muon(0.02, implementation=pinned_implementation(), **options)

    def optax_muon():
        numbers = optax.contrib.MuonDimensionNumbers(1, 2)
        return optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbers)

    numbers = MuonDimensionNumbers()
    return [
        OptimizerStep("ours", Role.OURS, ours(muon_weight_dimension_numbers=numbers)),
        OptimizerStep("bf16_gradients", Role.VARIANT, ours(mu_dtype=jnp.bfloat16), "bfloat16"),
        OptimizerStep("optax_muon", Role.LOOP, optax_muon),
        OptimizerStep("optax_adamw", Role.CEILING, lambda: optax.adamw(1e-3)),
    ]


def flops(shapes: Sequence[Shape]) -> int:
    return STEPS * sum(g * (4 * n * n * m + 2 * n**3) for g, n, m in shapes)


def normal(shapes: Sequence[Shape], seed: int, dtype: str) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def work(op: str, name: str, shapes: Sequence[Shape], seed: int) -> Workload:
    """Returns the workload of normal matrices; the first of each stack is compared with float32."""
    exact = []
    if op == "step":
        drawn = [normal(shapes, 2 * seed + i, "float32") for i in range(2)]
    else:
        drawn = normal(shapes, seed, "bfloat16")
        with jax.default_matmul_precision("highest"):
            exact = einsums([x[:1].astype(jnp.float32) for x in drawn])

    def judge(call: Call) -> tuple[check.Error, bool]:
        pairs = zip(call.run(), exact, strict=True)
        errors = [
            float(jnp.linalg.norm(out[:1].astype(jnp.float32) - want) / jnp.linalg.norm(want))
            for out, want in pairs
        ]
        error = check.Error(max(errors))
        return error, error.total <= TOLERANCE[call.detail]

    elements = sum(map(math.prod, shapes))
    return Workload(
        f"{name}/{op}",
        op,
        tuple(drawn),
        judge,
        description=dict(shape=dict(name=name, stacks=[*map(list, shapes)]), op=op)
        | dict(dtype="float16" if op == "newton_schulz" else "float32", distribution="equal")
        | dict(parameters=elements),
        flops=flops(shapes),
        bytes=(4 if op == "newton_schulz" else 30) * elements,
        written_bytes=2 * elements,
        seed=seed,
    )


OPS: dict[str, tuple[dict[str, tuple[Shape, ...]], Callable[[], list[Peer]]]] = {
    "newton_schulz": (SHAPES, iterations),
    "step": (STEP_SHAPES, steps),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--ops", OPS)
    add_choices(parser, "--shapes", {**SHAPES, **STEP_SHAPES})


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:

    def measure(op: str, name: str, shapes: Sequence[Shape]) -> dict:
        return session.compare(work(op, name, shapes, options.seed), OPS[op][1](), host=False)

    return [
        Job(f"{name}/{op}", functools.partial(measure, op, name, shapes))
        for op in options.ops
        for name, shapes in (TINY if options.dry_run else OPS[op][0]).items()
        if options.dry_run or name in options.shapes
    ]


COMMAND = Command("benchmarks.muon", __doc__, jobs, add_arguments, rounds=6)

if __name__ == "__main__":
    COMMAND.main()
