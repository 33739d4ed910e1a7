"""What a layer pays in training: quantisation and all three products, against bfloat16's three."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_grouped_gemm as jgg
from benchmarks import check
from benchmarks.cases import OPS, Case, Problem, flops, unavoidable_bytes, written_bytes
from benchmarks.fp8.cases import Fp8Case
from benchmarks.fp8.peers import implementation
from benchmarks.inputs import Inputs
from benchmarks.measure import Contender, measure_contenders, record
from benchmarks.peers.base import Call, Role, jax_call
from benchmarks.peers.ours import kernels_unavailable_reason
from benchmarks.session import Session

Product = Callable[..., jax.Array]

# Of the angle between what FP8 gives and what bfloat16 gives, on normal data.
COSINE_LIMIT = 1e-3
RESULTS = ("out", "d_lhs", "d_rhs")


def step(product: Product) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """(lhs, rhs, group sizes, cotangent) -> result and both operands' cotangents."""

    def function(lhs, rhs, group_sizes, cotangent):
        out, transpose = jax.vjp(lambda lhs, rhs: product(lhs, rhs, group_sizes), lhs, rhs)
        return out, *transpose(cotangent)

    return function


def products() -> dict[str, tuple[Role, Product]]:
    """What is compared: FP8 products, bfloat16 products, and other recipes of FP8."""
    pinned = {"implementation": implementation()}
    fp8 = functools.partial(jgg.fp8_ragged_dot, **pinned)
    variants = {
        "ours_bf16": functools.partial(jgg.ragged_dot, **pinned),
        "ours_rowwise": functools.partial(fp8, recipe=jgg.Recipe(scaling="rowwise")),
        "ours_bf16_wgrad": functools.partial(fp8, recipe=jgg.Recipe(wgrad="bf16")),
    }
    return {"ours": (Role.OURS, fp8)} | {
        name: (Role.VARIANT, product) for name, product in variants.items()
    }


@jax.jit
def cosine_distances(results, expected) -> jax.Array:
    """1 - cosine of the angle between each pair of arrays, in float32."""

    def distance(a, b):
        # 1 - cos = |a / |a| - b / |b||^2 / 2, which does not cancel where the angle is small.
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return jnp.sum((a / jnp.linalg.norm(a) - b / jnp.linalg.norm(b)) ** 2) / 2

    return jnp.stack([distance(a, b) for a, b in zip(results, expected, strict=True)])


def measure_step(case: Fp8Case, inputs: Inputs, session: Session) -> dict:
    """A record of the results; `cosine_distance` compares ours with bfloat16's."""
    lhs, rhs, sizes = inputs.operands(_bf16(case, "forward"))
    _, cotangent, _ = inputs.operands(_bf16(case, "wgrad"))
    operands = (lhs, rhs, sizes, cotangent)
    expected = jax.jit(step(products()["ours_bf16"][1]))(*operands)
    distances: dict[str, dict[str, float]] = {}

    def contender(name: str, role: Role, product: Product) -> Contender:
        def checked(call: Call) -> tuple[check.Error, bool]:
            found = cosine_distances(call.run(), expected).tolist()
            distances[name] = dict(zip(RESULTS, found, strict=True))
            # Of the vectors scaled to length one.
            relative = math.sqrt(2 * max(found))
            return check.Error(relative, relative), max(found) <= COSINE_LIMIT

        def prepare() -> Call:
            return jax_call(jax.jit(step(product)), *operands)

        return Contender(role, prepare, checked, kernels_unavailable_reason())

    results = measure_contenders(
        {name: contender(name, *each) for name, each in products().items()},
        session.recorder,
        rounds=session.options.rounds,
        flush=session.flush,
        seed=case.seed,
        measure_host=not session.options.no_host,
    )
    problems = [_bf16(case, op).problem for op in ("forward", "dgrad", "wgrad")]
    return record(
        case.name,
        shape=dataclasses.asdict(case.shape),
        op=case.op,
        distribution=case.distribution,
        dtype="bfloat16",
        out_dtype="bfloat16",
        flops=_total(flops, problems, sizes),
        bytes=_total(unavoidable_bytes, problems, sizes),
        written_bytes=sum(map(written_bytes, problems)),
        cosine_distance=distances,
        results=results,
    )


def _bf16(case: Fp8Case, op: str) -> Case:
    return Case(case.shape, OPS[op], case.distribution, seed=case.seed)


def _total(count: Callable[..., int], problems: list[Problem], sizes: jax.Array) -> int:
    return sum(count(problem, jax.device_get(sizes)) for problem in problems)
