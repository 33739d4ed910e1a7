"""What is split over devices stays split: values, derivatives, types and collectives.

Eight devices compute what one does. What travels between them is read from the compiled program.
Operands are integers in float32, whose products and sums are exact, unless a function is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = (AUTO, EXPLICIT)
EIGHT = {"d": 8}
FOUR_BY_TWO = {"d": 4, "e": 2}
GATHER, SUM = "all-gather", "all-reduce"
# An empty group, one of a negative size, and more rows in all than there are.
SIZES = np.array([10, 0, 7, 20, -3, 1, 16, 14], np.int32)
M, K, N, G = 64, 16, 24, 8


def mesh_of(axes: dict[str, int], kind=AUTO) -> jax.sharding.Mesh:
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def entered(mesh):
    """As programs over explicit axes have it; those over auto axes mostly do not."""
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def put(mesh, arrays, specs):
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def collectives(compiled) -> list[tuple[str, tuple[int, ...]]]:
    """What travels, and the shape of each result of it: combined ones have several."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", compiled.as_text())
    shapes = (
        (kind, tuple(map(int, shape.split(","))) if shape else ())
        for results, kind in found
        for shape in re.findall(r"\w+\[([\d,]*)\]", results)
    )
    # A scalar, such as a loss, costs nothing.
    return sorted(x for x in shapes if x[1])


def integers(rng, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


def with_gradients(function, operands, shardings=None):
    """The results and the gradients of that many first operands, for cotangents that are exact.

    Over auto axes gradients are split as operands are, as the steps of an optimiser have them.
    """

    def both(*arguments):
        rest = arguments[operands:]
        results, pullback = jax.vjp(lambda *a: function(*a, *rest), *arguments[:operands])
        found = pullback(jax.tree.map(lambda y: (y % 5 - 2).astype(y.dtype), results))
        if shardings:
            found = map(jax.lax.with_sharding_constraint, found, shardings)
        return results, tuple(found)

    return both if operands else function


def assert_same(got, want, tolerance=0.0):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        if tolerance:
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))
        else:
            np.testing.assert_array_equal(a, b)


@dataclasses.dataclass
class Case:
    """A function of arrays of `shapes`, the first `differentiable` of which have gradients."""

    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    differentiable: int
    specs: Sequence[P]
    expected: Sequence[tuple[str, tuple[int, ...]]] = ()
    axes: dict[str, int] = dataclasses.field(default_factory=lambda: EIGHT)
    explicit: Sequence[tuple[str, tuple[int, ...]]] | None = None
    """What travels over explicit axes, if more does: gradients have the types of operands."""
    tolerance: float = 0.0
    kinds: Sequence[AxisType] = KINDS


def ragged(lhs, rhs):
    return jgg.ragged_dot(lhs, rhs, SIZES)


def mlp(x, wi_0, wi_1, wo):
    return jgg.ragged_mlp(x, wi_0, wi_1, wo, SIZES, activation="relu")


PRODUCT = [(M, K), (G, K, N)]
MLP = [(M, K), (G, K, 32), (G, K, 32), (G, 32, K)]
CASES = {
    "rows": Case(ragged, PRODUCT, 2, [P("d"), P()], [(SUM, (G, K, N))]),
    "columns": Case(ragged, PRODUCT, 2, [P(), P(None, None, "d")], [(SUM, (M, K))]),
    "contracted": Case(ragged, PRODUCT, 2, [P(None, "d"), P(None, "d")], [(SUM, (M, N))]),
    "experts": Case(ragged, PRODUCT, 2, [P(), P("d")], [(SUM, (M, K)), (SUM, (M, N))]),
    "fsdp": Case(ragged, PRODUCT, 2, [P("d"), P(None, "d")], [(GATHER, (G, K, N)), (SUM, (G, K, N))]),
    "rows and columns": Case(
        ragged, PRODUCT, 2, [P("d"), P(None, None, "e")],
        [(SUM, (M // 4, K)), (SUM, (G, K, N // 2))], FOUR_BY_TWO,
    ),
    "rows and experts": Case(
        ragged, PRODUCT, 2, [P("d"), P("e")],
        [(SUM, (G // 2, K, N)), (SUM, (M // 4, K)), (SUM, (M // 4, N))], FOUR_BY_TWO,
        # The types of rows and cotangents say nothing of experts.
        explicit=[(SUM, (G, K, N)), (SUM, (M // 4, K)), (SUM, (M // 4, N))],
    ),
    "rows of both axes": Case(
        ragged, PRODUCT, 2, [P(("d", "e")), P(None, "e")],
        [(GATHER, (G, K, N)), (SUM, (G, K, N))], FOUR_BY_TWO,
    ),
    "offset": Case(
        lambda lhs, rhs: jgg.ragged_dot(lhs, rhs, SIZES, group_offset=np.int32([2])),
        [(M, K), (4, K, N)], 2, [P("d"), P("e")],
        [(SUM, (2, K, N)), (SUM, (M // 4, K)), (SUM, (M // 4, N))], FOUR_BY_TWO,
        explicit=[(SUM, (4, K, N)), (SUM, (M // 4, K)), (SUM, (M // 4, N))],
    ),
    "accumulate": Case(
        lambda accumulator, lhs, rhs: jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES),
        [(G, K, N), (M, K), (M, N)], 3, [P(), P("d"), P("d")], [(SUM, (G, K, N))],
    ),
    "accumulate, experts": Case(
        lambda accumulator, lhs, rhs: jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES),
        [(G, K, N), (M, K), (M, N)], 3, [P("d"), P(), P()], [(SUM, (M, K)), (SUM, (M, N))],
        explicit=[(GATHER, (G, K, N))],  # of the cotangent
    ),
    "vmap": Case(jax.vmap(ragged), [(8, M, K), (8, G, K, N)], 2, [P("d"), P("d")]),
    "vmap of weights": Case(
        jax.vmap(ragged, (None, 0)), [(M, K), (8, G, K, N)], 2, [P(), P("d")], [(SUM, (M, K))],
    ),
    "vmap of rows": Case(  # over auto axes they are gathered
        jax.vmap(ragged, (0, None)), [(8, M, K), (G, K, N)], 2, [P("d"), P()],
        [(SUM, (G, K, N))], kinds=[EXPLICIT],
    ),
    "syrk": Case(
        lambda a: jgg.grouped_syrk(a, symmetrize_output=True), [(8, 16, 24)], 1, [P("d")]
    ),
    "two stacks": Case(
        lambda a, b, c, d: jgg.grouped_gemm([a, b], [c, d]),
        [(8, 16, 24), (4, 8, 16), (8, 24, 16), (4, 16, 8)], 4, [P("d"), P(), P("d"), P()],
    ),
    "two split stacks": Case(
        lambda a, b: jgg.grouped_syrk([a, b], symmetrize_output=True),
        [(8, 16, 24), (16, 8, 16)], 2, [P("d"), P("d")],
    ),
    "orthogonalize": Case(
        lambda *a: jgg.optim.orthogonalize(a, dtype=jnp.float32), [(8, 16, 24), (16, 8, 16)], 0, [P("d"), P("d")],
        tolerance=1e-4,
    ),
    "quantize_weights": Case(jgg.quantize_weights, [(8, 128, 256)], 0, [P("d")]),
    "quantize_blockwise": Case(jgg.quantize_blockwise, [(64, 256)], 0, [P("d")]),
    "mlp": Case(
        mlp, MLP, 4, [P("d"), P(), P(), P()],
        [(SUM, (G, 32, K)), (SUM, (G, K, 32)), (SUM, (G, K, 32))],
    ),
    "mlp, tensors": Case(
        mlp, MLP, 4, [P(), P(None, None, "d"), P(None, None, "d"), P(None, "d")],
        [(SUM, (M, K)), (SUM, (M, K))],
    ),
    "gated": Case(
        lambda x, wi_0, wi_1: jgg.gated_ragged_dot(x, wi_0, wi_1, SIZES, activation="relu"),
        MLP[:3], 3, [P("d"), P(), P()], [(SUM, (G, K, 32)), (SUM, (G, K, 32))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operation(name, rng):
    case = CASES[name]
    function = with_gradients(case.function, case.differentiable)
    arguments = [integers(rng, *shape) for shape in case.shapes]
    want = jax.jit(function)(*arguments)
    for kind in case.kinds:
        mesh = mesh_of(case.axes, kind)
        with entered(mesh):
            split = put(mesh, arguments, case.specs)
            shardings = [x.sharding for x in split] if kind == AUTO else None
            function = with_gradients(case.function, case.differentiable, shardings)
            compiled = jax.jit(function).lower(*split).compile()
            assert_same(compiled(*split), want, case.tolerance)
        expected = case.explicit if kind == EXPLICIT and case.explicit else case.expected
        assert collectives(compiled) == sorted(expected), kind
