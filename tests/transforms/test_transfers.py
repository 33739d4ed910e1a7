"""`explain` of sharded operands: which arrays travel, their bytes, and each device's work."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support.partition import AUTO, EIGHT, EXPLICIT, KINDS, entered, mesh_of

M, K, N, G = 4096, 512, 256, 16
SIZES = jax.ShapeDtypeStruct((G,), jnp.int32)
PRODUCT = [(M, K), (G, K, N)]
LAYER = [(M, K), (M, G), (G, K, N), (G, K, N), (G, N, K)]
MATRIX = G * K * N * 2  # bytes


def split(mesh, shapes, specs, dtype=jnp.bfloat16):
    return [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]


def loss(lhs, rhs, sizes):
    return jnp.sum(jgg.ragged_dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)


def layer(x, logits, *matrices):
    return moe.dropless_mlp(x, moe.route(logits, 2), *matrices)


def of_layer(function, mesh, *specs, tokens=M):
    """Returns the transfers of a function of a layer's operands, according to `explain`."""
    with entered(mesh):
        shapes = [(tokens, K), (tokens, G), *LAYER[2:]]
        return jgg.explain(function, *split(mesh, shapes, specs)).transfers


@pytest.mark.parametrize("kind", KINDS, ids=str)
class TestOperation:
    def explain(self, kind, function, *specs):
        mesh = mesh_of(EIGHT, kind)
        with entered(mesh):
            return jgg.explain(function, *split(mesh, PRODUCT, specs), SIZES)

    def test_plans_are_those_of_a_device(self, kind):
        found = self.explain(kind, jax.grad(loss, (0, 1)), P("d"), P())
        assert {str(plan).count(f"bfloat16[{M // 8}, ") for plan in found.plans} == {2}
        assert not re.search(rf"\[{M}, ", str(found))

    def test_sums(self, kind):
        found = self.explain(kind, jax.grad(loss, (0, 1)), P("d"), P())
        (transfer,) = found.transfers
        assert (transfer.kind, transfer.bytes, transfer.devices) == ("sums", MATRIX, 8)
        line = f"ragged_contracting sums {MATRIX / 1e6:.3g} MB over 8 devices: bfloat16"
        assert f"\n{line}[{G}, {K}, {N}]\n" in str(found)
        assert str(found).endswith(f"each device sums {MATRIX / 1e6:.3g} MB in all")

    def test_gathers(self, kind):
        found = self.explain(kind, jgg.ragged_dot, P("d"), P(None, "d"))
        (transfer,) = found.transfers
        assert (transfer.kind, transfer.bytes, transfer.instead) == ("gathers", MATRIX, "")
        line = f"ragged_noncontracting gathers {MATRIX / 1e6:.3g} MB on each device: operand 1, "
        assert line + f"bfloat16[{G}, {K}, {N}]\n" in str(found)

    def test_nothing(self, kind):
        found = self.explain(kind, jgg.ragged_dot, P("d"), P())
        assert found.transfers == () and "each device" not in str(found)
        assert "computes all of it" not in str(found)


class TestLayer:
    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_fsdp(self, kind):
        specs = [P("d"), P("d"), *[P(None, "d")] * 3]
        found = of_layer(layer, mesh_of(EIGHT, kind), *specs)
        assert [(t.kind, t.bytes, t.devices) for t in found] == [("gathers", MATRIX, 8)] * 3

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_weight_gradients(self, kind):
        def of(*operands):
            return jnp.sum(layer(*operands).astype(jnp.float32) ** 2)

        specs = [P("d"), P("d"), P(), P(), P()]
        found = of_layer(jax.grad(of, (2, 3, 4)), mesh_of(EIGHT, kind), *specs)
        assert [(t.kind, t.bytes, t.devices) for t in found] == [("sums", MATRIX, 8)] * 3

    def test_within_what_was_traced_before(self):
        """`explain` finds transfers in loops and checkpoints, and in functions traced before."""

        @jax.jit
        def body(x, logits, *matrices):
            def step(x, _):
                return x + jax.checkpoint(layer)(x, logits, *matrices), None

            return jnp.sum(jax.lax.scan(step, x, length=2)[0].astype(jnp.float32))

        mesh, specs = mesh_of(EIGHT), [P("d"), P("d"), *[P(None, "d")] * 3]
        body.lower(*split(mesh, LAYER, specs))
        found = of_layer(jax.grad(body), mesh, *specs)
        assert {(t.op, t.kind, t.bytes) for t in found} >= {("dropless_mlp", "gathers", MATRIX)}

    def test_few_tokens_stay_whole(self):
        mesh = mesh_of(EIGHT)
        operands = split(mesh, [(2, K), (2, G), *LAYER[2:]], [P()] * 5)
        found = jgg.explain(layer, *operands)
        assert found.transfers == ()
        assert all("each of 8 devices computes all of it" in str(plan) for plan in found.plans)


def test_what_cannot_be_split_names_what_to_use():
    mesh = mesh_of(EIGHT)
    (experts,) = split(mesh, [(M, 2)], [P("d")], jnp.int32)
    found = jgg.explain(lambda experts: moe.sort_by_expert(experts, G), experts)
    (transfer,) = found.transfers
    assert (transfer.op, transfer.bytes) == ("sort_by_expert", M * 2 * 4)
    assert "not so with moe.dropless_mlp" in str(found)


def test_reshard_over_explicit_axes():
    mesh = mesh_of(EIGHT, EXPLICIT)
    with jax.set_mesh(mesh):
        operands = split(mesh, PRODUCT, [P("d"), P()])
        found = jgg.explain(
            lambda lhs, rhs, sizes: jgg.ragged_dot(jax.sharding.reshard(lhs, P()), rhs, sizes),
            *(*operands, SIZES),
        )
    assert [(t.kind, t.bytes) for t in found.transfers] == [("gathers", M * K * 2)]


def test_arrays_on_devices(rng):
    sharding = NamedSharding(mesh_of(EIGHT), P("d"))
    lhs = jax.device_put(np.ones((64, 16), np.float32), sharding)
    rhs, sizes = np.ones((2, 16, 8), np.float32), np.array([30, 34])
    (plan,) = jgg.explain(jgg.ragged_dot, lhs, rhs, sizes).plans
    assert "float32[8, 16]" in str(plan)
    assert jgg.ragged_dot(lhs, rhs, sizes)[0, 0] == 16  # `explain` left no placeholder in a cache


def test_implementations_that_this_machine_has_not():
    """`explain` lowers placeholders, so this machine need not support the implementation."""
    operands = split(mesh_of(EIGHT, AUTO), PRODUCT, [P("d"), P()])
    found = jgg.explain(lambda *a: jgg.ragged_dot(*a, implementation="cuda"), *operands, SIZES)
    assert f"bfloat16[{M // 8}, " in str(found)
