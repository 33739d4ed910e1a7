"""What plans say of the MLPs of experts."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import mlp

BF16, F32 = jnp.bfloat16, jnp.float32


def shapes(m=512, embed=128, hidden=256, experts=4, dtype=BF16):
    """x, wi_0, wi_1, wo and group sizes."""
    struct = jax.ShapeDtypeStruct
    return (
        struct((m, embed), dtype),
        struct((experts, embed, hidden), dtype),
        struct((experts, embed, hidden), dtype),
        struct((experts, hidden, embed), dtype),
        struct((experts,), jnp.int32),
    )


def hidden_plan(*arrays, **options) -> jgg.MlpPlan:
    x, wi_0, wi_1, _, sizes = arrays
    (plan,) = jgg.explain(partial(jgg.gated_ragged_dot, **options), x, wi_0, wi_1, sizes).plans
    return plan


def plans_of_gradient(*arrays, **options):
    def loss(x, wi_0, wi_1, wo, sizes):
        return jnp.sum(jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, **options).astype(F32))

    return jgg.explain(jax.grad(loss, (0, 1, 2, 3)), *arrays)


@pytest.mark.parametrize("activation", mlp.FUSED)
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_fused(activation, dtype):
    plan = hidden_plan(*shapes(dtype=dtype), activation=activation)
    assert (plan.path, plan.reason, plan.products) == ("fused", "", ())
    assert plan.tile.sizes() == dict(tile_m=128, tile_n=256, cluster=2)
    assert "path fused" in str(plan) and "128x256" in str(plan)


def test_epilogues_are_named():
    plan = hidden_plan(*shapes(), activation="swiglu_oai")
    assert "silu[alpha=1.702, limit=7, up_offset=1](gate) * up" in str(plan)


def swish(gate):
    return gate * jax.nn.sigmoid(2 * gate)


@pytest.mark.parametrize(
    "change, options, reason",
    [
        ({}, dict(activation="gelu"), "no kernel has the activation gelu"),
        ({}, dict(activation="relu"), "no kernel has the activation relu"),
        ({}, dict(activation=swish), "no kernel has the activation swish"),
        (
            {},
            dict(activation=moe.Activation("relu2", limit=3.0)),
            r"activation relu2\[limit=3\]",
        ),
        (dict(dtype=F32), {}, "one dtype, bfloat16 or float16, got float32"),
        (dict(hidden=260), {}, r"rows of wi_0 \[4, 128, 260\] are not a multiple of 16 bytes"),
        (dict(embed=124), {}, r"rows of x \[512, 124\]"),
        (dict(m=0), {}, "nothing to multiply"),
        ({}, dict(precision="BF16_BF16_F32"), "precision"),
    ],
)
def test_unfused(change, options, reason):
    plan = hidden_plan(*shapes(**change), **options)
    assert plan.path == "unfused"
    assert re.search(reason, plan.reason)
    assert [p.problem.op for p in plan.products] == ["ragged_noncontracting"] * 2
    assert str(plan).count("- forward: ragged_noncontracting") == 2


def test_biases_and_experts_without_a_gate():
    x, wi_0, wi_1, wo, sizes = shapes()
    bias = jax.ShapeDtypeStruct((4, 256), BF16)

    def with_bias(x, wi_0, wi_1, sizes, bias):
        return jgg.gated_ragged_dot(x, wi_0, wi_1, sizes, biases=(bias, None))

    (plan,) = jgg.explain(with_bias, x, wi_0, wi_1, sizes, bias).plans
    assert (plan.path, len(plan.products)) == ("unfused", 2) and "biases" in plan.reason
    alone = jgg.explain(lambda x, w, s: jgg.gated_ragged_dot(x, w, None, s), x, wi_0, sizes)
    (plan,) = alone.plans
    assert (plan.path, len(plan.products)) == ("unfused", 1) and "wi_1" in plan.reason


def test_the_seven_products_of_a_gradient():
    plans = plans_of_gradient(*shapes()).plans
    assert [getattr(p, "op", None) or p.problem.op for p in plans] == [
        "gated_ragged_dot",
        "ragged_noncontracting",
        "gated_ragged_dot_transpose",
        "ragged_contracting",
        "ragged_contracting",
        "ragged_contracting",
        "paired_ragged_dot",
    ]
    assert all(p.path in ("fused", "tma") for p in plans)


def test_gradients_of_float32_are_composed():
    plans = plans_of_gradient(*shapes(dtype=F32)).plans
    composed = [p for p in plans if isinstance(p, jgg.MlpPlan)]
    assert [(p.path, len(p.products)) for p in composed] == [
        ("unfused", 2),
        ("unfused", 1),
        ("unfused", 2),
    ]


def test_tangents():
    arrays = shapes()

    def tangent(*arrays):
        *factors, sizes = arrays
        return jax.jvp(lambda *f: jgg.ragged_mlp(*f, sizes), factors, factors)[1]

    *_, plan = jgg.explain(tangent, *arrays).plans
    assert (plan.op, plan.path, len(plan.products)) == ("ragged_mlp_tangent", "unfused", 6)


def test_the_reference():
    plan = hidden_plan(*shapes(), implementation="reference")
    assert plan.path == "reference"
    assert {p.path for p in plan.products} == {"reference"}


def test_chosen_tiles_are_those_of_the_products():
    tile = jgg.TileConfig(tile_m=128, tile_n=256, cluster=2, stream_k=True)
    with jgg.use_tiles(forward=tile):
        plans = plans_of_gradient(*shapes()).plans
        composed = hidden_plan(*shapes(), activation="gelu")
    down = next(p for p in plans if isinstance(p, jgg.Plan))
    assert down.tile == tile
    assert {p.tile for p in composed.products} == {tile}
