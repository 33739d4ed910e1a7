"""FP8 layers of few tokens: when kernels sort rows, and why other layers sort rows before."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8.choice import Choice
from jax_grouped_gemm._src.invariance import RULE
from jax_grouped_gemm._src.mlp.fp8.decode.operands import Fp8DecodeOperands
from jax_grouped_gemm._src.mlp.fp8.decode.plan import Fp8DecodeProblem, plan_decode
from jax_grouped_gemm._src.mlp.fp8.layer import layer_of
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, ExpertWeights
from tests.support import mlp

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EMBED, HIDDEN, EXPERTS = 256, 384, 32
E5M2 = jgg.Recipe(forward_dtype=jnp.float8_e5m2)


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(tokens=4, top_k=2, experts=EXPERTS, embed=EMBED, hidden=HIDDEN, dtype=BF16):
    """Returns x, the three fields of a routing, and the matrices."""
    wi = array(experts, embed, hidden, dtype=dtype)
    return [
        array(tokens, embed, dtype=dtype),
        array(tokens, experts, dtype=F32),
        array(tokens, top_k, dtype=jnp.int32),
        array(tokens, top_k, dtype=F32),
        wi,
        wi,
        array(experts, hidden, embed, dtype=dtype),
    ]


def plans(*given, recipe=None, has_up=True, **options):
    """Returns the plans of a layer whose matrices are quantised before the call."""
    recipe = recipe or jgg.Recipe()
    x, *routing, gate, up, down = given
    matrices = gate, up if has_up else None, down
    quantized = jax.eval_shape(partial(jgg.quantize_mlp, recipe=recipe), *matrices)

    def layer(x, routing, matrices, quantized):
        options_of = dict(options, recipe=recipe, quantized=quantized)
        return moe.dropless_mlp(x, moe.Routing(*routing), *matrices, **options_of)

    return jgg.explain(layer, x, tuple(routing), matrices, quantized).plans


def ops(*given, **options):
    return [found.problem.op for found in plans(*given, **options)]


def is_decoded(*given, **options):
    return ops(*given, **options) == ["decode_fp8_mlp"]


@pytest.mark.parametrize("tokens, top_k, few", [(128, 1, True), (129, 1, False), (43, 3, False)])
def test_so_many_pairs(tokens, top_k, few):
    assert is_decoded(*operands(tokens, top_k, experts=128)) == few


@pytest.mark.parametrize("experts, few", [(512, True), (513, False)])
def test_so_many_experts(experts, few):
    assert is_decoded(*operands(experts=experts)) == few


@pytest.mark.parametrize("tokens, few", [(6, True), (7, False)])
def test_so_many_rows_of_an_expert(tokens, few):
    """Each row is quantised again for each tile of columns, which pays up to 1.5 rows an expert."""
    assert is_decoded(*operands(tokens, 1, experts=4)) == few


def test_what_explain_says():
    (found,) = plans(*operands())
    lines = [re.sub(r"(?<=predicted time) \S+ us", "", x.strip()) for x in str(found).split("\n")]
    assert lines == [
        "decode_fp8_mlp x bfloat16[4, 256], chosen int32[4, 2], scores float32[4, 2], "
        "wi float8_e4m3fn[32, 768, 256], wo float8_e4m3fn[32, 256, 384], 32 groups",
        "kernel quantizing_8x128",
        "tile 8x128, cluster 1, workspace 0 bytes",
        "epilogue: silu(gate) * up * weights, in the product of down",
        "the kernels sort tokens by expert, and quantise the rows that they read",
        "gate and up: predicted time, bound by memory",
        "down: predicted time, bound by the tensor cores",
    ]


@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
def test_activations(activation):
    """The kernel of hidden multiplies by sigmoids only."""
    assert is_decoded(*operands(), activation=activation) == (activation in mlp.FUSED)


@pytest.mark.parametrize(
    "change, options",
    [
        ({}, dict(implementation="xla")),
        ({}, dict(apply_router_weight_on_input=True)),
        ({}, dict(activation=jnp.tanh)),
        ({}, dict(has_up=False)),
        ({}, dict(recipe=E5M2)),
        (dict(dtype=F16), {}),
        (dict(dtype=F32), {}),
        (dict(hidden=392), {}),
        (dict(embed=264), {}),
        (dict(tokens=0), {}),
    ],
)
def test_layers_that_sort_before(change, options):
    assert "decode_fp8_mlp" not in ops(*operands(**change), **options)


@pytest.mark.parametrize("tile", [(128, 256, 2), (32, 128, 1)])
def test_rows_of_a_tile_that_is_asked_for_are_sorted_before(tile):
    with jgg.use_tiles(forward=jgg.TileConfig(*tile)):
        assert not is_decoded(*operands())
    with jgg.use_tiles(wgrad=jgg.TileConfig(128, 256, 2)):
        assert is_decoded(*operands())


def test_weights_that_are_not_quantised_are_sorted_before():
    def layer(x, *rest):
        routing = moe.Routing(*rest[:3])
        return moe.dropless_mlp(x, routing, *rest[3:], recipe=jgg.Recipe(), implementation="cuda")

    found = jgg.explain(layer, *operands()).plans
    assert "decode_fp8_mlp" not in {plan.problem.op for plan in found}


def test_batch_invariance():
    (found,) = plans(*operands(), batch_invariant=True)
    assert found.problem.op == "decode_fp8_mlp" and RULE in str(found)


def reasoned(
    implementation=None, recipe=None, activation="silu", *, alone=None, biased=False, **change
):
    """Returns the plan of `decode_fp8_mlp`, which layers bind only if its kernels run."""
    recipe = recipe or jgg.Recipe()
    x, logits, chosen, scores, *weights = operands(**change)
    experts = ExpertWeights(**dict(zip(("wi_0", "wi_1", "wo"), weights, strict=True)))
    if biased:
        experts = ExpertWeights(**vars(experts) | dict(b0=array(EXPERTS, HIDDEN)))
    given = DecodeOperands(x, chosen, scores, experts, array(1, dtype=jnp.int32))
    quantized = jax.eval_shape(partial(jgg.quantize_mlp, recipe=recipe), *weights)
    static = layer_of(
        recipe,
        as_activation(activation),
        implementation,
        given.of_rows(logits.shape[1]),
        combines=True,
        has_values=False,
        has_quantized=True,
    )
    static = dataclasses.replace(static, alone=alone)
    params = dict(layer=static, num_experts=logits.shape[1], implementation=implementation)
    operands_of = Fp8DecodeOperands(given, quantized)
    return plan_decode(Fp8DecodeProblem("decode_fp8_mlp", operands_of, params), H200)


def test_reasons():
    (tokens,) = jax.export.symbolic_shape("t")
    another = "groups of this many rows, or rows of this length, have another kernel"
    for change, reason in (
        (dict(implementation="xla"), "implementation='xla' was asked for"),
        (dict(tokens=65), "more than 128 pairs, or more than 512 experts"),
        (dict(experts=513), "more than 128 pairs, or more than 512 experts"),
        (dict(tokens=tokens), "sizes are unknown, or zero"),
        (dict(tokens=0), "sizes are unknown, or zero"),
        (dict(alone=Choice(None, None, training=False)), "bf16 is predicted to be faster"),
        (dict(biased=True), "the kernels add no biases"),
        (dict(dtype=F32), "the kernels take tokens of bfloat16, and return bfloat16"),
        (dict(activation="relu"), "no kernel has the activation relu"),
        (dict(tokens=33, experts=4), another),
        (dict(experts=4), "experts have more than 1.5 rows on average"),
        (dict(hidden=392), another),
        (dict(embed=264), another),
        (dict(recipe=E5M2), another),
    ):
        found = reasoned(**change)
        assert (found.kernel.name, reason in found.reason) == ("composed", True), (change, found)
    assert reasoned().kernel.name == "quantizing_8x128" and not reasoned().reason


def test_gradients_are_those_of_sorted_rows():
    x, *routing, gate, up, down = operands()
    quantized = jax.eval_shape(jgg.quantize_mlp, gate, up, down)

    def loss(x, routing, matrices, quantized):
        options = dict(recipe=jgg.Recipe(), quantized=quantized)
        y = moe.dropless_mlp(x, moe.Routing(*routing), *matrices, **options)
        return jnp.sum(y.astype(F32))

    found = jgg.explain(jax.grad(loss), x, tuple(routing), (gate, up, down), quantized).plans
    assert "decode_fp8_mlp" not in {plan.problem.op for plan in found}
