"""JAX's transformations of FP8 layers of few tokens, whose kernels sort the tokens.

Values and derivatives are those of layers that sort rows in a separate operation.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.mlp.fp8.decode import call, primitive
from jax_grouped_gemm._src.mlp.fp8.decode.operands import Fp8DecodeOperands
from jax_grouped_gemm._src.mlp.fp8.decode.plan import Fp8DecodeProblem, plan_decode
from jax_grouped_gemm._src.mlp.fp8.layer import layer_of
from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, ExpertWeights
from tests.support.fp8_decode import (
    BF16,
    F32,
    TOP,
    D,
    E,
    T,
    decoded,
    is_decoded,
    layer,
    of_arrays,
    operands,
    sorted_before,
)
from tests.support.partition import EIGHT, EXPLICIT, KINDS, assert_same, entered, mesh_of, put

POWERS = jgg.Recipe(power_of_two_scales=True)


@pytest.mark.parametrize("recipe", [jgg.Recipe(), POWERS, jgg.Recipe(wgrad="bf16")])
def test_values(recipe, rng):
    given = operands(rng, recipe)
    run = functools.partial(layer, recipe=recipe)
    y = decoded(run, *given)
    assert_same(y, sorted_before(run, *given))
    assert (y.shape, y.dtype) == ((T, D), BF16) and np.asarray(y, np.float32).any()


def test_arrays_that_have_no_other_values(rng):
    x, logits, *matrices, _ = operands(rng)
    arrays = [jgg.quantize(w, "fp8_128x128", layout="rows") for w in matrices]
    y = decoded(of_arrays, x, logits, *arrays)
    assert_same(y, sorted_before(of_arrays, x, logits, *arrays))
    assert_same(y, decoded(layer, x, logits, *matrices, jgg.quantize_mlp(*matrices)))


def test_tokens_of_several_sequences(rng):
    given = x, logits, *weights = operands(rng)
    shaped = x.reshape(4, 3, D), logits.reshape(4, 3, E)
    assert_same(decoded(layer, *shaped, *weights), decoded(layer, *given).reshape(4, 3, D))


def test_no_row_of_experts_that_are_elsewhere(rng):
    """Padding tokens, and experts of other devices, contribute zeros."""
    x, logits, *weights = operands(rng)
    local = jax.tree.map(lambda w: w[2:5], weights)

    def part(x, logits, *weights):
        routing = moe.mask_tokens(moe.route(logits, TOP), jnp.arange(T) % 3 > 0)
        options = dict(recipe=jgg.Recipe(), quantized=weights[3], group_offset=jnp.int32(2))
        return moe.dropless_mlp(x, routing, *weights[:3], **options)

    y = decoded(part, x, logits, *local)
    assert_same(y, sorted_before(part, x, logits, *local))
    assert not np.asarray(y, np.float32)[::3].any() and np.asarray(y, np.float32).any()


@pytest.mark.parametrize("recipe", [jgg.Recipe(), jgg.Recipe(wgrad="bf16")])
def test_derivatives(recipe, rng):
    given = operands(rng, recipe)

    def loss(*given):
        return jnp.sum(jnp.sin(layer(*given, recipe=recipe).astype(F32)))

    of_sorted = jax.value_and_grad(loss, range(5))
    assert is_decoded(loss, *given) and not is_decoded(of_sorted, *given)
    got = jax.jit(lambda *given: of_sorted(*given))(*given)
    assert_same(got, sorted_before(of_sorted, *given))
    assert all(np.asarray(x, np.float32).any() for x in got[1])


def test_no_derivative_in_forward_mode(rng):
    given = operands(rng)

    def tangent(x, *rest):
        return jax.jvp(lambda x: layer(x, *rest), (x,), (jnp.cos(x),))

    messages = []
    for run in (lambda: jax.jit(tangent)(*given), lambda: sorted_before(tangent, *given)):
        with pytest.raises(TypeError) as found:
            run()
        messages.append(str(found.value))
    assert messages[0] == messages[1]


def test_rematerialised_in_a_scan(rng):
    x, logits, *weights = operands(rng)
    stacked = jax.tree.map(lambda w: jnp.stack([w, w]), weights)

    def loss(x, logits, *stacked, remat):
        def body(x, weights):
            return x + layer(x, logits, *weights), None

        return jnp.sum(jax.lax.scan(remat(body), x, stacked)[0].astype(F32))

    kept = functools.partial(loss, remat=lambda body: body)
    assert is_decoded(kept, x, logits, *stacked)
    want = jax.jit(jax.value_and_grad(kept, range(5)))(x, logits, *stacked)
    policy = jgg.checkpoint_policies.quantized_operands_saveable
    for remat in jax.checkpoint, functools.partial(jax.checkpoint, policy=policy):
        again = jax.value_and_grad(functools.partial(loss, remat=remat), range(5))
        assert_same(jax.jit(again)(x, logits, *stacked), want, 2**-6)


def test_vmap(rng):
    x, logits, *weights = operands(rng)
    several = jnp.stack([x, -x, 2 * x])
    mapped = jax.vmap(layer, (0, None, *[None] * 4))
    want = jnp.stack([decoded(layer, each, logits, *weights) for each in several])
    assert_same(jax.jit(mapped)(several, logits, *weights), want, 2**-6)


def test_batch_invariance(rng):
    """The layer of more tokens has the same bits for each token."""
    x, logits, *weights = operands(rng)
    run = functools.partial(layer, batch_invariant=True)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, logits, *weights))
    assert is_decoded(run, *shapes)
    (found,) = jgg.explain(run, *shapes).plans
    assert found.problem.op == "decode_fp8_mlp" and found.kernel.name == "quantizing_8x128"


def test_export(rng, extension):
    given = operands(rng)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    exported = export.export(
        jax.jit(layer), platforms=["cpu", "cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*shapes)
    assert call.TARGET in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    assert_same(again.call(*given), decoded(layer, *given))


def test_devices_with_their_own_experts(rng):
    x, logits, *weights = operands(rng)
    mesh = mesh_of(EIGHT)

    def part(x, logits, *weights):
        routing = moe.route(logits, TOP)
        options = dict(recipe=jgg.Recipe(), quantized=weights[3])
        offset = jax.lax.axis_index("d") * (E // 8)
        y = moe.dropless_mlp(x, routing, *weights[:3], group_offset=offset, **options)
        return jax.lax.psum(y.astype(F32), "d")

    of_experts = jax.tree.map(lambda _: P("d"), weights)
    run = jax.shard_map(part, mesh=mesh, in_specs=(P(), P(), *of_experts), out_specs=P())
    want = decoded(layer, x, logits, *weights)
    assert_same(decoded(run, x, logits, *weights), want, 2**-6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spec", [P(), P("d")], ids=["whole", "experts"])
def test_what_is_split(spec, kind, rng):
    """Experts that are split over explicit axes stay where they are: rows are sorted before."""
    given = operands(rng)
    want = decoded(layer, *given)
    mesh, (leaves, tree) = mesh_of(EIGHT, kind), jax.tree.flatten(given)
    run = functools.partial(layer, **({} if kind == EXPLICIT else dict(token_axes=())))
    with entered(mesh):
        split = tree.unflatten(put(mesh, leaves, [P(), P()] + [spec] * (len(leaves) - 2)))
        assert is_decoded(run, *split) == (kind != EXPLICIT or spec == P())
        assert_same(jax.jit(run)(*split), want, 2**-6)


def test_what_the_custom_call_gets(rng, monkeypatch):
    """A stand-in for the kernels computes only from operands and attributes of the call."""
    x, logits, wi_0, wi_1, wo, quantized = operands(rng, POWERS)
    routing = moe.route(logits, TOP)
    given = DecodeOperands(
        x,
        routing.experts,
        routing.weights,
        ExpertWeights(wi_0=wi_0, wi_1=wi_1, wo=wo),
        jnp.array([1], jnp.int32),
    )
    static = layer_of(
        POWERS,
        as_activation("swiglu_oai"),
        None,
        given.of_rows(E + 3),
        combines=True,
        has_values=False,
        has_quantized=True,
    )
    leaves, tree = jax.tree.flatten(Fp8DecodeOperands(given, quantized))
    params = dict(layer=static, num_experts=E + 3, implementation=None, tree=tree)
    found = plan_decode(Fp8DecodeProblem("decode_fp8_mlp", tree.unflatten(leaves), params), H200)
    want = primitive.sorted_mlp(tree.unflatten(leaves), E + 3, static)
    calls, rows = [], TOP * T

    def ffi_call(target, results):
        shapes = [(each.shape, np.dtype(each.dtype)) for each in results]
        assert shapes == [
            ((T, D), BF16),
            ((T, TOP), np.int32),
            ((rows, 512), BF16),
            ((rows, D), BF16),
        ]
        calls.append(target)

        def run(x, chosen, scores, offset, wi, wi_scales, wo, wo_scales, **attributes):
            names = "alpha", "cubic", "limit", "shift"
            assert {type(attributes[name]) for name in names} == {np.float32}
            numbers = [float(attributes.pop(name)) for name in names]
            assert numbers == pytest.approx([1.702, 0, 7, 1])
            assert attributes == dict(power_of_two=True, groups=E + 3)
            assert (chosen.dtype, scores.dtype) == (jnp.int32, F32)
            matrices = QuantizedMlp(
                quantized.wi._replace(values_t=wi, scales_t=wi_scales),
                quantized.wo._replace(values_t=wo, scales_t=wo_scales),
            )
            tokens = DecodeOperands(x, chosen, scores, given.experts, offset)
            y = primitive.sorted_mlp(Fp8DecodeOperands(tokens, matrices), E + 3, static)
            return [y, *[None] * 3]

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    assert_same(call.decode(found, *leaves), want)
    assert calls == ["jax_grouped_gemm.decode_fp8_mlp.v2"] and np.asarray(want, np.float32).any()
