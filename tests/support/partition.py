"""Arrays split over eight CPU devices, and the collectives of compiled programs."""

from __future__ import annotations

import contextlib
import re

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

import jax_grouped_gemm as jgg

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = (AUTO, EXPLICIT)
EIGHT = {"d": 8}
FOUR_BY_TWO = {"d": 4, "e": 2}
GATHER, SUM = "all-gather", "all-reduce"
# An empty group, a group of negative size, and more rows in total than exist.
SIZES = np.array([10, 0, 7, 20, -3, 1, 16, 14], np.int32)
M, K, N, G = 64, 16, 24, 8
PRODUCT = [(M, K), (G, K, N)]
MLP = [(M, K), (G, K, 32), (G, K, 32), (G, 32, K)]


def ragged(lhs, rhs):
    return jgg.ragged_dot(lhs, rhs, SIZES)


def mesh_of(axes: dict[str, int], kind=AUTO) -> jax.sharding.Mesh:
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def entered(mesh):
    """Enters a mesh if it has explicit axes. Programs over auto axes mostly enter none."""
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.set_mesh(mesh) if explicit else contextlib.nullcontext()


def put(mesh, arrays, specs):
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def collectives(compiled) -> list[tuple[str, tuple[int, ...]]]:
    """Returns collectives by name and result shape. Combined ones appear for each result."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", compiled.as_text())
    shapes = (
        (kind, tuple(map(int, shape.split(","))) if shape else ())
        for results, kind in found
        for shape in re.findall(r"\w+\[([\d,]*)\]", results)
    )
    # Leave out scalars, such as a loss, because they cost nothing.
    return sorted(x for x in shapes if x[1])


def integers(rng, *shape):
    return rng.integers(-3, 4, shape).astype(np.float32)


def with_gradients(function, operands, shardings=None):
    """Returns a function that returns results, and gradients of the first `operands` arguments.

    Cotangents are small integers, so that sums are exact. With `shardings`, gradients are split
    like the operands, as in the steps of an optimiser.
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
