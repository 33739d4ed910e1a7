"""Operations keep arrays split over devices: values, derivatives, types and collectives.

Eight devices compute what one does. Tests read the transfers from the compiled program. Operands
are integers in float32, whose products and sums are exact; functions that round have a tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from tests.support.partition import (
    AUTO,
    EIGHT,
    EXPLICIT,
    FOUR_BY_TWO,
    GATHER,
    KINDS,
    MLP,
    PRODUCT,
    SIZES,
    SUM,
    G,
    K,
    M,
    N,
    assert_same,
    collectives,
    entered,
    integers,
    mesh_of,
    put,
    ragged,
    with_gradients,
)


@dataclasses.dataclass
class Case:
    """A function of arrays of `shapes`. The first `differentiable` of them have gradients."""

    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    differentiable: int
    specs: Sequence[P]
    expected: Sequence[tuple[str, tuple[int, ...]]] = ()
    axes: dict[str, int] = dataclasses.field(default_factory=lambda: EIGHT)
    explicit: Sequence[tuple[str, tuple[int, ...]]] | None = None
    """Replaces `expected` over explicit axes, where gradients must have the operands' types."""
    tolerance: float = 0.0
    kinds: Sequence[AxisType] = KINDS


def mlp(x, wi_0, wi_1, wo):
    return jgg.ragged_mlp(x, wi_0, wi_1, wo, SIZES, activation="relu")


def accumulate(accumulator, lhs, rhs):
    return jgg.ragged_dot_accumulate(accumulator, lhs, rhs, SIZES)


def optimizer_step(weights, gradient):
    optimizer = jgg.optim.adamw(1e-2, select=lambda path, leaf: True)
    new, state = optimizer.step(weights, gradient, optimizer.init(weights))
    return new, state.quantized


CASES = {
    "rows": Case(ragged, PRODUCT, 2, [P("d"), P()], [(SUM, (G, K, N))]),
    "columns": Case(ragged, PRODUCT, 2, [P(), P(None, None, "d")], [(SUM, (M, K))]),
    "contracted": Case(ragged, PRODUCT, 2, [P(None, "d"), P(None, "d")], [(SUM, (M, N))]),
    "experts": Case(ragged, PRODUCT, 2, [P(), P("d")], [(SUM, (M, K)), (SUM, (M, N))]),
    "fsdp": Case(
        ragged, PRODUCT, 2, [P("d"), P(None, "d")], [(GATHER, (G, K, N)), (SUM, (G, K, N))]
    ),
    "rows and columns": Case(
        ragged, PRODUCT, 2, [P("d"), P(None, None, "e")],
        [(SUM, (M // 4, K)), (SUM, (G, K, N // 2))], FOUR_BY_TWO,
    ),
    "rows and experts": Case(
        ragged, PRODUCT, 2, [P("d"), P("e")],
        [(SUM, (G // 2, K, N)), (SUM, (M // 4, K)), (SUM, (M // 4, N))], FOUR_BY_TWO,
        # Rows and cotangents have no axis of experts, so the gradients of all experts are summed.
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
        accumulate, [(G, K, N), (M, K), (M, N)], 3, [P(), P("d"), P("d")], [(SUM, (G, K, N))],
    ),
    "accumulate, experts": Case(
        accumulate, [(G, K, N), (M, K), (M, N)], 3, [P("d"), P(), P()],
        [(SUM, (M, K)), (SUM, (M, N))],
        explicit=[(GATHER, (G, K, N))],  # gathers the cotangent
    ),
    "vmap": Case(jax.vmap(ragged), [(8, M, K), (8, G, K, N)], 2, [P("d"), P("d")]),
    "vmap of weights": Case(
        jax.vmap(ragged, (None, 0)), [(M, K), (8, G, K, N)], 2, [P(), P("d")], [(SUM, (M, K))],
    ),
    "vmap of rows": Case(  # over auto axes the rows are gathered
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
        lambda *a: jgg.optim.orthogonalize(a, dtype=jnp.float32),
        [(8, 16, 24), (16, 8, 16)], 0, [P("d"), P("d")], tolerance=1e-4,
    ),
    "fp8": Case(  # `test_fp8_product` compares values, more closely than `test_operation` would
        lambda lhs, rhs: jgg.fp8_ragged_dot(lhs, rhs, SIZES), [(M, 128), (G, 128, 128)], 2,
        [P("d"), P()], [(SUM, (G, 128, 128))],
    ),
    "quantize_weights": Case(jgg.quantize_weights, [(8, 128, 256)], 0, [P("d")]),
    "quantize_weights, rows": Case(jgg.quantize_weights, [(2, 1024, 256)], 0, [P(None, "d")]),
    "optimizer": Case(
        optimizer_step, [(2, 8, 128, 256)] * 2, 0, [P(None, "d")] * 2, tolerance=1e-6
    ),
    "optimizer, columns": Case(
        optimizer_step, [(2, 256, 1024)] * 2, 0, [P(None, None, "d")] * 2, tolerance=1e-6
    ),
    "quantize_blockwise": Case(jgg.quantize_blockwise, [(64, 256)], 0, [P("d")]),
    "mlp": Case(
        mlp, MLP, 4, [P("d"), P(), P(), P()],
        [(SUM, (G, 32, K)), (SUM, (G, K, 32)), (SUM, (G, K, 32))],
    ),
    "mlp, fsdp": Case(  # over auto axes, transfers depend on how results are used
        mlp, MLP, 4, [P("d"), P(None, "d"), P(None, "d"), P(None, None, "d")],
        [(GATHER, (G, 32, K)), (GATHER, (G, K, 32)), (GATHER, (G, K, 32))]
        + [(SUM, (G, 32, K)), (SUM, (G, K, 32)), (SUM, (G, K, 32))],
        kinds=[EXPLICIT],
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


@functools.cache
def on_one_device(function, differentiable):
    """Returns a compiled function that cases of the same function share."""
    return jax.jit(with_gradients(function, differentiable))


@pytest.mark.parametrize("name", [name for name in CASES if name != "fp8"])
def test_operation(name, rng):
    case = CASES[name]
    arguments = [integers(rng, *shape) for shape in case.shapes]
    want = on_one_device(case.function, case.differentiable)(*arguments)
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


# `explain` differs from these programs: XLA adds sums, or leaves out sums of unused results.
OTHERS_SUMS = ("vmap of weights", "vmap of rows", "mlp, tensors")


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHERS_SUMS])
def test_explanation(name):
    """`explain` lists the transfers of the compiled program."""
    case = CASES[name]
    for kind in case.kinds:
        mesh = mesh_of(case.axes, kind)
        with entered(mesh):
            shardings = [NamedSharding(mesh, spec) for spec in case.specs]
            arguments = [
                jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
                for shape, sharding in zip(case.shapes, shardings, strict=True)
            ]
            wanted = shardings if kind == AUTO else None
            function = with_gradients(case.function, case.differentiable, wanted)
            found = {(t.kind, t.bytes) for t in jgg.explain(function, *arguments).transfers}
        expected = case.explicit if kind == EXPLICIT and case.explicit else case.expected
        words = {GATHER: "gathers", SUM: "sums"}
        assert found == {(words[kind], 4 * math.prod(shape)) for kind, shape in expected}


DOCUMENTED = {
    ("`ragged_dot`", "rows"): "rows",
    ("`ragged_dot`", "columns"): "columns",
    ("`ragged_dot`", "k of both"): "contracted",
    ("`ragged_dot`", "experts"): "experts",
    ("`ragged_dot`", "rows, and k of rhs on the same axis"): "fsdp",
    ("`ragged_dot_accumulate`", "rows"): "accumulate",
    ("`ragged_mlp`", "rows"): "mlp",
    ("`ragged_mlp`", "rows, and matrices on the same axis"): "mlp, fsdp",
    ("`ragged_mlp`", "hidden features"): "mlp, tensors",
    ("`gated_ragged_dot`", "rows"): "gated",
    ("`vmap` of `ragged_dot`", "the batch of both operands"): "vmap",
    ("`grouped_gemm`, `grouped_syrk`", "leading axis of stacks"): "two stacks",
    ("`optim.orthogonalize`, `optim.muon`", "leading axis of stacks"): "orthogonalize",
    ("`fp8_ragged_dot`", "rows"): "fp8",
    ("`quantize_weights`", "leading axis"): "quantize_weights",
    ("`quantize_weights`", "rows or columns, in whole blocks of 128"): "quantize_weights, rows",
    ("`optim.adamw`, `optim.quantized`", "leading axes of experts"): "optimizer",
    (
        "`optim.adamw`, `optim.quantized`",
        "rows or columns, in whole blocks of 128",
    ): "optimizer, columns",
    ("`quantize_blockwise`", "rows"): "quantize_blockwise",
}
"""The cases behind the rows of the table in the documentation."""


def test_what_is_documented_is_tested():
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "several_devices.md"
    header = "| function | split | gathered | summed over devices |\n"
    table = page.read_text().split(header)[1].split("\n\n")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]
    ]
    assert {(function, split) for function, split, *_ in rows} == set(DOCUMENTED)
    for function, split, gathered, summed in rows:
        expected = {kind for kind, _ in CASES[DOCUMENTED[function, split]].expected}
        assert (GATHER in expected, SUM in expected) == (gathered != "nothing", summed != "nothing")


def test_biases_of_an_mlp_split_by_hidden_features(rng):
    """Devices add up terms of the result. Only one device adds the bias, in tangents too."""

    def function(x, wi_0, wi_1, wo, *biases):
        return jgg.ragged_mlp(x, wi_0, wi_1, wo, SIZES, biases=biases)

    shapes = [*MLP, (G, 32), (G, 32), (G, K)]
    arguments = [rng.standard_normal(shape).astype(np.float32) / 4 for shape in shapes]
    columns = P(None, None, "d")
    specs = [P(), columns, columns, P(None, "d"), P(None, "d"), P(None, "d"), P()]

    def both(*arguments):
        gradients = jax.grad(lambda *a: jnp.sum(function(*a) ** 2), range(7))(*arguments)
        return jax.jvp(function, arguments, arguments), gradients

    want = jax.jit(both)(*arguments)
    for kind in KINDS:
        mesh = mesh_of(EIGHT, kind)
        with entered(mesh):
            assert_same(jax.jit(both)(*put(mesh, arguments, specs)), want, 1e-5)


def fp8_product(lhs, rhs):
    return jgg.fp8_ragged_dot(lhs, rhs, np.array([10, 0, 40, 20, -3, 1, 30, 20], np.int32))


def test_fp8_product(rng):
    """Devices form blocks of their own rows, so gradients round differently than on one device."""
    k, n = 128, 160
    shapes = [(2 * M, k), (G, k, n)]
    arguments = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]
    function = with_gradients(fp8_product, 2)
    want = jax.jit(function)(*arguments)
    of_explicit = {}
    for kind in reversed(KINDS):
        mesh = mesh_of({"d": 4}, kind)
        with entered(mesh):
            split = put(mesh, arguments, [P("d"), P()])
            compiled = jax.jit(function).lower(*split).compile()
            got = compiled(*split)
        assert_same(got[0], want[0])
        assert_same(got, want, 0.1)
        # Auto and explicit axes lead to the same blocks.
        of_explicit = of_explicit or got
        assert_same(got, of_explicit)
        assert collectives(compiled) == [(SUM, (G, k, n))], kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("specs", [[P(), P("d")], [P(), P(None, None, "d")]], ids=str)
def test_fp8_product_of_split_weights(specs, kind, rng):
    """Weights may be split by groups, and over auto axes by columns too."""
    shapes = [(2 * M, 128), (G, 128, 256)]
    arguments = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]
    function = jax.jit(with_gradients(fp8_product, 2))
    mesh = mesh_of({"d": 2}, kind)
    with entered(mesh):
        split = put(mesh, arguments, specs)
        if kind == EXPLICIT and specs[1] != P("d"):
            with pytest.raises(NotImplementedError, match="reshard"):
                function(*split)
            return
        got = function(*split)
    assert_same(got, on_one_device(fp8_product, 2)(*arguments), 0.02)
    if kind == EXPLICIT:
        assert got[1][1].sharding.spec[0] == "d"


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_fp8_layer_of_split_experts(wgrad, rng):
    """Gradients of experts that are split over explicit axes are split in the same way."""
    shapes = [(2 * M, 128), (G, 128, 256), (G, 128, 256), (G, 256, 128)]
    shapes += [(G, 256), (G, 256), (G, 128)]
    arguments = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]
    sizes = np.array([10, 0, 40, 20, -3, 1, 30, 20], np.int32)

    def layer(x, wi_0, wi_1, wo, *biases):
        recipe = jgg.Recipe(wgrad=wgrad)
        return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, biases=biases, recipe=recipe)

    function = jax.jit(with_gradients(layer, 7))
    mesh = mesh_of({"d": 2}, EXPLICIT)
    with entered(mesh):
        got = function(*put(mesh, arguments, [P(), *[P("d")] * 6]))
    assert_same(got, function(*arguments), 0.02)
    assert [gradient.sharding.spec[0] for gradient in got[1][1:]] == ["d"] * 6


def test_vmap_of_rows_over_auto_axes(rng):
    """Over auto axes, rows that `jax.vmap` maps may be gathered, and results are right."""
    function = jax.vmap(ragged, (0, None))
    arguments = [integers(rng, 8, M, K), integers(rng, G, K, N)]
    split = put(mesh_of(EIGHT), arguments, [P("d"), P()])
    assert_same(jax.jit(function)(*split), jax.jit(function)(*arguments))


def test_what_every_device_needs_is_named(rng):
    mesh = mesh_of(EIGHT, EXPLICIT)
    with jax.set_mesh(mesh):
        lhs, rhs, sizes = put(mesh, [*map(np.ones, PRODUCT), SIZES], [P(), P(), P("d")])
        with pytest.raises(NotImplementedError, match="dimension 0 .*int32.8@d.*reshard"):
            jgg.ragged_dot(lhs, rhs, sizes)
