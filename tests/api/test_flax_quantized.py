"""Flax layers whose weights are quantised and frozen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg

pytest.importorskip("flax")
from flax import nnx  # noqa: E402

from jax_grouped_gemm._src.quantized.format import register  # noqa: E402
from jax_grouped_gemm.flax import linen as our_linen  # noqa: E402
from jax_grouped_gemm.flax import nnx as our_nnx  # noqa: E402
from jax_grouped_gemm.flax.nnx.layer import MATRICES  # noqa: E402

SIZES = dict(hidden_features=160, num_experts=4, top_k=2)
EMBED = 96
WEIGHTS = dict(
    wi_0=np.zeros((4, 96, 160), np.float32),
    wi_1=np.zeros((4, 96, 160), np.float32),
    wo=np.zeros((4, 160, 96), np.float32),
)


def tokens(rng):
    return rng.standard_normal((6, EMBED)).astype(np.float32)


def nnx_layer(**options):
    return our_nnx.MoE(EMBED, **SIZES, **options, rngs=nnx.Rngs(0))


def with_dequantised(layer, **packed):
    for name, q in packed.items():
        getattr(layer, name).set_value(jgg.dequantize(q, jnp.float32))
    return layer


def matrices_of(layer):
    return {name: getattr(layer, name)[...] for name in MATRICES}


@pytest.mark.parametrize("name, options", [("mxfp4", {}), ("int4", dict(group_size=32))])
def test_nnx(rng, name, options):
    x, layer = tokens(rng), nnx_layer(biases=True)
    packed = {n: jgg.quantize(w, name, **options) for n, w in matrices_of(layer).items()}
    want, _ = with_dequantised(nnx_layer(biases=True), **packed)(x)
    our_nnx.quantize(layer, name, **options)
    got, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, want, atol=1e-5)
    # Quantised weights are no parameters, so optimisers and gradients leave them out.
    names = {path[0] for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert names == {"gate", "wi_0_bias", "wi_1_bias", "wo_bias"}
    grads = nnx.grad(lambda layer, x: (layer(x)[0] ** 2).sum())(layer, x)
    assert np.asarray(jax.tree.leaves(grads["wo_bias"])[0]).any()
    # The state has all quantised weights, so a merged layer has the same results.
    graph, state = nnx.split(layer)
    np.testing.assert_array_equal(nnx.merge(graph, state)(x)[0], layer(x)[0])
    our_nnx.quantize(layer, name, **options)  # changes nothing, as all weights are quantised
    np.testing.assert_array_equal(layer(x)[0], got)


def test_nnx_of_a_checkpoint(rng):
    x, layer = tokens(rng), nnx_layer()
    packed = {n: jgg.quantize(w, "int8") for n, w in matrices_of(layer).items()}
    want, _ = with_dequantised(nnx_layer(), **packed)(x)
    abstract = nnx.eval_shape(nnx_layer)
    our_nnx.set_quantized(abstract, **packed)
    abstract.gate.kernel.set_value(layer.gate.kernel[...])
    np.testing.assert_allclose(abstract(x)[0], want, atol=1e-5)
    with pytest.raises(TypeError, match="MoE: wo must be"):
        our_nnx.set_quantized(layer, packed["wi_0"], packed["wi_1"], packed["wi_0"])
    with pytest.raises(TypeError, match="MoE: wo must be a QuantizedArray"):
        our_nnx.set_quantized(layer, packed["wi_0"], packed["wi_1"], layer.wo)
    with pytest.raises(TypeError, match="MoE: wi_0 must be a QuantizedArray, got Param"):
        of_recipe = nnx_layer(recipe=jgg.Recipe())
        our_nnx.set_quantized(of_recipe, of_recipe.wi_0, of_recipe.wi_1, of_recipe.wo)
    with pytest.raises(ValueError, match="without a recipe"):
        our_nnx.quantize(nnx_layer(recipe=jgg.Recipe()), "int8")


def test_logical_axes_of_nnx():
    """Arrays of frozen weights have the parameters' axes, so that their bytes can be split."""
    layer = nnx_layer()
    our_nnx.quantize(layer, "int4", zero_points=True)
    specs = nnx.get_partition_spec(nnx.state(layer, our_nnx.Quantized))
    found = nnx.to_pure_dict(specs)["quantized"]
    rank4 = dict.fromkeys(["values", "scales", "zero_points"])
    assert found["wi_1"] == {name: P("exp", "mlp", "embed", None) for name in rank4}
    assert found["wo"] == {name: P("exp", "embed", "mlp", None) for name in rank4}
    our_nnx.set_quantized(layer, *(jgg.quantize(w, "int8") for w in WEIGHTS.values()))
    assert set(layer.quantized["wo"]) == {"values", "channel_scales"}


def test_nnx_over_a_mesh(rng):
    """Packed bytes that the logical axes split have the results of whole ones."""
    mesh = jax.make_mesh((2, 2), ("expert", "data"), (jax.sharding.AxisType.Auto,) * 2)
    layer, divided = (
        our_nnx.MoE(128, 128, num_experts=4, top_k=2, **of_mesh, rngs=nnx.Rngs(0))
        for of_mesh in ({}, dict(mesh=mesh, expert_axis="expert", fsdp_axis="data"))
    )
    x = rng.standard_normal((8, 128)).astype(np.float32)
    for model in (layer, divided):
        our_nnx.quantize(model, "mxfp4")
    state = nnx.state(divided, our_nnx.Quantized)
    with nnx.logical_axis_rules((("exp", "expert"), ("embed", "data"), ("mlp", None))):
        specs = nnx.get_partition_spec(state)
    place = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
    nnx.update(divided, jax.tree.map(place, state, specs))
    values = divided.quantized["wi_0"]["values"][...]
    assert values.addressable_shards[0].data.nbytes * 4 == values.nbytes
    got, _ = nnx.jit(lambda layer, x: layer(x))(divided, x)
    np.testing.assert_allclose(got, layer(x)[0], atol=1e-5)


@pytest.mark.parametrize("names", [["wi_0", "wi_1"], ["wi_1", "wo"], [*MATRICES, "bias"], []])
def test_linen_names_a_collection_that_is_not_whole(names):
    experts = {name: jgg.quantize(WEIGHTS.get(name, WEIGHTS["wo"]), "int8") for name in names}
    params = {"gate": {"kernel": np.zeros((EMBED, 4), np.float32)}}
    variables = {"params": params, "quantized": {"experts": experts}}
    found = ", ".join(names) or "nothing"
    with pytest.raises(ValueError, match=f"must be wi_0, wi_1 and wo.*got {found}(\n|$)"):
        our_linen.MoE(**SIZES).apply(variables, np.zeros((6, EMBED), np.float32))


def test_linen(rng):
    x, layer = tokens(rng), our_linen.MoE(**SIZES)
    params = jax.tree.map(
        lambda x: x,
        layer.init(jax.random.key(0), x)["params"],
    )
    quantized = our_linen.quantize_params(params, "mxfp4")
    assert isinstance(quantized["experts"]["wo"], jgg.QuantizedArray)
    from flax.core import meta

    plain = dict(meta.unbox(params))
    for name, q in quantized["experts"].items():
        plain[name] = jgg.dequantize(q, jnp.float32)
    want, _ = layer.apply({"params": plain}, x)
    rest = {"gate": meta.unbox(params)["gate"]}
    got, _ = jax.jit(layer.apply)({"params": rest, "quantized": quantized}, x)
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_nnx_with_a_format_that_is_added(rng):
    def int8_demo(parts, format, matrix, dtype):
        return (parts.values.astype(jnp.float32) * parts.channel_scales).astype(dtype)

    register(
        jgg.Format("int8_demo", np.dtype(np.int8), 8, channel_scales=True), dequantize=int8_demo
    )
    x, layer, packed = tokens(rng), nnx_layer(), {}
    for name, w in matrices_of(layer).items():
        scales = np.abs(w).max(1) / 127
        values = np.round(w / scales[:, None]).astype(np.int8)
        packed[name] = jgg.QuantizedArray(values, channel_scales=scales, format="int8_demo")
    want, _ = layer(x)
    our_nnx.set_quantized(layer, **packed)
    np.testing.assert_allclose(layer(x)[0], want, atol=0.05)
    assert not np.array_equal(layer(x)[0], want)


def test_nnx_with_a_recipe(rng):
    x, layer = tokens(rng), nnx_layer(recipe=jgg.Recipe())
    want, _ = layer(x)
    our_nnx.quantize(layer, "fp8_128x128", layout="rows")
    got, _ = nnx.jit(lambda layer, x: layer(x))(layer, x)
    np.testing.assert_allclose(got, want, atol=1e-6)
    assert layer.wi_0 is None


def test_nnx_through_pure_dicts(rng):
    x, layer = tokens(rng), nnx_layer()
    our_nnx.quantize(layer, "int4", zero_points=True)
    stored = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer)))
    other = nnx.eval_shape(nnx_layer)
    zeros = {n: jgg.quantize(w, "int4", zero_points=True) for n, w in WEIGHTS.items()}
    our_nnx.set_quantized(other, **zeros)
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, stored)
    nnx.update(other, state)
    np.testing.assert_array_equal(other(x)[0], layer(x)[0])
