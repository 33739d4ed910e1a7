"""Sharded operands stay sharded under JAX's transformations, in programs of several kinds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from tests.support.partition import (
    AUTO,
    EIGHT,
    EXPLICIT,
    FOUR_BY_TWO,
    KINDS,
    PRODUCT,
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


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_second_derivatives(kind, rng):
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
def test_eager(kind, rng):
    arguments = [integers(rng, *shape) for shape in PRODUCT]
    mesh = mesh_of(EIGHT, kind)
    with entered(mesh):
        got = ragged(*put(mesh, arguments, [P("d"), P()]))
    assert got.sharding.spec[0] == "d"
    assert_same(got, ragged(*arguments))


def test_rows_that_do_not_divide(rng):
    mesh = mesh_of(FOUR_BY_TWO)
    lhs, rhs = integers(rng, 62, K), integers(rng, G, K, N)

    def product(lhs, rhs):
        lhs = jax.lax.with_sharding_constraint(lhs, NamedSharding(mesh, P("d")))
        return ragged(lhs, rhs)

    both = with_gradients(product, 2)
    compiled = jax.jit(both).lower(*put(mesh, [lhs, rhs], [P(), P()])).compile()
    assert_same(compiled(lhs, rhs), jax.jit(with_gradients(ragged, 2))(lhs, rhs))


def test_axes_of_both_kinds(rng):
    mesh = mesh_of(FOUR_BY_TWO, (EXPLICIT, AUTO))
    arguments = [integers(rng, *shape) for shape in PRODUCT]
    both = with_gradients(ragged, 2)
    want = jax.jit(both)(*arguments)
    with jax.set_mesh(mesh):
        assert_same(jax.jit(both)(*put(mesh, arguments, [P("d"), P()])), want)
        assert_same(jax.jit(both)(*put(mesh, arguments, [P("d"), P(None, None, "e")])), want)


def test_auto_axes_within_explicit_ones(rng):
    mesh = mesh_of(EIGHT, EXPLICIT)
    arguments = [integers(rng, *shape) for shape in PRODUCT]
    with jax.set_mesh(mesh):
        run = jax.jit(jax.sharding.auto_axes(ragged, out_sharding=P("d", None)))
        split = put(mesh, arguments, [P("d"), P()])
        compiled = run.lower(*split).compile()
        assert_same(compiled(*split), ragged(*arguments))
    assert collectives(compiled) == []


@pytest.mark.parametrize("names", [{"d"}, {"d", "e"}])
def test_shard_map(names, rng):
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
def test_export(devices, rng):
    arguments = [integers(rng, *shape) for shape in PRODUCT]
    for kind in KINDS:
        mesh = mesh_of({"d": devices}, kind)
        with entered(mesh):
            split = put(mesh, arguments, [P("d"), P()])
            exported = export.export(jax.jit(ragged))(*split)
            called = export.deserialize(exported.serialize()).call
            assert_same(jax.jit(called)(*split), ragged(*arguments))


def test_without_shardy(rng):
    arguments = [integers(rng, *shape) for shape in PRODUCT]
    want = ragged(*arguments)
    split = put(mesh_of(EIGHT), arguments, [P("d"), P()])
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert_same(jax.jit(lambda *a: ragged(*a))(*split), want)
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def test_operands_without_a_mesh(rng):
    """On eight devices, an operand may have no mesh: for example, the index of an iteration."""
    arguments = [integers(rng, *shape) for shape in PRODUCT]
    everywhere = NamedSharding(mesh_of(EIGHT), P())
    run = jax.jit(lambda x: x + ragged(*arguments))
    zero = jax.device_put(np.zeros((M, N), np.float32), everywhere)
    assert_same(run(zero), ragged(*arguments))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_muon(kind, rng):
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
