"""What is split over devices stays split: values, derivatives, types and collectives.

Eight devices compute what one does. What travels between them is read from the compiled program.
Operands are integers in float32, whose products and sums are exact, unless a function is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen, nnx  # noqa: E402
from jax import export  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_grouped_gemm as jgg  # noqa: E402
import jax_grouped_gemm.flax.linen as jgg_linen  # noqa: E402
import jax_grouped_gemm.flax.nnx as jgg_nnx  # noqa: E402
from jax_grouped_gemm import moe  # noqa: E402

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
        lambda *a: jgg.optim.orthogonalize(a, dtype=jnp.float32),
        [(8, 16, 24), (16, 8, 16)], 0, [P("d"), P("d")], tolerance=1e-4,
    ),
    "quantize_weights": Case(jgg.quantize_weights, [(8, 128, 256)], 0, [P("d")]),
    "quantize_blockwise": Case(jgg.quantize_blockwise, [(64, 256)], 0, [P("d")]),
    "mlp": Case(
        mlp, MLP, 4, [P("d"), P(), P(), P()],
        [(SUM, (G, 32, K)), (SUM, (G, K, 32)), (SUM, (G, K, 32))],
    ),
    "mlp, fsdp": Case(  # over auto axes it depends on where the result is wanted
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
    ("`quantize_weights`", "leading axis"): "quantize_weights",
    ("`quantize_blockwise`", "rows"): "quantize_blockwise",
}
"""The cases behind the rows of the table in the documentation."""


def test_what_is_documented_is_tested():
    page = Path(__file__).parents[2] / "docs" / "tutorials" / "several_devices.md"
    table = page.read_text().split("## What travels")[1].split("\n\n")[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    assert {(function, split) for function, split, *_ in rows} == set(DOCUMENTED)
    for function, split, gathered, summed in rows:
        expected = {kind for kind, _ in CASES[DOCUMENTED[function, split]].expected}
        assert (GATHER in expected, SUM in expected) == (gathered != "nothing", summed != "nothing")


T, D, F, E, TOP = 64, 16, 24, 8, 2


def layer_operands(rng):
    """Tokens, logits and matrices."""
    return [
        rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5
        for shape in ((T, D), (T, E), (E, D, F), (E, D, F), (E, F, D))
    ]


def layer_loss(x, logits, *matrices, **options):
    return jnp.sum(moe.dropless_mlp(x, moe.route(logits, TOP), *matrices, **options) ** 2)


LOGITS = (GATHER, (T, E))
"""What XLA's `top_k` gathers, on CPUs alone."""
LAYER_GRADIENTS = [(SUM, (E, D, F)), (SUM, (E, D, F)), (SUM, (E, F, D))]
LAYERS = {
    "tokens": (EIGHT, P("d"), P()),
    "fsdp": (EIGHT, P("d"), P(None, "d")),
    "fsdp of two axes": (FOUR_BY_TWO, P(("d", "e")), P(None, "d")),
    "tensors": (FOUR_BY_TWO, P("d"), P(None, None, "e")),
    "experts": (EIGHT, P("d"), P("d")),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
class TestDroplessMlp:
    def test_values_and_gradients(self, name, kind, rng):
        axes, of_tokens, of_matrices = LAYERS[name]
        mesh = mesh_of(axes, kind)
        arguments = layer_operands(rng)
        step = jax.jit(jax.value_and_grad(layer_loss, range(5)))
        want = step(*arguments)
        with entered(mesh):
            split = put(mesh, arguments, [of_tokens] * 2 + [of_matrices] * 3)
            compiled = step.lower(*split).compile()
            assert_same(compiled(*split), want, 1e-5)
            if kind == EXPLICIT:
                of_gradients = jax.eval_shape(step, *split)[1]
                for x, gradient in zip(split, of_gradients, strict=True):
                    assert gradient.sharding.spec == jax.typeof(x).sharding.spec
        travelling = [x for x in collectives(compiled) if x != LOGITS]
        # Rows and tokens stay where they are: what travels has the size of matrices.
        if name in ("tokens", "fsdp"):
            whole = [x for x in travelling if x[0] == GATHER]
            assert len(whole) == (0 if name == "tokens" else 3), travelling
            assert all(len(shape) == 3 for _, shape in travelling), travelling
        if name == "tokens":
            assert travelling == sorted(LAYER_GRADIENTS)


class TestTokenAxes:
    @pytest.fixture
    def split(self, rng):
        mesh = mesh_of(FOUR_BY_TWO)
        return put(mesh, layer_operands(rng), [P("d"), P("d"), P(), P(), P()])

    @pytest.mark.parametrize("axes, tokens", [(None, T // 8), ("d", T // 4), ((), T)])
    def test_split_by_these(self, axes, tokens, split):
        program = jax.jit(lambda *a: layer_loss(*a, token_axes=axes)).lower(*split).as_text()
        manual = re.search(r"manual_computation.*?\((.*?)\) ->", program.replace("\n", " "))
        assert (manual is None) == (axes == ())
        if manual:
            assert f"tensor<{tokens}x{D}xf32>" in program

    def test_tokens_that_do_not_divide_stay_whole_along_an_axis(self, split):
        x, logits, *matrices = split
        program = jax.jit(layer_loss).lower(x[:12], logits[:12], *matrices).as_text()
        assert f"tensor<3x{D}xf32>" in program

    @pytest.mark.parametrize(
        "axes, message",
        [("f", "token_axes must name auto axes.*'f'.*'d', 'e'"), ("d", "66.*multiple of the 4")],
    )
    def test_names_what_is_wrong(self, axes, message, split):
        x, logits, *matrices = split
        x, logits = (jnp.concatenate([a, a[:2]]) for a in (x, logits))
        with pytest.raises(ValueError, match=f"dropless_mlp: .*{message}"):
            layer_loss(x, logits, *matrices, token_axes=axes)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("flavour", ["nnx", "linen"])
def test_flax_layer(flavour, kind, rng):
    mesh = mesh_of(EIGHT, kind)
    x = rng.standard_normal((8, 4, D)).astype(np.float32)
    if flavour == "nnx":
        graph, parameters = nnx.split(jgg_nnx.MoE(D, F, E, TOP, rngs=nnx.Rngs(0)))

        def apply(parameters, x):
            return nnx.merge(graph, parameters)(x)[0]
    else:
        layer = jgg_linen.MoE(F, E, TOP)
        parameters = linen.unbox(layer.init(jax.random.key(0), x))

        def apply(parameters, x):
            return layer.apply(parameters, x)[0]

    step = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(apply(*a) ** 2), (0, 1)))
    want = step(parameters, x)
    with entered(mesh):
        # The experts' matrices are split along the axis of the tokens.
        spread = NamedSharding(mesh, P(None, "d")), NamedSharding(mesh, P())
        placed = jax.tree.map(lambda w: jax.device_put(w, spread[w.ndim != 3]), parameters)
        compiled = step.lower(placed, *put(mesh, [x], [P("d")])).compile()
        assert_same(compiled(placed, *put(mesh, [x], [P("d")])), want, 1e-5)
    shapes = {shape for kind, shape in collectives(compiled) if kind == GATHER}
    assert shapes <= {(E, D, F), (E, F, D), (8, 4, E), (32, E)}


@pytest.mark.parametrize("axes, tokens", [(None, 4), ("d", 8), ((), 32)])
def test_token_axes_of_flax_layers(axes, tokens, rng):
    mesh = mesh_of(FOUR_BY_TWO)
    x = jax.device_put(np.ones((8, 4, D), np.float32), NamedSharding(mesh, P("d")))
    of_nnx = jgg_nnx.MoE(D, F, E, TOP, token_axes=axes, rngs=nnx.Rngs(0))
    of_linen = jgg_linen.MoE(F, E, TOP, token_axes=axes)
    graph, state = nnx.split(of_nnx)
    parameters = of_linen.init(jax.random.key(0), x)
    for lowered in (
        jax.jit(lambda s, x: nnx.merge(graph, s)(x)[0]).lower(state, x),
        jax.jit(lambda p, x: of_linen.apply(p, x)[0]).lower(parameters, x),
    ):
        assert f"tensor<{tokens}x{D}xf32>" in lowered.as_text()


class TestTransformations:
    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_scan_and_remat(self, kind, rng):
        mesh = mesh_of(EIGHT, kind)
        x, logits, *matrices = layer_operands(rng)
        stacked = [np.stack([w, -w]) for w in matrices]

        def loss(x, logits, *stacked):
            @jax.checkpoint
            def body(x, matrices):
                return x + moe.dropless_mlp(x, moe.route(logits, TOP), *matrices), None

            return jnp.sum(jax.lax.scan(body, x, stacked)[0] ** 2)

        step = jax.jit(jax.value_and_grad(loss, range(5)))
        want = step(x, logits, *stacked)
        with entered(mesh):
            specs = [P("d")] * 2 + [P(None, None, "d")] * 3
            split = put(mesh, [x, logits, *stacked], specs)
            compiled = step.lower(*split).compile()
            assert_same(compiled(*split), want, 1e-5)
        gathers = {shape for kind, shape in collectives(compiled) if kind == GATHER}
        assert gathers <= {(E, D, F), (E, F, D), (1, E, D, F), (1, E, F, D), (T, E)}

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_second_derivatives(self, kind, rng):
        mesh = mesh_of(EIGHT, kind)
        arguments = [integers(rng, *shape) for shape in PRODUCT]

        def second(lhs, rhs):
            def first(rhs):
                return jax.grad(lambda lhs: jnp.sum(ragged(lhs, rhs) ** 2))(lhs)

            return jax.grad(lambda rhs: jnp.sum(first(rhs) ** 2))(rhs)

        want = jax.jit(second)(*arguments)
        with entered(mesh):
            got = jax.jit(second)(*put(mesh, arguments, [P("d"), P()]))
        assert_same(got, want)

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_eager(self, kind, rng):
        arguments = [integers(rng, *shape) for shape in PRODUCT]
        mesh = mesh_of(EIGHT, kind)
        with entered(mesh):
            got = ragged(*put(mesh, arguments, [P("d"), P()]))
        assert got.sharding.spec[0] == "d"
        assert_same(got, ragged(*arguments))

    def test_rows_that_do_not_divide(self, rng):
        mesh = mesh_of(FOUR_BY_TWO)
        lhs, rhs = integers(rng, 62, K), integers(rng, G, K, N)

        def product(lhs, rhs):
            lhs = jax.lax.with_sharding_constraint(lhs, NamedSharding(mesh, P("d")))
            return ragged(lhs, rhs)

        both = with_gradients(product, 2)
        compiled = jax.jit(both).lower(*put(mesh, [lhs, rhs], [P(), P()])).compile()
        assert_same(compiled(lhs, rhs), jax.jit(with_gradients(ragged, 2))(lhs, rhs))

    def test_axes_of_both_kinds(self, rng):
        mesh = mesh_of(FOUR_BY_TWO, (EXPLICIT, AUTO))
        arguments = [integers(rng, *shape) for shape in PRODUCT]
        both = with_gradients(ragged, 2)
        want = jax.jit(both)(*arguments)
        with jax.set_mesh(mesh):
            assert_same(jax.jit(both)(*put(mesh, arguments, [P("d"), P()])), want)
            assert_same(jax.jit(both)(*put(mesh, arguments, [P("d"), P(None, None, "e")])), want)

    def test_auto_axes_within_explicit_ones(self, rng):
        mesh = mesh_of(EIGHT, EXPLICIT)
        arguments = [integers(rng, *shape) for shape in PRODUCT]
        with jax.set_mesh(mesh):
            run = jax.jit(jax.sharding.auto_axes(ragged, out_sharding=P("d", None)))
            split = put(mesh, arguments, [P("d"), P()])
            compiled = run.lower(*split).compile()
            assert_same(compiled(*split), ragged(*arguments))
        assert collectives(compiled) == []

    @pytest.mark.parametrize("names", [{"d"}, {"d", "e"}])
    def test_shard_map(self, names, rng):
        mesh = mesh_of(FOUR_BY_TWO)
        lhs, rhs = integers(rng, M, K), integers(rng, G, K, N)
        sizes = rng.integers(0, 4, (4, G)).astype(np.int32)
        run = jax.shard_map(
            lambda lhs, rhs, sizes: jgg.ragged_dot(lhs, rhs, sizes[0]),
            mesh=mesh,
            in_specs=(P("d"), P(), P("d")),
            out_specs=P("d"),
            axis_names=names,
        )
        parts = zip(lhs.reshape(4, -1, K), sizes, strict=True)
        want = np.concatenate([jgg.ragged_dot(part, rhs, of_part) for part, of_part in parts])
        assert_same(jax.jit(run)(lhs, rhs, sizes), want)

    @pytest.mark.parametrize("devices", [1, 8])
    def test_export(self, devices, rng):
        arguments = [integers(rng, *shape) for shape in PRODUCT]
        for kind in KINDS:
            mesh = mesh_of({"d": devices}, kind)
            with entered(mesh):
                split = put(mesh, arguments, [P("d"), P()])
                exported = export.export(jax.jit(ragged))(*split)
                called = export.deserialize(exported.serialize()).call
                assert_same(jax.jit(called)(*split), ragged(*arguments))

    def test_without_shardy(self, rng):
        arguments = [integers(rng, *shape) for shape in PRODUCT]
        want = ragged(*arguments)
        split = put(mesh_of(EIGHT), arguments, [P("d"), P()])
        before = jax.config.jax_use_shardy_partitioner
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            assert_same(jax.jit(lambda *a: ragged(*a))(*split), want)
        finally:
            jax.config.update("jax_use_shardy_partitioner", before)

    def test_operands_without_a_mesh(self, rng):
        """On eight devices and not said where: the index of a loop's iteration, for example."""
        arguments = [integers(rng, *shape) for shape in PRODUCT]
        everywhere = NamedSharding(mesh_of(EIGHT), P())
        run = jax.jit(lambda x: x + ragged(*arguments))
        zero = jax.device_put(np.zeros((M, N), np.float32), everywhere)
        assert_same(run(zero), ragged(*arguments))

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_muon(self, kind, rng):
        parameters = {
            "experts": rng.standard_normal((8, 16, 24)).astype(np.float32),
            "others": rng.standard_normal((16, 16, 24)).astype(np.float32),
        }
        transformation = jgg.optim.muon(0.1, dtype=jnp.float32)
        want = transformation.update(parameters, transformation.init(parameters), parameters)[0]
        mesh = mesh_of(EIGHT, kind)
        with entered(mesh):
            split = jax.device_put(parameters, NamedSharding(mesh, P("d")))
            state = transformation.init(split)
            compiled = jax.jit(transformation.update).lower(split, state, split).compile()
            assert_same(compiled(split, state, split)[0], want, 1e-4)
        assert collectives(compiled) == []


def test_biases_of_an_mlp_split_by_hidden_features(rng):
    """They are in one term of the sum, in tangents too."""

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


def test_fp8_product(rng):
    """Blocks along the rows are those of a device, so that gradients are rounded otherwise."""
    shapes = [(2 * M, 128), (G, 128, 128)]
    arguments = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in shapes]
    sizes = np.array([10, 0, 40, 20, -3, 1, 30, 20], np.int32)
    function = with_gradients(lambda lhs, rhs: jgg.fp8_ragged_dot(lhs, rhs, sizes), 2)
    want = jax.jit(function)(*arguments)
    for kind in KINDS:
        mesh = mesh_of({"d": 4}, kind)
        with entered(mesh):
            split = put(mesh, arguments, [P("d"), P()])
            compiled = jax.jit(function).lower(*split).compile()
            assert_same(compiled(*split)[0], want[0])
            assert_same(compiled(*split), want, 0.1)
        if kind == EXPLICIT:
            assert {travelling for travelling, _ in collectives(compiled)} == {SUM}


def test_vmap_of_rows_over_auto_axes(rng):
    """They are gathered, and right."""
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
