"""XLA's program for products of quantised weights on an H200."""

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import aot

M, G, K, N = 4096, 8, 512, 384
FORMATS = pytest.mark.parametrize("name", ["mxfp4", "int4", "int8", "fp8", "fp8_128x128"])


@pytest.fixture(scope="module")
def h200(extension) -> aot.Target:
    return aot.Target(aot.H200)


@FORMATS
def test_weights_are_dequantised_once_and_a_kernel_multiplies_them(h200, name):
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((G,), jnp.int32)
    q = jax.eval_shape(lambda w: jgg.quantize(w, name), w)

    def both(x, q, sizes):
        y, vjp = jax.vjp(lambda x: jgg.ragged_dot(x, q, sizes, implementation="cuda"), x)
        return y, vjp(y)

    program = h200.compile(both, x, q, sizes)
    # The gradient of x takes the same kernel, and weights are dequantised again for it.
    assert program.kernels == dict(unpack_matrices=2, ragged_noncontracting=2)
    dequantised = 2 * G * K * N
    assert program.temporary_bytes < 2.5 * dequantised + 2 * M * N


@FORMATS
@pytest.mark.parametrize(
    "tokens, experts, kernels",
    [
        (64, 32, dict(decode_packed_mlp=1)),
        (65, 32, dict(sort_by_expert=1, streamed_packed_dot=2, combine_rows=1)),
        (512, 8, dict(sort_by_expert=1, decoded_packed_dot=2, combine_rows=1)),
    ],
)
def test_kernels_of_a_layer_of_packed_weights(h200, name, tokens, experts, kernels):
    """Products read packed weights. For up to 128 pairs, one call sorts and multiplies rows."""
    struct = jax.ShapeDtypeStruct
    x, logits = struct((tokens, K), jnp.bfloat16), struct((tokens, experts), jnp.float32)

    def packed(*shape):
        return jax.eval_shape(lambda w: jgg.quantize(w, name), struct(shape, jnp.bfloat16))

    def layer(x, logits, *weights):
        return moe.dropless_mlp(x, moe.route(logits, 2), *weights, activation="swiglu_oai")

    wi, wo = packed(experts, K, N), packed(experts, N, K)
    program = h200.compile(layer, x, logits, wi, wi, wo)
    assert program.kernels == kernels
    assert program.temporary_bytes < 2.5e6 + 8 * tokens * (K + N)


@FORMATS
def test_rows_of_tall_tiles_are_gathered_by_a_kernel(h200, name):
    """Layers know the rows of each token, and this product knows only the token of each row."""
    struct, tokens, n = jax.ShapeDtypeStruct, 384 * G, 2048
    x, logits = struct((tokens, K), jnp.bfloat16), struct((tokens, G), jnp.float32)
    rows, sizes = struct((2 * tokens,), jnp.int32), struct((G,), jnp.int32)
    has_tall_tiles = name in ("mxfp4", "fp8_128x128")

    def packed(*shape):
        return jax.eval_shape(lambda w: jgg.quantize(w, name), struct(shape, jnp.bfloat16))

    def layer(x, logits, wi, wo):
        return moe.dropless_mlp(x, moe.route(logits, 2), wi, wi, wo)

    def product(x, wi, sizes, rows):
        return jgg.gated_ragged_dot(x, wi, wi, sizes, rows=rows)

    wi, wo = packed(G, K, n), packed(G, n, K)
    of_layer = h200.compile(layer, x, logits, wi, wo).kernels
    assert of_layer.pop("dispatch_rows", 0) == has_tall_tiles
    assert of_layer == dict(sort_by_expert=1, decoded_packed_dot=2, combine_rows=1)
    of_product = h200.compile(product, x, wi, sizes, rows).kernels
    assert of_product.pop("gather_rows", 0) == has_tall_tiles
    assert of_product == dict(decoded_packed_dot=1)


def test_rows_and_weights_in_fp8_are_two_kernels(h200):
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((G, N, K), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((G,), jnp.int32)
    q = jax.eval_shape(lambda w: jgg.quantize(w, "fp8_128x128", layout="rows"), w)

    def product(x, q, sizes):
        return jgg.ragged_dot(jgg.quantize(x, "fp8_1x128"), q, sizes, transpose_rhs=True)

    program = h200.compile(product, x, q, sizes)
    assert program.kernels == dict(quantize_rows=1, scaled_ragged_noncontracting=1)
