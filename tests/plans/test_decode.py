"""Layers of few tokens: when their kernels sort rows, and why other layers sort rows before."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fallback import with_policy
from jax_grouped_gemm._src.invariance import RULE
from jax_grouped_gemm._src.mlp.decode import plan
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, ExpertWeights
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from tests.support import mlp
from tests.support.partition import EIGHT, mesh_of
from tests.support.plans import PLAIN, how

BF16, F32 = jnp.bfloat16, jnp.float32
EMBED, HIDDEN, EXPERTS = 256, 384, 32
PACKED = "mxfp4", "int4", "int8", "fp8", "fp8_128x128"
NAMES = {name: name for name in PACKED} | {"int4": "int4, groups of 128"}


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def matrices(*shape, format=None, **options):
    if format is None:
        return array(*shape)
    return jax.eval_shape(lambda w: jgg.quantize(w, format, **options), array(*shape))


def operands(
    tokens=4, top_k=2, experts=EXPERTS, hidden=HIDDEN, format=None, dtype=BF16, chosen=jnp.int32
):
    """Returns x, the three fields of a routing, and the matrices."""
    wi = matrices(experts, EMBED, hidden, format=format)
    return [
        array(tokens, EMBED, dtype=dtype),
        array(tokens, experts, dtype=F32),
        array(tokens, top_k, dtype=chosen),
        array(tokens, top_k, dtype=F32),
        wi,
        wi,
        matrices(experts, hidden, EMBED, format=format),
    ]


def layer(x, logits, chosen, scores, *weights, **options):
    return moe.dropless_mlp(x, moe.Routing(logits, chosen, scores), *weights, **options)


def plans(*given, **options):
    return jgg.explain(partial(layer, **options), *given).plans


def is_decoded(*given, **options):
    return [found.problem.op for found in plans(*given, **options)] == ["decode_mlp"]


@pytest.mark.parametrize("format", [None, *PACKED])
@pytest.mark.parametrize("tokens, top_k, few", [(128, 1, True), (129, 1, False), (43, 3, False)])
def test_so_many_pairs(tokens, top_k, few, format):
    assert is_decoded(*operands(tokens, top_k, format=format)) == few


@pytest.mark.parametrize("experts, few", [(512, True), (513, False)])
def test_so_many_experts(experts, few):
    assert is_decoded(*operands(experts=experts)) == few


@pytest.mark.parametrize("format", [None, "mxfp4"])
@pytest.mark.parametrize("tokens, few", [(64, True), (65, False)])
def test_so_many_rows_of_an_expert(tokens, few, format):
    """Kernels that sort take up to eight rows an expert on average, like other few-row kernels."""
    assert is_decoded(*operands(tokens, 1, experts=8, format=format)) == few


def explained(*given) -> list[str]:
    """Returns the lines of `explain`, without times and without the line that names the device."""
    _, *lines = str(jgg.explain(layer, *given)).splitlines()
    return [re.sub(r"(?<=predicted time) \S+ us", "", line.strip()) for line in lines]


def test_what_explain_says():
    assert explained(*operands()) == [
        "1. decode_mlp x bfloat16[4, 256], chosen int32[4, 2], scores float32[4, 2], "
        "wi_0 bfloat16[32, 256, 384], wi_1 bfloat16[32, 256, 384], wo bfloat16[32, 384, 256], "
        "32 groups",
        "kernel few_rows_32x128",
        "tile 32x128, cluster 1, workspace 0 bytes",
        "epilogue: silu(gate) * up * weights",
        "passed over: cooperative_128x256 (not faster)",
        "the kernels sort tokens by expert",
        "rows of tokens are read where they are",
        "workspace 0 bytes in all, 0 at a time",
    ]


@pytest.mark.parametrize("format", PACKED)
def test_what_explain_says_of_packed_matrices(format):
    (found,) = plans(*operands(format=format))
    assert found.workspace_bytes == max(of.workspace_bytes for of in found.packed) > 0
    assert explained(*operands(format=format)) == [
        "1. decode_mlp x bfloat16[4, 256], chosen int32[4, 2], scores float32[4, 2], "
        f"wi_0 {NAMES[format]}[32, 256, 384], wi_1 {NAMES[format]}[32, 256, 384], "
        f"wo {NAMES[format]}[32, 384, 256], 32 groups",
        "kernel streamed_16x128",
        f"tile 16x128, cluster 1, workspace {found.workspace_bytes} bytes",
        "epilogue: silu(gate) * up * weights",
        "the kernels sort tokens by expert",
        "gate and up: streamed_16x128, predicted time, bound by memory",
        "down: streamed_16x128, predicted time, bound by memory",
        "rows of tokens are read where they are",
        f"workspace {found.workspace_bytes} bytes in all, {found.workspace_bytes} at a time",
    ]


@pytest.mark.parametrize("format", [None, "mxfp4"])
@pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
def test_biases_and_activations(activation, format):
    biases = array(EXPERTS, HIDDEN), array(EXPERTS, HIDDEN, dtype=F32), array(EXPERTS, EMBED)

    def biased(*given):
        return layer(*given[:-3], biases=given[-3:], activation=activation)

    (found,) = jgg.explain(biased, *operands(format=format), *biases).plans
    assert found.problem.op == "decode_mlp" and how(found) == "kernel"
    assert re.search(r"epilogue: .+\(gate \+ b0\) \* \(up \+ b1\) \* weights\n", str(found))


def test_experts_without_an_up_projection():
    def run(x, logits, chosen, scores, gate, _, down):
        return layer(x, logits, chosen, scores, gate, None, down)

    (found,) = jgg.explain(run, *operands()).plans
    assert found.problem.op == "decode_mlp" and "silu(gate) * weights" in str(found)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_of_any_integers(dtype):
    (found,) = plans(*operands(chosen=dtype))
    assert "chosen int32[4, 2]" in str(found)


@pytest.mark.parametrize(
    "change, options",
    [
        ({}, dict(implementation="xla")),
        ({}, dict(implementation=jax.lax.ragged_dot)),
        ({}, dict(apply_router_weight_on_input=True)),
        ({}, dict(activation=jnp.tanh)),
        ({}, dict(precision="BF16_BF16_F32")),
        ({}, dict(recipe=jgg.Recipe())),
        (dict(dtype=F32), {}),
        (dict(hidden=388), {}),
        (dict(tokens=0), {}),
        (dict(format=PLAIN), {}),
        (dict(format="mxfp4"), dict(activation=jnp.tanh)),
        (dict(format="mxfp4", dtype=F32), {}),
        (dict(format="mxfp4"), dict(batch_invariant=True)),
    ],
)
def test_layers_that_sort_before(change, options):
    found = plans(*operands(**change), **options)
    assert "decode_mlp" not in {plan.problem.op for plan in found}


def test_batch_invariance_only_leaves_out_the_bias_of_down():
    """Batch-invariant layers sort rows before if down has a bias: XLA adds it to sorted rows."""
    b0 = array(EXPERTS, HIDDEN)

    def ops(*biases):
        def biased(*given):
            places = iter(given[7:])
            of = tuple(None if b is None else next(places) for b in biases)
            return layer(*given[:7], biases=of, batch_invariant=True)

        given = *operands(), *(b for b in biases if b is not None)
        return [found.problem.op for found in jgg.explain(biased, *given).plans]

    (found,) = plans(*operands(), batch_invariant=True)
    assert found.problem.op == "decode_mlp" and plan.SORTS in str(found) and RULE in str(found)
    assert ops(None, None, None) == ops(b0, b0, None) == ["decode_mlp"]
    assert "decode_mlp" not in ops(b0, b0, array(EXPERTS, EMBED))


def test_rows_of_another_tile_are_sorted_before():
    with jgg.use_tiles(forward=jgg.TileConfig(128, 256, 2)):
        assert not is_decoded(*operands())
    with jgg.use_tiles(forward=jgg.TileConfig(32, 128, 1)):
        assert is_decoded(*operands())


@pytest.mark.parametrize(
    "of_gate, of_down, decoded",
    [
        (dict(format="int4", group_size=32), dict(format="int4", group_size=32), True),
        (dict(format="int4", group_size=32), dict(format="int4", group_size=64), False),
        (dict(format="mxfp4"), dict(format="int8"), False),
        (dict(format="mxfp4"), {}, False),
        ({}, dict(format="mxfp4"), False),
    ],
    ids=str,
)
def test_matrices_are_packed_alike(of_gate, of_down, decoded):
    """All matrices have one format, because the custom call names only one."""
    wi = matrices(EXPERTS, EMBED, HIDDEN, **of_gate)
    wo = matrices(EXPERTS, HIDDEN, EMBED, **of_down)
    assert is_decoded(*operands()[:4], wi, wi, wo) == decoded


def test_gradients_are_those_of_sorted_rows():
    def loss(x, *rest):
        return jnp.sum(layer(x, *rest).astype(F32))

    found = jgg.explain(jax.grad(loss), *operands()).plans
    ops = [each.problem.op for each in found]
    assert ops[:2] == ["gated_ragged_dot", "biased_ragged_dot"] and "decode_mlp" not in ops
    assert all(each.kernel.schedule == "few_rows" for each in found[:2])


def reasoned(
    implementation=None, tokens=4, top_k=2, precision=None, joined=False, hidden=HIDDEN, **change
):
    """Returns the plan of `decode_mlp`, which layers themselves bind only if its kernels run."""
    x, logits, chosen, scores, *weights = operands(tokens, top_k, hidden=hidden, **change)
    experts = ExpertWeights(**dict(zip(("wi_0", "wi_1", "wo"), weights, strict=True)))
    if joined:
        wi = array(EXPERTS, EMBED, 2 * hidden)
        experts = ExpertWeights(wi=wi, wo=experts.wo)
    given = DecodeOperands(x, chosen, scores, experts, array(1, dtype=jnp.int32))
    options = Options.of(as_activation("silu"), precision, implementation)
    params = with_policy(dict(vars(options), num_experts=logits.shape[1]), per_row=True)
    return plan.plan_decode(MlpProblem("decode_mlp", given, params), H200)


def test_reasons():
    sizes = jax.export.symbolic_shape("t")
    for change, reason in (
        (dict(implementation="xla"), "implementation='xla' was asked for"),
        (dict(tokens=65), "more than 128 pairs, or more than 512 experts"),
        (dict(experts=513), "more than 128 pairs, or more than 512 experts"),
        (dict(tokens=sizes[0]), "sizes are unknown, or zero"),
        (dict(tokens=0), "sizes are unknown, or zero"),
        (dict(tokens=17, experts=4), "groups of this many rows have another kernel"),
        (dict(tokens=17, experts=4, format="int8"), "groups of this many rows have another kernel"),
        (dict(dtype=F32), "operands of bfloat16, got bfloat16 and float32"),
        (dict(hidden=388), "rows of wi_0 [32, 256, 388] are not a multiple of 16 bytes"),
        (dict(joined=True, hidden=388), "rows of the hidden layer are not a multiple of 16 bytes"),
        (dict(precision="BF16_BF16_F32"), "precision"),
        (dict(format=PLAIN), "no kernel for bfloat16 x int8_plain"),
    ):
        found = reasoned(**change)
        assert (found.kernel.name, reason in found.reason) == ("composed", True), (change, found)
    with jgg.batch_invariant():
        assert "batch invariance has other kernels" in reasoned(format="mxfp4").reason
        assert "gate and up in one matrix" in reasoned(joined=True, hidden=40).reason
        assert not reasoned().reason and not reasoned(joined=True).reason
    assert reasoned(joined=True).kernel.name == "few_rows_32x128"
    assert reasoned().kernel.name == "few_rows_32x128" and not reasoned().reason


def test_a_device_whose_columns_no_kernel_takes_sorts_before():
    """A device plans for its own columns. If no kernel takes these, it sorts rows before."""
    mesh = mesh_of(EIGHT)
    of_hidden = {4: (None, None, "d"), 5: (None, None, "d"), 6: (None, "d")}
    given = [
        jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=jax.NamedSharding(mesh, jax.P(*of_hidden.get(place, ()))),
        )
        for place, x in enumerate(operands(hidden=8 * 12))
    ]
    (found,) = plans(*given, token_axes=())
    assert (found.problem.op, how(found)) == ("decode_mlp", "composed")
    assert "rows of wi_0 [32, 256, 12] are not a multiple of 16 bytes" in found.reason
    ops = [product.problem.op for product in found.products]
    assert ops == ["gated_ragged_dot", "ragged_noncontracting"]
