"""Orthogonalisation of matrices whose rows or columns are split over eight CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.muon import exchange
from jax_grouped_gemm.optim import MuonDimensionNumbers, muon, orthogonalize, scale_by_muon
from tests.support.partition import AUTO, EIGHT, FOUR_BY_TWO, KINDS, collectives, entered, mesh_of

SHAPES = [(5, 16, 48), (48, 32), (32, 48), (16, 48), (2, 3, 64, 16)]
SPECS = [P(None, None, "d"), P(None, "d"), P("d"), P(None, "d"), P(None, None, "d", None)]
STEPS = 2  # exchanges do not depend on the number of steps, and fewer steps are smaller programs
alone = jax.jit(functools.partial(orthogonalize, steps=STEPS), static_argnames=("method", "dtype"))


def draw(rng, dtype=jnp.bfloat16):
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES]


def placed(mesh, xs, specs):
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return [jax.device_put(x, s) for x, s in zip(xs, shardings, strict=True)], shardings


def call(mesh, shardings, **options):
    """Returns a jitted `orthogonalize`. It gets `shardings` if types of arrays do not say them."""
    given = shardings if mesh.axis_types[0] == AUTO else None

    def function(*xs):
        return orthogonalize(xs, shardings=given, steps=STEPS, **options)

    return jax.jit(function, out_shardings=None if given is None else list(shardings))


def assert_close(a, b):
    """Compares up to rounding: XLA:CPU may sum in another order for stacks of other lengths."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    np.testing.assert_allclose(a, b, atol=5e-3, rtol=2**-7)


@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestExchange:
    @pytest.mark.parametrize(
        "method, dtype",
        [("auto", jnp.bfloat16), ("standard", jnp.bfloat16), ("auto", jnp.float32)],
    )
    def test_results_are_those_of_one_device(self, method, dtype, kind, rng):
        """All leaves share two exchanges of 16-bit words, before and after the iteration.

        Float32 matrices have the results of the matrices in bfloat16.
        """
        mesh = mesh_of(EIGHT, kind)
        matrices = draw(rng, dtype)
        want = alone([x.astype(jnp.bfloat16).astype(dtype) for x in matrices], method=method)
        with entered(mesh):
            xs, shardings = placed(mesh, matrices, SPECS)
            program = call(mesh, shardings, method=method).lower(*xs).compile()
            outs = program(*xs)
        for out, one, sharding in zip(outs, want, shardings, strict=True):
            assert out.sharding.is_equivalent_to(sharding, out.ndim)
            assert_close(out, one)
        found = collectives(program)
        assert {name for name, _ in found} == {"all-to-all"}
        text = program.as_text()
        assert text.count(" all-to-all(") + text.count(" all-to-all-start(") == 2
        assert "u16[" in text and "u32[8," not in text

    def test_float32_iteration_travels_as_it_is(self, kind, rng):
        mesh = mesh_of(EIGHT, kind)
        matrices = draw(rng, jnp.float32)
        want = alone(matrices, dtype=jnp.float32)
        with entered(mesh):
            xs, shardings = placed(mesh, matrices, SPECS)
            outs = call(mesh, shardings, dtype=jnp.float32)(*xs)
        for out, one in zip(outs, want, strict=True):
            np.testing.assert_allclose(out, one, atol=2e-5)

    def test_chunks_give_what_one_exchange_gives(self, kind, rng, monkeypatch):
        """Two devices exchange chunks, even if a leaf is padded or has few matrices."""
        dtype = jnp.float16 if kind == AUTO else jnp.float32
        mesh = mesh_of({"e": 4, "d": 2}, kind)
        matrices, specs = ([each[i] for i in (0, 1, 4)] for each in (draw(rng, jnp.float32), SPECS))
        matrices.append(jnp.asarray(rng.standard_normal((37, 16, 48)), jnp.float32))
        specs.append(P(None, None, "d"))
        want = alone(matrices, dtype=dtype)
        for limit, number in ((2**40, 2), (100, exchange.MOST_CHUNKS + 2)):
            monkeypatch.setattr(exchange, "CHUNK_BYTES", limit)
            with entered(mesh):
                xs, shardings = placed(mesh, matrices, specs)
                program = call(mesh, shardings, dtype=dtype).lower(*xs).compile()
                outs = program(*xs)
            sent = [name for name, _ in collectives(program)]
            assert sent == ["collective-permute"] * number
            for out, one in zip(outs, want, strict=True):
                assert_close(out, one)

    def test_derivatives_are_refused(self, kind, rng):
        mesh = mesh_of(EIGHT, kind)
        with entered(mesh):
            xs, shardings = placed(mesh, draw(rng, jnp.float32)[:1], SPECS[:1])
            function = call(mesh, shardings, dtype=jnp.float32)
            with pytest.raises(NotImplementedError, match="no derivative for matrices"):
                jax.grad(lambda x: function(x)[0].sum())(*xs)

    def test_stacks_that_are_split_too(self, kind, rng):
        """A leaf whose stack is split is exchanged only if its rows or columns are split too."""
        mesh = mesh_of(FOUR_BY_TWO, kind)
        shapes = [(4, 16, 48), (8, 16, 48), (16, 48)]
        specs = [P("e", None, "d"), P("d"), P()]
        matrices = [jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes]
        want = alone(matrices)
        with entered(mesh):
            xs, shardings = placed(mesh, matrices, specs)
            compiled = call(mesh, shardings).lower(*xs).compile()
            outs = compiled(*xs)
        assert {name for name, _ in collectives(compiled)} == {"all-to-all"}
        for out, one in zip(outs, want, strict=True):
            assert_close(out, one)


def test_explain_says_what_travels(rng):
    mesh = mesh_of(EIGHT)
    xs, shardings = placed(mesh, draw(rng)[:1], SPECS[:1])
    found = jgg.explain(lambda x: orthogonalize([x], shardings=shardings), *xs).transfers
    assert [(x.kind, x.devices) for x in found] == [("sends", 8)] * 2
    assert all(x.what.startswith("uint16") for x in found)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_muon(kind, rng):
    """Updates of split parameters equal those of one device, and stay split."""
    mesh = mesh_of(EIGHT, kind)
    shapes = {"in": (16, 64), "heads": (16, 4, 8), "bias": (8,)}
    specs = {"in": P(None, "d"), "heads": P("d"), "bias": P()}
    numbers = {"in": MuonDimensionNumbers(), "heads": MuonDimensionNumbers(0, (1, 2)), "bias": None}
    params = {n: jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for n, s in shapes.items()}
    options = dict(muon_weight_dimension_numbers=numbers, ns_steps=STEPS)
    one_device = muon(0.1, **options)
    want, _ = jax.jit(one_device.update)(params, one_device.init(params), params)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    optimizer = muon(0.1, shardings=shardings if kind == AUTO else None, **options)
    with entered(mesh):
        split = {n: jax.device_put(x, shardings[n]) for n, x in params.items()}
        got, state = jax.jit(optimizer.update)(split, optimizer.init(split), split)
    for name in shapes:
        assert got[name].sharding.is_equivalent_to(shardings[name], got[name].ndim), name
        assert_close(got[name], want[name])


def of_blocks(x, spec, devices=8):
    """Orthogonalises each block alone, scaled to the RMS of results of whole matrices."""
    entries = [*spec, *[None] * x.ndim][: x.ndim]
    dim = next(i for i, entry in enumerate(entries) if entry)
    blocks = np.stack(np.split(np.asarray(x), devices, dim))
    ratio = max(blocks.shape[-2:]) / max(x.shape[-2:])
    (outs,) = alone([blocks])
    return ratio**0.5 * np.concatenate(np.asarray(outs, np.float32), dim)


def conditions(jaxpr):
    """Yields the branches of every `cond` of a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            yield eqn.params["branches"]
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from conditions(inner)


@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestBlocks:
    def test_each_device_has_its_own(self, kind, rng):
        mesh = mesh_of(EIGHT, kind)
        matrices, specs = draw(rng)[:3], [*SPECS[:2], P()]
        with entered(mesh):
            xs, shardings = placed(mesh, matrices, specs)
            program = call(mesh, shardings, blockwise=True).lower(*xs).compile()
            outs = program(*xs)
        assert not collectives(program)
        wants = [*map(of_blocks, matrices[:2], specs), *alone(matrices[2:])]
        for out, want in zip(outs, wants, strict=True):
            assert_close(out, want)

    def test_period(self, kind, rng):
        """Every third update exchanges matrices; other updates use each device's blocks alone."""
        mesh = mesh_of(EIGHT, kind)
        matrices = draw(rng)[:1]
        blocks = of_blocks(matrices[0], SPECS[0])
        with entered(mesh):
            (x,), (sharding,) = placed(mesh, matrices, SPECS[:1])
            given = sharding if kind == AUTO else None
            often, always = (
                scale_by_muon(shardings=given, period=n, nesterov=False, beta=0.0, ns_steps=STEPS)
                for n in (3, 1)
            )
            step = jax.jit(often.update)
            state = often.init(x)
            program = step.lower(x, state).compile()
            assert {name for name, _ in collectives(program)} == {"all-to-all"}
            branches = conditions(jax.make_jaxpr(often.update)(x, state).jaxpr)
            assert [["all_to_all" in str(x) for x in found] for found in branches] == [
                [True, False]
            ]
            whole, _ = jax.jit(always.update)(x, state)
            for i in range(7):
                update, state = step(x, state)
                assert update.sharding.is_equivalent_to(sharding, update.ndim)
                if i % 3 == 0:
                    np.testing.assert_array_equal(update, whole)
                else:
                    assert_close(update, blocks)


def test_a_period_has_no_effect_on_one_device(rng):
    params = {"a": jnp.asarray(rng.standard_normal((16, 48)), jnp.float32)}
    state = muon(0.1).init(params)
    assert jax.tree.structure(muon(0.1, period=4).init(params)) == jax.tree.structure(state)
    texts = [str(jax.make_jaxpr(muon(0.1, period=n).update)(params, state)) for n in (None, 1, 4)]
    assert texts[0] == texts[1] and "cond" not in texts[2]


def test_explain_of_a_period(rng):
    mesh = mesh_of(EIGHT)
    (x,), (sharding,) = placed(mesh, draw(rng)[:1], SPECS[:1])
    optimizer = muon(0.1, shardings=sharding, period=4)
    found = jgg.explain(optimizer.update, x, optimizer.init(x)).transfers
    assert [(t.kind, t.devices) for t in found] == [("sends", 8)] * 2


class TestErrors:
    def test_rows_and_columns(self, rng):
        mesh = mesh_of(FOUR_BY_TWO)
        with pytest.raises(ValueError, match=r"shardings\[0\] splits rows and columns"):
            orthogonalize([np.ones((8, 8))], shardings=[NamedSharding(mesh, P("d", "e"))])

    def test_uneven(self):
        with pytest.raises(ValueError, match="splits a dimension of 12 over 8 devices"):
            orthogonalize(
                [np.ones((8, 12))], shardings=[NamedSharding(mesh_of(EIGHT), P(None, "d"))]
            )

    def test_what_is_no_sharding(self):
        with pytest.raises(TypeError, match=r"shardings\[0\] must be a jax.sharding.NamedSharding"):
            orthogonalize([np.ones((8, 8))], shardings=[P("d")])
        with pytest.raises(ValueError, match="shardings has 2 entries, but matrices has 1"):
            orthogonalize([np.ones((8, 8))], shardings=[None, None])

    def test_an_axis_that_becomes_one_with_others(self, rng):
        mesh = mesh_of(EIGHT)
        params = {"heads": jnp.ones((16, 8, 4))}
        optimizer = muon(
            0.1,
            muon_weight_dimension_numbers={"heads": MuonDimensionNumbers(0, (1, 2))},
            shardings={"heads": NamedSharding(mesh, P(None, "d"))},
        )
        with pytest.raises(ValueError, match=r"splits one of the axes \(1, 2\)"):
            optimizer.update(params, optimizer.init(params), params)

    def test_periods_and_blocks(self):
        for make in (scale_by_muon, functools.partial(muon, 0.1)):
            with pytest.raises(ValueError, match="period must be at least 1, got 0"):
                make(period=0)
            for period in (2.0, True, jnp.int32(2)):
                with pytest.raises(TypeError, match="period must be an integer"):
                    make(period=period)
        for blockwise in (1, None, jnp.int32(1), jnp.ones(2, bool)):
            with pytest.raises(TypeError, match="blockwise must be"):
                orthogonalize([np.ones((8, 8))], blockwise=blockwise)
