"""What XLA makes of products of quantised weights for an H200."""

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from tests.support import aot

M, G, K, N = 4096, 8, 512, 384


@pytest.fixture(scope="module")
def h200(extension) -> aot.Target:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA plugin is not installed")
    return aot.Target(aot.H200)


@pytest.mark.parametrize("name", ["mxfp4", "int4", "int8", "fp8"])
def test_weights_are_dequantised_once_and_a_kernel_multiplies_them(h200, name):
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((G, K, N), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((G,), jnp.int32)
    q = jax.eval_shape(lambda w: jgg.quantize(w, name), w)

    def both(x, q, sizes):
        y, vjp = jax.vjp(lambda x: jgg.ragged_dot(x, q, sizes, implementation="cuda"), x)
        return y, vjp(y)

    program = h200.compile(both, x, q, sizes)
    # The gradient of x is the same kernel, of weights that are dequantised again.
    assert program.kernels == dict(ragged_noncontracting=2)
    dequantised = 2 * G * K * N
    assert program.temporary_bytes < 2.5 * dequantised + 2 * M * N


def test_rows_and_weights_in_fp8_are_two_kernels(h200):
    x = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((G, N, K), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((G,), jnp.int32)
    q = jax.eval_shape(lambda w: jgg.quantize(w, "fp8_128x128", layout="rows"), w)

    def product(x, q, sizes):
        return jgg.ragged_dot(jgg.quantize(x, "fp8_1x128"), q, sizes, transpose_rhs=True)

    program = h200.compile(product, x, q, sizes)
    assert program.kernels == dict(quantize_rows=1, scaled_ragged_noncontracting=1)
