"""Operands of FP8 gradients of weights, as they are copied and computed, on the device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.activations import ACTIVATIONS
from jax_grouped_gemm._src.fp8 import primitive
from jax_grouped_gemm._src.mlp.fp8.hidden import HiddenLayer
from jax_grouped_gemm._src.mlp.fp8.hidden_op import hidden_gradients, ragged_hidden_gradients
from tests.support import mlp
from tests.support.dtypes import BF16, E4M3, E5M2, F32
from tests.support.fp8_mlp_on_gpu import elementwise_operands

FORMATS = pytest.mark.parametrize(
    "dtype, recipe",
    [
        (BF16, jgg.Recipe()),
        (BF16, jgg.Recipe(gradient_dtype=E5M2, power_of_two_scales=True)),
        (jnp.float16, jgg.Recipe(forward_dtype=E5M2)),
    ],
)


def assert_same_bits(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.float32(one), np.float32(other))


@pytest.mark.parametrize("source", [BF16, jnp.float16, F32])
@pytest.mark.parametrize("columns", [128, 100, 203, 1536])
def test_gathered_rows_are_those_of_separate_kernels(columns, source, rng):
    tokens, rows = 300, 1000
    x = jnp.asarray(rng.standard_normal((tokens, columns)), source)
    where = jnp.asarray(rng.integers(-2, tokens + 2, rows), jnp.int32)
    copies = x.at[where].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    for sizes in ([rows], [0, 1, 400, 599], [7, 0, 130, 60], [1] * 200, [0, 0]):
        sizes = jnp.asarray(sizes, jnp.int32)
        for dtype, power_of_two in ((E4M3, False), (E5M2, True)):
            params = dict(dtype=np.dtype(dtype), power_of_two=power_of_two, implementation="cuda")
            got = jax.jit(partial(primitive.quantize_gathered, **params))(x, where, sizes)
            want = partial(primitive.quantize_ragged, plain=False, transposed=True, **params)
            assert_same_bits(got, jax.jit(want)(copies, sizes))


@FORMATS
@pytest.mark.parametrize("activation", mlp.FUSED)
def test_transposed_gradients_are_those_of_separate_kernels(activation, dtype, recipe, rng):
    """Bit for bit, whatever the groups: none, empty ones, partial blocks, rows of no group."""
    for rows, columns in [(300, 256), (1000, 768), (130, 200), (700, 136)]:
        layer = HiddenLayer(ACTIVATIONS[activation], columns, True, recipe)
        operands = elementwise_operands(rng, layer, rows, dtype)
        for sizes in ([rows], [0, 1, rows - 1], [7, 0, 130, 60], [rows // 3] * 2, [0, 0]):
            sizes = jnp.asarray(sizes, jnp.int32)
            got = jax.jit(partial(ragged_hidden_gradients, layer, implementation="cuda"))(
                *operands, sizes
            )
            want = jax.jit(partial(hidden_gradients, layer, implementation="cuda"))(*operands)
            assert_same_bits(got.projections, want.projections)
            np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5, atol=1e-5)
            for name, fp8 in (
                ("gate", recipe.gradient_dtype),
                ("up", recipe.gradient_dtype),
                ("hidden", recipe.forward_dtype),
            ):
                assert_same_bits(
                    getattr(got, name),
                    jgg.quantize_ragged(
                        getattr(want, name),
                        sizes,
                        dtype=fp8,
                        power_of_two_scales=recipe.power_of_two_scales,
                        implementation="cuda",
                    )[2:],
                )
