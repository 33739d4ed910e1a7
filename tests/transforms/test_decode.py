"""JAX's transformations of layers of few tokens, whose kernels sort the tokens themselves.

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
from jax_grouped_gemm._src.mlp.decode import call, plan
from jax_grouped_gemm._src.mlp.decode import primitive as decode
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, ExpertWeights
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from tests.support.decode import Decoding
from tests.support.partition import (
    AUTO,
    EIGHT,
    EXPLICIT,
    FOUR_BY_TWO,
    KINDS,
    SUM,
    assert_same,
    collectives,
    entered,
    mesh_of,
    put,
)

BF16, F32 = jnp.bfloat16, jnp.float32
T, D, F, E, TOP = 24, 128, 64, 8, 2
FORMATS = pytest.mark.parametrize("format", [None, "mxfp4"])
CLOSE = 2**-6  # a sum over devices is rounded again


def operands(rng, format=None):
    """Returns tokens, logits, the three matrices and their biases."""

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, BF16)

    def matrices(*shape):
        return draw(*shape) if format is None else jgg.quantize(draw(*shape), format)

    weights = matrices(E, D, F), matrices(E, D, F), matrices(E, F, D)
    logits = jnp.asarray(rng.standard_normal((T, E)), F32)
    return [draw(T, D), logits, *weights, draw(E, F), draw(E, F), draw(E, D)]


def layer(x, logits, wi_0, wi_1, wo, *biases, **options):
    return moe.dropless_mlp(
        x, moe.route(logits, TOP), wi_0, wi_1, wo, biases=biases or None, **options
    )


DECODING = Decoding("decode_mlp")
is_decoded, decoded, sorted_before = (
    DECODING.is_decoded,
    DECODING.decoded,
    DECODING.sorted_before,
)


@pytest.mark.parametrize("format", [None, "mxfp4", "int4", "int8", "fp8", "fp8_128x128"])
def test_values(format, rng):
    given = operands(rng, format)
    y = decoded(layer, *given)
    assert_same(y, sorted_before(layer, *given))
    assert (y.shape, y.dtype) == ((T, D), BF16) and np.asarray(y, np.float32).any()


def test_tokens_of_several_sequences(rng):
    given = x, logits, *weights = operands(rng)
    shaped = x.reshape(4, 6, D), logits.reshape(4, 6, E)
    y = decoded(layer, *given)
    assert_same(decoded(layer, *shaped, *weights), y.reshape(4, 6, D))


def test_no_row_of_experts_that_are_elsewhere(rng):
    """Padding tokens, and experts of other devices, contribute zeros."""
    x, logits, *weights = operands(rng)
    local = [w[2:5] for w in weights]

    def part(x, logits, *weights, offset):
        routing = moe.mask_tokens(moe.route(logits, TOP), jnp.arange(T) % 3 > 0)
        *matrices, b0, b1, bo = weights
        return moe.dropless_mlp(x, routing, *matrices, biases=(b0, b1, bo), group_offset=offset)

    of_part = functools.partial(part, offset=jnp.int32(2))
    y = decoded(of_part, x, logits, *local)
    assert_same(y, sorted_before(of_part, x, logits, *local))
    assert not np.asarray(y, np.float32)[::3].any() and np.asarray(y, np.float32).any()


def test_an_offset_that_is_a_number(rng):
    x, logits, *weights = operands(rng)
    local = [w[2:5] for w in weights]
    of_array, of_int, of_numpy = (
        functools.partial(layer, group_offset=offset) for offset in (jnp.int32(2), 2, np.int64(2))
    )
    y = decoded(of_array, x, logits, *local)
    assert_same(y, decoded(of_int, x, logits, *local))
    assert_same(y, decoded(of_numpy, x, logits, *local))
    assert_same(y, sorted_before(of_int, x, logits, *local))


def test_experts_of_any_integers(rng):
    x, logits, *weights = operands(rng)
    routing = moe.route(logits, TOP)

    def of_routing(x, routing, *weights):
        return moe.dropless_mlp(x, routing, *weights[:3])

    expected = decoded(of_routing, x, routing, *weights)
    for dtype in np.uint8, np.int16:
        cast = routing._replace(experts=routing.experts.astype(dtype))
        assert_same(decoded(of_routing, x, cast, *weights), expected)


@FORMATS
def test_an_activation_that_closes_over_traced_values(format, rng):
    given = operands(rng, format)

    def scaled(scale, *given):
        return layer(*given, activation=lambda gate: gate * scale)

    assert not is_decoded(scaled, jnp.float32(2), *given)
    y = jax.jit(scaled)(jnp.float32(2), *given)
    assert_same(y, jax.jit(functools.partial(scaled, 2))(*given), CLOSE)


@FORMATS
def test_derivatives(format, rng):
    given = operands(rng, format)
    places = range(8) if format is None else (0, 1, 5, 6, 7)

    def loss(*given):
        return jnp.sum(jnp.sin(layer(*given).astype(F32)))

    of_sorted = jax.value_and_grad(loss, places)
    assert not is_decoded(of_sorted, *given)
    got = jax.jit(lambda *given: of_sorted(*given))(*given)
    assert_same(got, sorted_before(of_sorted, *given))
    assert all(np.asarray(x, np.float32).any() for x in got[1])

    def tangent(x, *rest):
        return jax.jvp(lambda x: layer(x, *rest), (x,), (jnp.cos(x),))

    assert_same(jax.jit(tangent)(*given), sorted_before(tangent, *given))


def test_rematerialised_in_a_scan(rng):
    x, logits, *weights = operands(rng)
    stacked = [jnp.stack([w, -w]) for w in weights]

    def loss(x, logits, *stacked, remat):
        def body(x, weights):
            return x + layer(x, logits, *weights), None

        return jnp.sum(jax.lax.scan(remat(body), x, stacked)[0].astype(F32))

    policy = jgg.checkpoint_policies.grouped_matmuls_saveable
    kept = functools.partial(loss, remat=lambda body: body)
    assert is_decoded(kept, x, logits, *stacked)
    want = jax.jit(jax.value_and_grad(kept, range(8)))(x, logits, *stacked)
    for remat in jax.checkpoint, functools.partial(jax.checkpoint, policy=policy):
        again = jax.value_and_grad(functools.partial(loss, remat=remat), range(8))
        assert_same(jax.jit(again)(x, logits, *stacked), want, CLOSE)


@FORMATS
def test_vmap(format, rng):
    x, logits, *weights = operands(rng, format)
    several = jnp.stack([x, -x, 2 * x])
    mapped = jax.vmap(layer, (0, None, *[None] * 6))
    want = jnp.stack([decoded(layer, each, logits, *weights) for each in several])
    assert_same(jax.jit(mapped)(several, logits, *weights), want, CLOSE)


@FORMATS
def test_export(format, rng, extension):
    given = operands(rng, format)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    exported = export.export(
        jax.jit(layer),
        platforms=["cpu", "cuda"],
        disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
    )(*shapes)
    target = "decode_mlp.v1" if format is None else "decode_packed_mlp.v3"
    assert f"jax_grouped_gemm.{target}" in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    assert_same(again.call(*given), decoded(layer, *given))


def test_any_number_of_tokens_is_sorted_before(rng):
    x, logits, *weights = operands(rng)
    (tokens,) = export.symbolic_shape("t")
    shapes = [
        jax.ShapeDtypeStruct((tokens, *a.shape[1:]) if i < 2 else a.shape, a.dtype)
        for i, a in enumerate([x, logits, *weights])
    ]
    assert not is_decoded(layer, *shapes)
    exported = export.export(jax.jit(layer))(*shapes)
    want = sorted_before(layer, x, logits, *weights)
    assert_same(exported.call(x, logits, *weights), want, CLOSE)


@pytest.mark.parametrize("format", [None, "mxfp4", "int4", "int8", "fp8", "fp8_128x128"])
@pytest.mark.parametrize("has_up", [True, False])
def test_what_the_custom_call_gets(has_up, format, rng, monkeypatch):
    """A stand-in for the kernels computes only from operands and attributes of the call."""
    x, logits, wi_0, wi_1, wo, b0, b1, bo = operands(rng, format)
    routing = moe.route(logits, TOP)
    b0, b1 = b0.astype(F32), b1 if has_up else None
    experts = ExpertWeights(None, wi_0, wi_1 if has_up else None, b0, b1, wo, bo)
    offset = jnp.array([1], jnp.int32)
    given = DecodeOperands(x, routing.experts, routing.weights, experts, offset)
    options = Options.of(as_activation("swiglu_oai"), None, None)
    leaves, tree = jax.tree.flatten(given)
    problem = MlpProblem("decode_mlp", given, dict(vars(options), num_experts=E + 3, tree=tree))
    found = plan.plan_decode(problem, H200)
    size = found.workspace_bytes
    calls = []

    def ffi_call(target, results):
        shapes = [(each.shape, np.dtype(each.dtype)) for each in results]
        layers = [((T, D), BF16), ((TOP * T, F), BF16), ((TOP * T, D), BF16)]
        assert shapes == [((size,), np.uint8)] * (format is not None) + layers
        calls.append(target)

        def run(x, chosen, scores, offset, gate, down, *rest, optional, groups, **attributes):
            assert {type(attributes[name]) for name in ("alpha", "limit", "shift")} == {np.float32}
            names = "function", "alpha", "cubic", "limit", "shift"
            numbers = [float(attributes.pop(name)) for name in names]
            assert numbers == pytest.approx([0, 1.702, 0, 7, 1])
            named = dict(zip(optional.split(), rest, strict=True))
            biases = {name: named.pop(name, None) for name in ("b0", "b1", "bo")}
            if format is None:
                assert attributes == dict(tile_m=32, tile_n=128, cluster=1)
                matrices = dict(wi_0=gate, wo=down) | named
            else:
                of = wo.format
                assert attributes == dict(format=format, group_size=of.group_size or 0)
                named |= dict(wi_0_values=gate, wo_values=down)
                parts = {
                    matrix: {
                        part.removeprefix(f"{matrix}_"): named.pop(part)
                        for part in list(named)
                        if part.startswith(matrix)
                    }
                    for matrix in ("wi_0", "wi_1", "wo")
                }
                assert not named
                sizes = dict(wi_0=(D, F), wi_1=(D, F), wo=(F, D))
                matrices = {
                    matrix: jgg.QuantizedArray(**arrays, format=of, matrix=sizes[matrix])
                    for matrix, arrays in parts.items()
                    if arrays
                }
            assert (chosen.dtype, scores.dtype, groups) == (jnp.int32, F32, np.int32(E + 3))
            of_call = DecodeOperands(x, chosen, scores, ExpertWeights(**matrices, **biases), offset)
            y = decode.sorted_mlp("layer", of_call, int(groups), options)
            return [jnp.zeros(size)] * (format is not None) + [y, None, None]

        return run

    want = decode.sorted_mlp("layer", given, E + 3, options)
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    assert_same(call.decode(found, *leaves), want)
    target = "decode_mlp.v1" if format is None else "decode_packed_mlp.v3"
    assert calls == [f"jax_grouped_gemm.{target}"] and np.asarray(want, np.float32).any()


LAYERS = {
    "tokens": (EIGHT, P("d"), {}, {}),
    "nothing": (EIGHT, P(), {}, {}),
    "fsdp": (EIGHT, P("d"), dict(wi=P(None, "d"), wo=P(None, "d")), {}),
    "experts": (EIGHT, P("d"), dict(wi=P("d"), wo=P("d"), bias=P("d")), {}),
    "hidden columns": (
        *(FOUR_BY_TWO, P()),
        dict(wi=P(None, None, "e"), wo=P(None, "e"), bias=P(None, "e")),
        dict(token_axes=()),
    ),
    "result": (FOUR_BY_TWO, P(), dict(wo=P(None, None, "e")), dict(token_axes=())),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_split(name, kind, rng):
    axes, of_tokens, of, options = LAYERS[name]
    given = operands(rng)
    want = decoded(layer, *given)
    run = functools.partial(layer, **({} if kind == EXPLICIT else options))
    mesh = mesh_of(axes, kind)
    specs = [of.get(each, P()) for each in ("wi", "wi", "wo", "bias", "bias", "bo")]
    with entered(mesh):
        split = put(mesh, given, [of_tokens] * 2 + specs)
        assert is_decoded(run, *split)
        compiled = jax.jit(run).lower(*split).compile()
        assert_same(compiled(*split), want, CLOSE)
    sums = [shape for travelling, shape in collectives(compiled) if travelling == SUM]
    # Each device multiplies its columns of the hidden layer, and one of them adds the bias.
    assert sums == ([(T, D)] if name == "hidden columns" else [])


@pytest.mark.parametrize(
    ("of", "kind"),
    [
        (dict(format="mxfp4"), AUTO),
        *((dict(format="int4", zero_points=True), kind) for kind in KINDS),
        (dict(format="int8"), EXPLICIT),
    ],
    ids=str,
)
def test_packed_matrices_over_a_mesh(of, kind, rng):
    """No axis divides the five tokens, so the layer leaves splitting the operation to XLA."""
    x, logits, *weights = operands(rng)
    matrices = [jgg.quantize(w, **of) for w in weights[:3]]
    given = [x[:5], logits[:5], *matrices, *weights[3:]]
    mesh, want = mesh_of(EIGHT, kind), decoded(layer, *given)
    with entered(mesh):
        everywhere = jax.device_put(given, jax.NamedSharding(mesh, P()))
        assert_same(decoded(layer, *everywhere), want, CLOSE)
        assert_same(sorted_before(layer, *everywhere), want, CLOSE)


@FORMATS
def test_devices_with_their_own_experts(format, rng):
    x, logits, *weights = operands(rng, format)
    mesh = mesh_of(EIGHT)

    def part(x, logits, *weights):
        offset = jax.lax.axis_index("d")
        routing = moe.route(logits, TOP)
        *matrices, b0, b1, bo = weights
        biases = b0, b1, bo
        y = moe.dropless_mlp(x, routing, *matrices, biases=biases, group_offset=offset)
        return jax.lax.psum(y.astype(F32), "d")

    of_experts = [jax.tree.map(lambda _: P("d"), w) for w in weights]
    run = jax.shard_map(part, mesh=mesh, in_specs=(P(), P(), *of_experts), out_specs=P())
    assert_same(decoded(run, x, logits, *weights), decoded(layer, x, logits, *weights), CLOSE)
