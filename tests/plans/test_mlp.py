"""Plans for the MLPs of experts."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src import fallback
from jax_grouped_gemm.flax.linen import MoE
from tests.support import mlp
from tests.support.plans import how

BF16, F32 = jnp.bfloat16, jnp.float32


def shapes(m=512, embed=128, hidden=256, experts=4, dtype=BF16):
    """Returns x, wi_0, wi_1, wo and group sizes."""
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


@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
def test_fused(activation):
    plan = hidden_plan(*shapes(), activation=activation)
    assert (how(plan), plan.reason, plan.products) == ("kernel", "", ())
    assert plan.tile.sizes() == dict(tile_m=128, tile_n=256, cluster=2)
    assert "kernel cooperative_128x256" in str(plan) and "128x256" in str(plan)


@pytest.mark.parametrize(
    "hidden, options, gather",
    [
        (256, {}, "in place"),
        (136, dict(activation="swiglu_oai"), "in place"),
        (264, {}, "before"),
        (128, {}, "in place"),
        (8, {}, "in place"),
        (128, dict(activation="relu"), "before"),
        (256, dict(activation="relu"), "before"),
        (256, dict(biases=(jnp.ones((4, 256), BF16), None)), "before"),
    ],
)
def test_tokens_are_read_in_place(hidden, options, gather):
    """Rows are copied first for a wide hidden layer: reading rows without a token would be slow."""
    *arrays, _, sizes = shapes(m=64, hidden=hidden)
    run = partial(jgg.gated_ragged_dot, rows=jnp.zeros(512, jnp.int32), **options)
    (plan, *_) = (p for p in jgg.explain(run, *arrays, sizes).plans if "gated" in p.problem.op)
    assert (how(plan), plan.gather) == ("kernel", gather)
    words = {"in place": "where they are", "before": "by a kernel before"}
    assert f"rows of tokens are read {words[gather]}" in str(plan)


@pytest.mark.parametrize(
    "hidden, gather", [(264, "in place"), (2880, "in place"), (2888, "before")]
)
def test_layers_read_tokens_in_place(hidden, gather):
    x, *weights, _ = shapes(m=64, hidden=hidden)

    def layer(x, logits, *weights):
        return moe.dropless_mlp(x, moe.route(logits, 2), *weights)

    plans = jgg.explain(layer, x, jax.ShapeDtypeStruct((64, 4), F32), *weights).plans
    (plan,) = (p for p in plans if p.problem.op == "gated_ragged_dot")
    assert (how(plan), plan.gather) == ("kernel", gather)


def test_epilogues_are_named():
    plan = hidden_plan(*shapes(), activation="swiglu_oai")
    assert "silu[alpha=1.702, limit=7, up_offset=1](gate) * up" in str(plan)


def swish(gate):
    return gate * jax.nn.sigmoid(2 * gate)


@pytest.mark.parametrize(
    "change, options, reason",
    [
        ({}, dict(activation=swish), "no kernel has the activation swish"),
        ({}, dict(activation=moe.Activation(limit=7.0, limit_after=True)), "silu.*limit_after=1"),
        (
            {},
            dict(activation=moe.Activation(swish, limit=3.0)),
            r"activation swish\[limit=3\]",
        ),
        (dict(dtype=F32), {}, "operands of bfloat16, got float32"),
        (dict(dtype=jnp.float16), {}, "operands of bfloat16, got float16"),
        (dict(hidden=260), {}, r"rows of wi_0 \[4, 128, 260\] are not a multiple of 16 bytes"),
        (dict(embed=124), {}, r"rows of x \[512, 124\]"),
        (dict(m=0), {}, "nothing to multiply"),
        ({}, dict(precision="BF16_BF16_F32"), "precision"),
    ],
)
def test_unfused(change, options, reason):
    plan = hidden_plan(*shapes(**change), **options)
    assert how(plan) == "composed"
    assert re.search(reason, plan.reason)
    assert [p.problem.op for p in plan.products] == ["ragged_noncontracting"] * 2
    assert str(plan).count("- forward: ragged_noncontracting") == 2


@pytest.mark.parametrize(
    "dtype, options, reason",
    [
        (jnp.float16, {}, "operands of bfloat16, got float16"),
        (BF16, dict(activation=swish), "no kernel has the activation swish"),
        (BF16, dict(activation=moe.Activation(limit=7.0, limit_after=True)), "silu.*limit_after=1"),
        (BF16, dict(apply_router_weight_on_input=True), "weights multiply rows of x"),
        (BF16, dict(implementation="xla", activation=swish), ""),
        (BF16, {}, ""),
    ],
)
def test_layers_say_why_they_are_not_fused(dtype, options, reason):
    def layer(x, logits, wi, wo):
        return moe.dropless_mlp(x, moe.route(logits, 2), wi, wi, wo, **options)

    def of_flax(x):
        made = MoE(256, 4, 2, dtype=dtype, **options)
        params = jax.eval_shape(made.init, jax.random.key(0), x)
        return jgg.explain(made.apply, params, x)

    shapes = (512, 128), (4, 128, 256), (4, 256, 128)
    x, wi, wo = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    logits = jax.ShapeDtypeStruct((512, 4), F32)
    for found in (jgg.explain(layer, x, logits, wi, wo), of_flax(x)):
        first, *products = found.plans
        assert (first.problem.op == "expert_mlp") == bool(reason)
        if reason:
            assert "a layer of 1024 rows, D 128, F 256, 4 experts" in str(first)
            assert re.search(reason, first.reason)
            assert len(products) == 3


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_biases(dtype):
    x, wi_0, wi_1, wo, sizes = shapes()
    bias = jax.ShapeDtypeStruct((4, 256), dtype)

    def run(x, wi_0, wi_1, sizes, bias):
        return jgg.gated_ragged_dot(x, wi_0, wi_1, sizes, biases=(bias, None))

    (plan,) = jgg.explain(run, x, wi_0, wi_1, sizes, bias).plans
    assert how(plan) == "kernel" and "silu(gate + b0) * up" in str(plan)


def test_experts_without_an_up_projection():
    x, wi_0, _, _, sizes = shapes()
    run = partial(jgg.gated_ragged_dot, activation="relu2")
    (plan,) = jgg.explain(lambda x, w, s: run(x, w, None, s), x, wi_0, sizes).plans
    assert how(plan) == "kernel" and "epilogue: relu2(gate)" in str(plan)


def test_gate_and_up_in_one_matrix():
    x, wi, _, wo, sizes = shapes(hidden=512)
    wo = jax.ShapeDtypeStruct((4, 256, 128), BF16)
    up, _ = jgg.explain(
        lambda x, w, wo, s: jgg.ragged_mlp(x, w, None, wo, s), x, wi, wo, sizes
    ).plans
    assert how(up) == "kernel" and "wi bfloat16[4, 128, 512]" in str(up)
    run = partial(jgg.gated_ragged_dot, concatenated=True)
    x, wi, _, _, sizes = shapes(hidden=2 * 72)
    (plan,) = jgg.explain(lambda x, w, s: run(x, w, None, s), x, wi, sizes).plans
    assert (how(plan), len(plan.products)) == ("composed", 1) and "multiple of 64" in plan.reason


@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
def test_gradients_of_every_named_activation_are_fused(activation):
    plans = plans_of_gradient(*shapes(), activation=activation).plans
    up, transpose = (p for p in plans if p.problem.op.startswith("gated"))
    assert how(up) == how(transpose) == "kernel"


def test_gradients_that_no_kernel_has():
    plans = plans_of_gradient(*shapes(), activation=swish).plans
    up, transpose = (p for p in plans if p.problem.op.startswith("gated"))
    assert how(up) == how(transpose) == "composed"
    assert "no kernel has the activation swish" in transpose.reason


def test_gradients_without_an_up_projection():
    x, wi_0, _, wo, sizes = shapes()

    def loss(x, wi_0, wo):
        y = jgg.ragged_mlp(x, wi_0, None, wo, jnp.zeros(4, jnp.int32), activation="relu2")
        return jnp.sum(y.astype(F32))

    plans = jgg.explain(jax.grad(loss, (0, 1, 2)), x, wi_0, wo).plans
    (plan,) = (p for p in plans if p.problem.op == "gated_ragged_dot_transpose")
    assert how(plan) == "kernel"
    assert "epilogue: gradients of gate and weights, relu2(gate) again" in str(plan)


def test_the_products_of_a_gradient():
    plans = plans_of_gradient(*shapes(m=8192)).plans
    assert [p.problem.op for p in plans] == [
        "gated_ragged_dot",
        "ragged_noncontracting",
        "gated_ragged_dot_transpose",
        "ragged_contracting",
        "paired_ragged_dot",
        "paired_weight_gradients",
    ]
    assert all(how(p) == "kernel" for p in plans)


@pytest.mark.parametrize(
    "experts, hidden, gather",
    [
        (4, 256, "in place"),
        (4, 768, "in place"),
        (32, 768, "in place"),
        (32, 776, "before"),
    ],
)
def test_weight_gradients_read_tokens_in_place(experts, hidden, gather):
    """The limit of the columns is the same for groups of many rows and of few."""

    def loss(*operands, **options):
        return jnp.sum(jgg.ragged_mlp(*operands, **options).astype(F32))

    rows = jnp.zeros(8192, jnp.int32)
    gradient = jax.grad(partial(loss, rows=rows), (1, 2))
    *_, plan = jgg.explain(gradient, *shapes(m=1024, hidden=hidden, experts=experts)).plans
    assert (plan.problem.op, how(plan), plan.gather) == (
        "paired_weight_gradients",
        "kernel",
        gather,
    )
    assert plan.workspace_bytes > 2**20  # for sums of pieces of cut tiles


@pytest.mark.parametrize(
    "hidden, of_both, of_down",
    [(104, 256, 128), (128, 256, 128), (136, 192, 192), (192, 192, 192), (200, 256, 256)],
)
def test_tiles_of_weight_gradients_fit_narrow_experts(hidden, of_both, of_down):
    """Tiles fit the columns if no tile is asked for."""
    x, w, down = (
        jax.ShapeDtypeStruct(s, BF16) for s in ((1024, 512), (4, 512, hidden), (4, hidden, 512))
    )
    logits = jax.ShapeDtypeStruct((1024, 4), F32)

    def loss(x, logits, *matrices):
        return jnp.sum(moe.dropless_mlp(x, moe.route(logits, 2), *matrices).astype(F32))

    def tiles():
        plans = jgg.explain(jax.grad(loss, (2, 3, 4)), x, logits, w, w, down).plans
        found = {plan.problem.op: plan for plan in plans}
        ops = ("paired_weight_gradients", "down_weight_gradient")
        return [found[op].kernel.tile.tile_n for op in ops]

    assert tiles() == [of_both, of_down]
    with jgg.use_tiles(wgrad=jgg.TileConfig(tile_m=128, tile_n=256, cluster=2)):
        assert tiles() == [256, 256]


@pytest.mark.parametrize(
    "hidden, dtype, wgrad, ops",
    [
        (256, BF16, "fp8", {"scaled_ragged_contracting": 1, "paired_scaled_contracting": 1}),
        (264, BF16, "fp8", {"scaled_ragged_contracting": 3}),
        (256, F32, "fp8", {"scaled_ragged_contracting": 3}),
        (256, BF16, "bf16", {"ragged_contracting": 3}),
    ],
    ids=["narrow", "wide", "float32", "bf16"],
)
def test_fp8_weight_gradients_of_gate_and_up(hidden, dtype, wgrad, ops):
    """Gradients of gate and up share a launch if experts are narrow and results have 16 bits."""
    recipe = jgg.Recipe.blockwise(wgrad=wgrad)
    arrays = shapes(m=8192, hidden=hidden, dtype=dtype)
    plans = plans_of_gradient(*arrays, recipe=recipe).plans
    assert Counter(p.problem.op for p in plans if "contracting" in p.problem.op.split("_")) == ops
    assert not any("quantize" in p.problem.op for p in plans)  # quantisers do not multiply


def test_weight_gradients_of_wide_experts_are_two_products():
    plans = plans_of_gradient(*shapes(m=8192, hidden=2056)).plans
    assert [(p.problem.op, how(p)) for p in plans[-2:]] == [("ragged_contracting", "kernel")] * 2


@pytest.mark.plans_as_users_get_them
def test_weight_gradients_are_two_products_where_xlas_are_faster():
    arrays = shapes(m=64, embed=256)
    *_, plan = plans_of_gradient(*arrays).plans
    assert (plan.problem.op, how(plan)) == ("paired_weight_gradients", "composed")
    assert "XLA's products of all rows" in plan.reason
    assert [how(product) for product in plan.products] == ["xla_all_rows"] * 2
    with fallback.policy("kernels"):
        *_, plan = plans_of_gradient(*arrays).plans
    assert (plan.problem.op, how(plan)) == ("paired_weight_gradients", "kernel")


@pytest.mark.plans_as_users_get_them
def test_the_weight_gradient_of_wo_is_composed_where_xlas_is_faster():
    """XLA's product is faster here, although the kernel would read rows of dy in place."""

    def loss(x, logits, *weights):
        y = moe.dropless_mlp(x, moe.route(logits, 1), *weights)
        return jnp.sum(y.astype(F32))

    x, *weights, _ = shapes(m=1024, embed=512, hidden=128, experts=1)
    logits = jax.ShapeDtypeStruct((1024, 1), F32)
    plans = jgg.explain(jax.grad(loss, (2, 3, 4)), x, logits, *weights).plans
    (plan,) = (p for p in plans if p.problem.op == "down_weight_gradient")
    assert how(plan) == "composed" and "XLA's products of all rows" in plan.reason


def test_the_weight_gradient_of_one_matrix_is_a_product():
    def loss(x, wi_0, wi_1, wo, sizes):
        return jnp.sum(jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes).astype(F32))

    *_, plan = jgg.explain(jax.grad(loss, 1), *shapes(m=8192)).plans
    assert (plan.problem.op, how(plan)) == ("ragged_contracting", "kernel")


def test_gradients_of_float32_are_composed():
    plans = plans_of_gradient(*shapes(dtype=F32)).plans
    composed = [p for p in plans if isinstance(p, jgg.MlpPlan)]
    assert [(how(p), len(p.products)) for p in composed] == [
        ("composed", 2),
        ("composed", 1),
        ("composed", 2),
    ]


def test_tangents():
    arrays = shapes()

    def tangent(*arrays):
        *factors, sizes = arrays
        return jax.jvp(lambda *f: jgg.ragged_mlp(*f, sizes), factors, factors)[1]

    *_, plan = jgg.explain(tangent, *arrays).plans
    assert (plan.problem.op, how(plan), len(plan.products)) == ("ragged_mlp_tangent", "composed", 6)


def test_the_reference():
    plan = hidden_plan(*shapes(), implementation="xla")
    assert how(plan) == "xla"
    assert {how(p) for p in plan.products} == {"xla"}


def test_chosen_tiles_are_those_of_the_products():
    tile = jgg.TileConfig(tile_m=128, tile_n=256, cluster=2, stream_k=True)
    with jgg.use_tiles(forward=tile):
        plans = plans_of_gradient(*shapes()).plans
        composed = hidden_plan(*shapes(), activation=swish)
    down = next(p for p in plans if not isinstance(p, jgg.MlpPlan))
    assert down.tile == tile
    assert {p.tile for p in composed.products} == {tile}
