"""FP8 layers of few tokens: their operands, and whether a kernel sorts their tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.mlp.fp8.decode import primitive
from jax_grouped_gemm._src.mlp.fp8.decode.operands import Fp8DecodeOperands
from jax_grouped_gemm._src.mlp.fp8.layer import layer_of
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, ExpertWeights
from tests.support.decode import Decoding

BF16, F32 = jnp.bfloat16, jnp.float32
T, D, F, E, TOP = 12, 128, 208, 16, 2


def operands(rng, recipe=None):
    """Returns tokens, logits, the three matrices, and what `quantize_mlp` makes of them."""

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, BF16)

    matrices = draw(E, D, F), draw(E, D, F), draw(E, F, D)
    quantized = jgg.quantize_mlp(*matrices, recipe or jgg.Recipe())
    return [draw(T, D), jnp.asarray(rng.standard_normal((T, E)), F32), *matrices, quantized]


def layer(x, logits, wi_0, wi_1, wo, quantized, *, recipe=None, top_k=TOP, **options):
    options |= dict(recipe=recipe or jgg.Recipe(), quantized=quantized)
    return moe.dropless_mlp(x, moe.route(logits, top_k), wi_0, wi_1, wo, **options)


def of_arrays(x, logits, *arrays, **options):
    """Computes the layer of `QuantizedArray`s."""
    options = dict(recipe=jgg.Recipe()) | options
    return moe.dropless_mlp(x, moe.route(logits, TOP), *arrays, **options)


DECODING = Decoding("decode_fp8_mlp")
is_decoded, decoded, sorted_before = (
    DECODING.is_decoded,
    DECODING.decoded,
    DECODING.sorted_before,
)


def random_layer(rng, *, experts, local, tokens, top_k, embed, hidden, power_of_two=False):
    """Returns a layer of random routing, in which `local` of the experts are here.

    Some experts of a token are repeated, belong to another device, or are no experts at all.
    """

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[1]), BF16)

    recipe = jgg.Recipe(power_of_two_scales=power_of_two)
    matrices = draw(local, embed, hidden), draw(local, embed, hidden), draw(local, hidden, embed)
    quantize = jax.jit(jgg.quantize_mlp, static_argnums=3)
    given = DecodeOperands(
        jnp.asarray(rng.standard_normal((tokens, embed)), BF16),
        jnp.asarray(rng.integers(-1, experts + 1, (tokens, top_k)), jnp.int32),
        jnp.asarray(rng.random((tokens, top_k)), F32),
        ExpertWeights(**dict(zip(("wi_0", "wi_1", "wo"), matrices, strict=True))),
        jnp.asarray([rng.integers(-1, experts - local + 2)], jnp.int32),
    )
    return Fp8DecodeOperands(given, quantize(*matrices, recipe)), recipe


def static_layer(given, recipe, experts, activation="silu", implementation="cuda"):
    """Returns the static part of a layer."""
    return layer_of(
        recipe,
        as_activation(activation),
        implementation,
        given.of_rows(experts),
        combines=True,
        has_values=True,
        has_quantized=True,
    )


def check_bits(rng, activation="silu", *, experts, repeats=1, **sizes):
    """Compares the bits of a layer whose kernel sorts tokens with those of sorted rows."""
    operands, recipe = random_layer(rng, experts=experts, **sizes)
    static = static_layer(operands.given, recipe, experts, activation)
    assert primitive.is_taken(operands, experts, static)
    run = jax.jit(lambda operands: primitive.mlp(operands, experts, static))
    of_sorted = jax.jit(lambda operands: primitive.sorted_mlp(operands, experts, static))
    want = np.asarray(of_sorted(operands))
    assert np.isfinite(want.astype(np.float32)).all()
    for got in [run(operands) for _ in range(repeats)]:
        np.testing.assert_array_equal(np.asarray(got).view(np.uint16), want.view(np.uint16))
    return want.astype(np.float32)
