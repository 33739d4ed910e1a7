"""Measures a layer in training: FP8 quantisers and three products, or three bfloat16 products."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

import jax_grouped_gemm as jgg
from benchmarks.fp8.cases import of_bf16
from benchmarks.harness import check
from benchmarks.harness.cases import Case, Problem, flops, unavoidable_bytes, written_bytes
from benchmarks.harness.inputs import Inputs
from benchmarks.harness.measure import Workload, described
from benchmarks.harness.peer import Call, JaxPeer, Peer, Role, pinned_implementation

Product = Callable[..., jax.Array]

# The limit of 1 - cosine of the angle between FP8's and bfloat16's results, on normal data.
COSINE_LIMIT = 1e-3
RESULTS = ("out", "d_lhs", "d_rhs")


def step(product: Product) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns a function that computes a product and the cotangents of both operands.

    The function takes lhs, rhs, group sizes and the cotangent of the result.
    """

    def function(lhs, rhs, group_sizes, cotangent):
        out, transpose = jax.vjp(lambda lhs, rhs: product(lhs, rhs, group_sizes), lhs, rhs)
        return out, *transpose(cotangent)

    return function


def products() -> dict[str, Product]:
    """Returns the products to compare: of FP8, of bfloat16, and of another FP8 recipe."""
    pinned = {"implementation": pinned_implementation()}
    fp8 = functools.partial(jgg.fp8_ragged_dot, **pinned)
    return {
        "ours": fp8,
        "ours_bf16": functools.partial(jgg.ragged_dot, **pinned),
        "ours_bf16_wgrad": functools.partial(fp8, recipe=jgg.Recipe(wgrad="bf16")),
    }


def peers() -> list[Peer]:
    return [
        JaxPeer(name, Role.OURS if name == "ours" else Role.VARIANT, step(product))
        for name, product in products().items()
    ]


@jax.jit
def cosine_distances(results, expected) -> jax.Array:
    """Returns 1 - cosine of the angle between each pair of arrays, in float32."""

    def distance(a, b):
        # Use 1 - cos = |a / |a| - b / |b||^2 / 2, which does not cancel if the angle is small.
        a, b = (x.astype(jnp.float32) for x in (a, b))
        return jnp.sum((a / jnp.linalg.norm(a) - b / jnp.linalg.norm(b)) ** 2) / 2

    return jnp.stack([distance(a, b) for a, b in zip(results, expected, strict=True)])


def work(case: Case, inputs: Inputs) -> Workload:
    """Returns the workload of a step, judged by `cosine_distances` to bfloat16's results."""
    lhs, rhs, sizes = inputs.operands(of_bf16(case, "forward"))
    _, cotangent, _ = inputs.operands(of_bf16(case, "wgrad"))
    operands = (lhs, rhs, sizes, cotangent)
    expected = jax.jit(step(products()["ours_bf16"]))(*operands)
    distances: dict[str, dict[str, float]] = {}

    def judge(call: Call) -> tuple[check.Error, bool]:
        found = cosine_distances(call.run(), expected).tolist()
        distances[call.name] = dict(zip(RESULTS, found, strict=True))
        # The error of the vectors scaled to length one.
        return check.Error(math.sqrt(2 * max(found))), max(found) <= COSINE_LIMIT

    problems = [of_bf16(case, op).problem for op in ("forward", "dgrad", "wgrad")]
    return Workload(
        case.name,
        case.shape,
        operands,
        judge,
        description=described(case, out_dtype="bfloat16", cosine_distance=distances),
        flops=_total(flops, problems, sizes),
        bytes=_total(unavoidable_bytes, problems, sizes),
        written_bytes=sum(map(written_bytes, problems)),
        seed=case.seed,
    )


def _total(count: Callable[..., int], problems: list[Problem], sizes: jax.Array) -> int:
    return sum(count(problem, jax.device_get(sizes)) for problem in problems)
