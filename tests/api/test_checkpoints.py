"""Checkpoints: literal bytes have known values, and gpt-oss matches NumPy and Transformers."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import weight_formats as oracle

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def words(nibbles, axis):
    """Packs eight 4-bit codes along an axis into each int32, the first into the lowest bits."""
    nibbles = np.moveaxis(np.asarray(nibbles, np.uint32), axis, -1)
    split = nibbles.reshape(*nibbles.shape[:-1], -1, 8)
    packed = (split << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return np.moveaxis(packed.view(np.int32), -1, axis)


def values(q):
    return np.asarray(jgg.dequantize(q, np.float32))


def gpt_oss_tensors(rng, experts, embed, hidden, names="hugging face", layer=3):
    def blocks(columns, k):
        shape = experts, columns, k // 32
        return (
            rng.integers(0, 256, (*shape, 16), dtype=np.uint8),
            rng.integers(118, 124, shape, dtype=np.uint8),
        )

    def numbers(*shape):
        return rng.standard_normal(shape).astype(BF16)

    (up, up_scales), (down, down_scales) = blocks(2 * hidden, embed), blocks(embed, hidden)
    hugging_face = {
        "experts.gate_up_proj_blocks": up,
        "experts.gate_up_proj_scales": up_scales,
        "experts.gate_up_proj_bias": numbers(experts, 2 * hidden),
        "experts.down_proj_blocks": down,
        "experts.down_proj_scales": down_scales,
        "experts.down_proj_bias": numbers(experts, embed),
        "router.weight": numbers(experts, embed),
        "router.bias": numbers(experts),
    }
    if names == "hugging face":
        return {f"model.layers.{layer}.mlp.{name}": x for name, x in hugging_face.items()}
    openai = ("mlp1_weight.blocks", "mlp1_weight.scales", "mlp1_bias", "mlp2_weight.blocks",
              "mlp2_weight.scales", "mlp2_bias", "gate.weight", "gate.bias")  # fmt: skip
    pairs = zip(openai, hugging_face.values(), strict=True)
    return {f"block.{layer}.mlp.{name}": x for name, x in pairs}


def dequantized(blocks, scales):
    """Returns the values of MXFP4 blocks, [E, columns, k] in float64."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:3], 32)
    return (oracle.E2M1[codes] * oracle.e8m0(scales)[..., None]).reshape(*blocks.shape[:2], -1)


def test_gpt_oss_bytes():
    # There is one expert with k = 32 and F = 1, so row 0 is gate and row 1 is up.
    blocks = np.zeros((1, 2, 1, 16), np.uint8)
    blocks[0, 0, 0, :4] = 0x21, 0x43, 0x65, 0xF7  # low nibble first
    blocks[0, 1, 0, :2] = 0xA9, 0x0C
    tensors = {
        "experts.gate_up_proj_blocks": blocks,
        "experts.gate_up_proj_scales": np.array([[[127], [130]]], np.uint8),
        "experts.gate_up_proj_bias": np.array([[5, 6]], BF16),
        "experts.down_proj_blocks": np.zeros((1, 32, 1, 16), np.uint8),
        "experts.down_proj_scales": np.zeros((1, 32, 1), np.uint8),
        "experts.down_proj_bias": np.zeros((1, 32), BF16),
        "router.weight": np.arange(32, dtype=np.float32)[None].astype(BF16),
        "router.bias": np.ones(1, BF16),
    }
    tensors = {f"model.layers.0.mlp.{name}": x for name, x in tensors.items()}
    layer = jgg.checkpoints.gpt_oss(tensors, 0)
    gate, up = values(layer.wi_0)[0, :, 0], values(layer.wi_1)[0, :, 0]
    np.testing.assert_array_equal(gate[:8], [0.5, 1, 1.5, 2, 3, 4, 6, -6])
    np.testing.assert_array_equal(up[:4], [-0.5 * 8, -1 * 8, -2 * 8, 0])
    assert not gate[8:].any() and not up[4:].any()
    assert [np.asarray(bias)[0, 0] for bias in layer.biases[:2]] == [5, 6]
    assert layer.gate.shape == (32, 1) and layer.wo.shape == (1, 32, 32)


def numpy_mlp(tensors, x, top_k, prefix="model.layers.3.mlp."):
    """Computes gpt-oss's MLP, token by token in float64."""
    own = {name.removeprefix(prefix): np.asarray(t) for name, t in tensors.items()}
    wi, wo = (
        dequantized(own[f"experts.{name}_blocks"], own[f"experts.{name}_scales"])
        for name in ("gate_up_proj", "down_proj")
    )
    wide = {name: t.astype(np.float64) for name, t in own.items() if t.dtype == BF16}
    out = np.zeros_like(x, np.float64)
    for token, row in enumerate(x.astype(np.float64)):
        logits = wide["router.weight"] @ row + wide["router.bias"]
        chosen = np.argsort(logits)[-top_k:]
        shares = np.exp(logits[chosen] - logits.max())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            both = wi[e] @ row + wide["experts.gate_up_proj_bias"][e]
            gate, up = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
            hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[token] += share * (wo[e] @ hidden + wide["experts.down_proj_bias"][e])
    return out


@functools.partial(jax.jit, static_argnums=2)
def our_mlp(layer, x, top_k):
    logits = x @ layer.gate.astype(np.float32) + layer.gate_bias.astype(np.float32)
    routing = moe.route(logits, top_k)
    return moe.dropless_mlp(x, routing, *layer[:3], biases=layer.biases, activation="swiglu_oai")


@pytest.mark.parametrize("names", ["hugging face", "openai"])
def test_gpt_oss_against_numpy(rng, names):
    tensors = gpt_oss_tensors(rng, 4, 96, 160, names)
    x = rng.standard_normal((6, 96)).astype(np.float32)
    layer = jgg.checkpoints.gpt_oss(tensors, 3)
    prefix = "model.layers.3.mlp."
    own = dict(zip(gpt_oss_tensors(rng, 1, 32, 32), tensors.values(), strict=True))
    want = numpy_mlp(own, x, 2, prefix)
    scale = np.abs(want).max()
    np.testing.assert_allclose(our_mlp(layer, x, 2) / scale, want / scale, atol=1e-5)


def test_gpt_oss_against_transformers(rng):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    configuration = pytest.importorskip("transformers.models.gpt_oss.configuration_gpt_oss")
    config = configuration.GptOssConfig(
        hidden_size=96,
        intermediate_size=160,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
    )
    config._experts_implementation = "eager"  # set by a whole model, but not by one module
    tensors = gpt_oss_tensors(rng, 4, 96, 160, layer=0)
    own = {name.removeprefix("model.layers.0.mlp."): x for name, x in tensors.items()}
    module = modeling.GptOssMLP(config).to(torch.float32)
    state = {name: x.astype(np.float32) for name, x in own.items() if x.dtype == BF16}
    for name in ("gate_up_proj", "down_proj"):
        found = dequantized(own[f"experts.{name}_blocks"], own[f"experts.{name}_scales"])
        state[f"experts.{name}"] = np.swapaxes(found, 1, 2).astype(np.float32)
    module.load_state_dict({name: torch.tensor(x) for name, x in state.items()})
    x = rng.standard_normal((6, 96)).astype(np.float32)
    with torch.no_grad():
        want = module(torch.tensor(x)[None])[0].numpy()[0]
    scale = np.abs(want).max()
    got = our_mlp(jgg.checkpoints.gpt_oss(tensors, 0), x, 2)
    np.testing.assert_allclose(got / scale, want / scale, atol=1e-5)


def test_gptq_bytes(rng):
    # One group has 32 rows and 8 columns. Each column has the codes 0, 1, ..., 15 twice along k.
    codes = np.tile(np.arange(32, dtype=np.uint32)[:, None] % 16, (1, 8))
    qweight = words(codes, 0)
    assert qweight[0, 0] == 0x76543210 and qweight[1, 0].view(np.uint32) == 0xFEDCBA98
    scales = np.full((1, 8), 0.5, np.float16)
    qzeros = np.array([[0x65432107]], np.int32)  # columns 0 to 7 have 7, 0, 1, 2, 3, 4, 5, 6
    zeros = np.array([7, 0, 1, 2, 3, 4, 5, 6])
    for version in (1, 2):
        q = jgg.checkpoints.gptq(qweight, scales, qzeros, np.arange(32) // 32, version=version)
        want = (codes.astype(np.float32) - (zeros + (version == 1))) * 0.5
        np.testing.assert_array_equal(values(q), want)
    symmetric = values(jgg.checkpoints.gptq(qweight, scales))
    np.testing.assert_array_equal(symmetric, (codes.astype(np.float32) - 8) * 0.5)
    with pytest.raises(ValueError, match="act-order"):
        jgg.checkpoints.gptq(qweight, scales, qzeros, rng.permutation(32) % 2)
    with pytest.raises(TypeError, match="qweight must be int32, got int16"):
        jgg.checkpoints.gptq(qweight.astype(np.int16), scales)
    with pytest.raises(TypeError, match="groups of 32, 64 or 128 of 32 rows of 4 bits"):
        jgg.checkpoints.gptq(qweight, np.zeros((4, 8), np.float16))


def test_awq_bytes():
    # From the lowest nibble on, a word has the columns 0, 2, 4, 6, 1, 3, 5, 7.
    qweight = np.full((64, 1), 0x76543210, np.int32)
    qzeros = np.full((2, 1), 0x11111111, np.int32)
    scales = np.array([[1] * 8, [2] * 8], np.float16)
    got = values(jgg.checkpoints.awq(qweight, scales, qzeros))
    columns = np.array([0, 4, 1, 5, 2, 6, 3, 7]) - 1.0
    np.testing.assert_array_equal(got[:32], np.tile(columns, (32, 1)))
    np.testing.assert_array_equal(got[32:], np.tile(2 * columns, (32, 1)))


def test_compressed_tensors(rng):
    n, k = 16, 64
    codes = rng.integers(0, 16, (2, n, k))
    scales = rng.uniform(0.5, 2, (2, n, 2)).astype(BF16)
    zeros = rng.integers(0, 16, (2, n, 2))
    packed = dict(weight_packed=words(codes, 2), weight_scale=scales)
    assert packed["weight_packed"].shape == (2, n, k // 8)
    wide = np.repeat(scales.astype(np.float32), 32, 2)
    got = values(jgg.checkpoints.compressed_tensors(packed))
    np.testing.assert_array_equal(got, np.swapaxes((codes - 8) * wide, 1, 2))
    packed["weight_zero_point"] = words(zeros, 1)
    got = values(jgg.checkpoints.compressed_tensors(packed))
    want = (codes - np.repeat(zeros, 32, 2)) * wide
    np.testing.assert_array_equal(got, np.swapaxes(want, 1, 2))
    packed["weight_g_idx"] = rng.permutation(k)
    with pytest.raises(ValueError, match="act-order"):
        jgg.checkpoints.compressed_tensors(packed)

    channel = rng.uniform(0.5, 2, (2, n, 1)).astype(np.float32)
    for name, dtype in (("int-quantized", np.int8), ("float-quantized", E4M3)):
        weight = rng.integers(-100, 100, (2, n, k)).astype(dtype)
        tensors = dict(weight=weight, weight_scale=channel)
        got = values(jgg.checkpoints.compressed_tensors(tensors, name))
        want = np.swapaxes(weight.astype(np.float32) * channel, 1, 2)
        np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="weight must be int8"):
        jgg.checkpoints.compressed_tensors(tensors, "int-quantized")
    with pytest.raises(KeyError, match="weight_packed"):
        jgg.checkpoints.compressed_tensors(tensors)
    with pytest.raises(ValueError, match="format must be one of"):
        jgg.checkpoints.compressed_tensors(tensors, "marlin-24")

    blocks = rng.integers(0, 256, (2, n, k // 2), dtype=np.uint8)
    exponents = rng.integers(120, 130, (2, n, k // 32), dtype=np.uint8)
    tensors = dict(weight_packed=blocks, weight_scale=exponents)
    got = values(jgg.checkpoints.compressed_tensors(tensors, "mxfp4-pack-quantized"))
    want = dequantized(blocks.reshape(2, n, -1, 16), exponents)
    np.testing.assert_array_equal(got, np.swapaxes(want, 1, 2))


def test_one_group_of_all_rows(rng):
    """A group of all rows becomes groups of 128, and of other columns than a multiple of 8."""
    k, n = 200, 12
    codes = rng.integers(0, 16, (2, k, 16))
    zeros = rng.integers(1, 16, (2, 1, 16))
    scales = rng.uniform(0.5, 2, (2, 1, 16)).astype(np.float16)
    rounded = scales.astype(BF16).astype(np.float64)
    want, symmetric = (codes - zeros) * rounded, (codes - 8) * rounded
    order = "0 4 1 5 2 6 3 7".split()  # the place of each column in AWQ's words
    places = np.argsort([int(place) for place in order]) + 8 * np.arange(2)[:, None]
    found = jgg.checkpoints.awq(
        words(codes[..., places.reshape(-1)], 2), scales, words(zeros[..., places.reshape(-1)], 2)
    )
    np.testing.assert_array_equal(values(found), want)
    qweight, cut = words(codes[..., :n], 1), scales[..., :n]
    found = jgg.checkpoints.gptq(qweight, cut, words(zeros, 2), version=2)
    np.testing.assert_array_equal(values(found), want[..., :n])
    found = jgg.checkpoints.gptq(qweight, cut, g_idx=np.zeros((2, k), np.int32))
    np.testing.assert_array_equal(values(found), symmetric[..., :n])
    tensors = dict(
        weight_packed=words(codes[..., :n].swapaxes(1, 2), 2),
        weight_scale=cut.swapaxes(1, 2),
        weight_shape=np.array([[n, k], [n, k]]),
    )
    found = jgg.checkpoints.compressed_tensors(tensors)
    np.testing.assert_array_equal(values(found), symmetric[..., :n])
    tensors["weight_zero_point"] = words(zeros.swapaxes(1, 2), 1)
    found = jgg.checkpoints.compressed_tensors(tensors)
    np.testing.assert_array_equal(values(found), want[..., :n])
    # Without the number of rows, words of 8 bits could be meant.
    del tensors["weight_shape"]
    with pytest.raises(TypeError, match="weight_scale.*groups of 32, 64 or 128 of 200 rows"):
        jgg.checkpoints.compressed_tensors(tensors)
    with pytest.raises(TypeError, match="scales must be.*groups of 32, 64 or 128 of 200 rows"):
        jgg.checkpoints.gptq(qweight, cut)


@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("leading", [(), (2,)])
def test_matrices_without_rows(leading, groups):
    """All of no rows may be one group, or there may be no group."""
    n = 64
    words, zeros = (np.zeros((*leading, rows, n // 8), np.int32) for rows in (0, groups))
    scales = np.ones((*leading, groups, n), np.float32)
    qweight = np.zeros((*leading, 0, n), np.int32)
    compressed = dict(
        weight_packed=qweight.mT, weight_scale=scales.mT, weight_shape=np.array([n, 0])
    )
    for q in (
        jgg.checkpoints.gptq(qweight, scales, g_idx=np.zeros(0, np.int32)),
        jgg.checkpoints.gptq(qweight, scales, zeros),
        jgg.checkpoints.awq(words, scales, zeros),
        jgg.checkpoints.compressed_tensors(compressed),
        jgg.checkpoints.compressed_tensors(compressed | dict(weight_zero_point=zeros.mT)),
    ):
        assert q.format.name == "int4"
        assert q.shape == values(q).shape == (*leading, 0, n)


def test_words_of_8_bits_are_refused(rng):
    """Words of 8 bits, in groups of 64, look like words of 4 bits for twice as many rows."""
    k, n = 256, 16
    tensors = dict(
        weight_packed=rng.integers(0, 2**31, (2, n, k // 4)).astype(np.int32),
        weight_scale=np.ones((2, n, k // 64), BF16),
        weight_shape=np.array([[n, k], [n, k]]),
    )
    with pytest.raises(
        TypeError, match=r"weight_shape must be \(16, 512\).*4 bits, got \[\[16, 256"
    ):
        jgg.checkpoints.compressed_tensors(tensors)
    qweight, scales = np.zeros((2, k // 4, n), np.int32), np.ones((2, k // 64, n), np.float32)
    with pytest.raises(TypeError, match=r"g_idx must have the shape \(2, 512\), got \(2, 256\)"):
        jgg.checkpoints.gptq(qweight, scales, g_idx=np.zeros((2, k), np.int32))
    with pytest.raises(TypeError, match=r"qzeros must have the shape \(2, 4, 2\), got \(2, 4, 4\)"):
        jgg.checkpoints.gptq(qweight, scales, np.zeros((2, k // 64, n // 4), np.int32))


def test_all_of_weight_shape_is_checked():
    experts, n, k = 4, 16, 64
    tensors = dict(
        weight_packed=np.zeros((experts, n, k // 8), np.int32),
        weight_scale=np.ones((experts, n, 2), np.float32),
    )
    read = jgg.checkpoints.compressed_tensors
    each = np.array([[n, k]] * experts)
    for shape in (each[0], each):
        assert read(tensors | dict(weight_shape=shape)).shape == (experts, k, n)
    for shape in (each[:3], each[:1], each[None], each[:0], each[0, 0], np.array([n, k, 1])):
        rule = r"weight_shape must have the shape \(2,\) or \(4, 2\), got .* of shape \("
        with pytest.raises(TypeError, match=rule):
            read(tensors | dict(weight_shape=shape))
    each[3, 1] = 2 * k
    with pytest.raises(TypeError, match=r"weight_shape must be \(16, 64\).*\[16, 128\]\]"):
        read(tensors | dict(weight_shape=each))


@pytest.mark.parametrize("format", ["int-quantized", "float-quantized", "mxfp4-pack-quantized"])
def test_tensors_that_a_format_ignores_are_refused(rng, format):
    """Zero points and an order of rows change weights. They may be there if they change nothing."""
    n, k = 16, 64
    if format == "mxfp4-pack-quantized":
        weight = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        scale = rng.integers(120, 130, (n, k // 32), dtype=np.uint8)
        tensors = dict(weight_packed=weight, weight_scale=scale)
        want = dequantized(weight.reshape(1, n, -1, 16), scale[None])[0]
        order = np.arange(k) // 32
    else:
        weight = rng.integers(-100, 100, (n, k)).astype(np.int8 if format[0] == "i" else E4M3)
        scale = rng.uniform(0.5, 2, (n, 1)).astype(np.float32)
        tensors = dict(weight=weight, weight_scale=scale)
        want = (weight.astype(np.float64) * scale).astype(np.float32)
        order = np.zeros(k, np.int32)
    read = functools.partial(jgg.checkpoints.compressed_tensors, format=format)
    zeros = np.zeros(scale.shape, np.int8)
    harmless = dict(weight_zero_point=zeros, weight_g_idx=order, weight_shape=np.array([n, k]))
    np.testing.assert_array_equal(values(read(tensors | harmless)), want.T)
    zeros = zeros.copy()
    zeros[3] = 5
    with pytest.raises(ValueError, match="weight_zero_point must be zero for.*has no zero points"):
        read(tensors | dict(weight_zero_point=zeros))
    with pytest.raises(ValueError, match="weight_g_idx is not k // group_size"):
        read(tensors | dict(weight_g_idx=np.arange(k)[::-1] // 32))
    with pytest.raises(TypeError, match=r"weight_shape must be \(16, 64\).*got \[16, 60\]"):
        read(tensors | dict(weight_shape=np.array([n, 60])))


def test_tensors_of_one_dimension_are_named(rng):
    one = np.ones(32)
    read, fp8 = jgg.checkpoints.compressed_tensors, jgg.checkpoints.fp8
    cases = [
        (
            lambda: read(dict(weight=one.astype(np.int8), weight_scale=one), "int-quantized"),
            "weight",
        ),
        (
            lambda: read(
                dict(weight_packed=one.astype(np.uint8), weight_scale=one), "mxfp4-pack-quantized"
            ),
            "weight_packed",
        ),
        (lambda: fp8(one.astype(E4M3), one), "weight"),
        (lambda: jgg.checkpoints.gptq(one.astype(np.int32), one), "qweight"),
    ]
    for call, name in cases:
        with pytest.raises(TypeError, match=f"{name} must have two dimensions at least, got"):
            call()
    packed = dict(weight_packed=np.zeros((16, 8), np.int32), weight_scale=one[:16])
    with pytest.raises(TypeError, match=r"weight_scale.*must be \[..., groups, 16\].*got \(16,\)"):
        read(packed)
    tensors = gpt_oss_tensors(rng, 2, 32, 64)
    for name in ("gate_up_proj_blocks", "down_proj_blocks"):
        name = f"model.layers.3.mlp.experts.{name}"
        with pytest.raises(TypeError, match=f"{name} must"):
            jgg.checkpoints.gpt_oss(tensors | {name: tensors[name].reshape(-1)}, 3)


def test_an_order_of_another_shape_is_named(rng):
    qweight, scales = np.zeros((2, 8, 16), np.int32), np.ones((2, 2, 16), np.float16)
    for shape in ((32,), (3, 64)):
        with pytest.raises(TypeError, match=r"g_idx must have the shape \(2, 64\), got"):
            jgg.checkpoints.gptq(qweight, scales, g_idx=np.zeros(shape, np.int32))
    with pytest.raises(TypeError, match="g_idx must not be traced"):
        jax.jit(lambda g_idx: jgg.checkpoints.gptq(qweight, scales, g_idx=g_idx))(np.zeros(64))


@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias", "weight", "bias"])
def test_gpt_oss_names_integers(rng, name):
    tensors = gpt_oss_tensors(rng, 2, 32, 64)
    (name,) = (key for key in tensors if key.endswith("." + name))
    with pytest.raises(TypeError, match=f"{name} must be floating, got int32"):
        jgg.checkpoints.gpt_oss(tensors | {name: tensors[name].astype(np.int32)}, 3)


def test_fp8_blocks(rng):
    n, k = 200, 136
    weight = rng.standard_normal((2, n, k)).astype(E4M3)
    scales = rng.uniform(0.5, 2, (2, 2, 2)).astype(np.float32)
    want = weight.astype(np.float32) * np.repeat(np.repeat(scales, 128, 1)[:, :n], 128, 2)[..., :k]
    np.testing.assert_array_equal(values(jgg.checkpoints.fp8(weight, scales)), want.swapaxes(1, 2))
    rows = jgg.checkpoints.fp8(weight, scales, layout="rows")
    np.testing.assert_array_equal(values(rows), want.swapaxes(1, 2))
    with pytest.raises(ValueError, match="layout must be"):
        jgg.checkpoints.fp8(weight, scales, layout="columns")
    with pytest.raises(TypeError, match=r"weight_scale_inv must have the shape \(2, 2, 2\)"):
        jgg.checkpoints.fp8(weight, scales[:, :1])


def test_a_layer_with_a_recipe_multiplies_fp8_blocks_as_they_are(rng):
    embed, hidden, experts, tokens = 256, 128, 4, 512

    def matrix(k, n):
        shape = experts, n, k
        weight = (rng.standard_normal(shape) / 16).astype(E4M3)
        return weight, rng.uniform(0.5, 2, (experts, n // 128, k // 128)).astype(np.float32)

    stored = [matrix(embed, hidden), matrix(embed, hidden), matrix(hidden, embed)]
    x = jnp.asarray(rng.standard_normal((tokens, embed)).astype(jnp.bfloat16))
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)

    def layer(layout, **options):
        weights = [jgg.checkpoints.fp8(*each, layout=layout) for each in stored]
        return moe.dropless_mlp(x, moe.route(logits, top_k=2), *weights, **options)

    recipe = jgg.Recipe()
    found, expected = jax.jit(lambda: (layer("rows", recipe=recipe), layer("packed")))()
    error = np.linalg.norm(np.float32(found) - np.float32(expected))
    assert error < 0.06 * np.linalg.norm(np.float32(expected))
    plans = str(jgg.explain(lambda: layer("rows", recipe=recipe)))
    assert "dequantises" not in plans and "float8_e4m3fn" in plans


def test_gpt_oss_names_what_is_wrong(rng):
    tensors = gpt_oss_tensors(rng, 2, 32, 32)
    with pytest.raises(KeyError, match="no tensor 'model.layers.5.mlp.experts.gate_up_proj_blocks"):
        jgg.checkpoints.gpt_oss(tensors, 5)
    with pytest.raises(KeyError, match="no tensor 'block.5.mlp.mlp1_weight.blocks"):
        jgg.checkpoints.gpt_oss(gpt_oss_tensors(rng, 2, 32, 32, "openai"), 5)
    name = "model.layers.3.mlp.experts.down_proj_scales"
    with pytest.raises(KeyError, match=name):
        jgg.checkpoints.gpt_oss({k: x for k, x in tensors.items() if k != name}, 3)
    with pytest.raises(TypeError, match=f"{name} must be uint8, got float32"):
        jgg.checkpoints.gpt_oss(tensors | {name: tensors[name].astype(np.float32)}, 3)
    with pytest.raises(TypeError, match=r"down_proj_blocks must be \[E, columns, k / 32, 16\]"):
        jgg.checkpoints.gpt_oss(tensors | {name: tensors[name][:, :1]}, 3)


@pytest.mark.parametrize(
    "name, axis",
    [*itertools.product(["gate_up_proj_bias", "down_proj_bias", "weight"], [0, 1]), ("bias", 0)],
)
def test_gpt_oss_names_what_is_short(rng, name, axis):
    tensors = gpt_oss_tensors(rng, 2, 32, 64)
    (name,) = (key for key in tensors if key.endswith("." + name))
    short = np.delete(tensors[name], 0, axis)
    with pytest.raises(TypeError, match=f"{name} must have the shape .*, got "):
        jgg.checkpoints.gpt_oss(tensors | {name: short}, 3)


def test_zero_points_and_scales_of_another_shape_are_named():
    words, scales = np.zeros((2, 4, 16), np.int32), np.ones((2, 1, 16), np.float16)
    with pytest.raises(TypeError, match=r"qzeros must have the shape \(2, 1, 2\)"):
        jgg.checkpoints.gptq(words, scales, np.zeros((2, 1, 4), np.int32))  # the shape for 8 bits
    with pytest.raises(TypeError, match=r"qzeros must have the shape \(2, 1, 16\)"):
        jgg.checkpoints.awq(np.zeros((2, 32, 16), np.int32), np.ones((2, 1, 128)), words[:, :, :1])
    packed = dict(weight_packed=np.zeros((2, 16, 4), np.int32), weight_scale=np.ones((2, 16, 1)))
    packed["weight_zero_point"] = np.zeros((2, 16, 1), np.int32)
    with pytest.raises(TypeError, match=r"weight_zero_point must have the shape \(2, 2, 1\)"):
        jgg.checkpoints.compressed_tensors(packed)
    blocks = dict(
        weight_packed=np.zeros((2, 16, 32), np.uint8), weight_scale=np.ones((2, 16, 1), np.uint8)
    )
    with pytest.raises(TypeError, match=r"weight_scale must have the shape \(2, 16, 2\)"):
        jgg.checkpoints.compressed_tensors(blocks, "mxfp4-pack-quantized")
