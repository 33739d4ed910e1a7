"""Compares the kernels' elementwise steps of an FP8 MLP with the reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.activations import ACTIVATIONS
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer
from jax_grouped_gemm._src.mlp.fp8.hidden.primitive import hidden_gradients, quantized_hidden
from tests.support import fp8_oracle
from tests.support.dtypes import F32


def dequantised(pair):
    return fp8_oracle.dequantize(*map(np.asarray, pair))


def assert_quantised(pair, want):
    """Asserts equality, except where the activation's last bit decides how a number is rounded."""
    values = np.asarray(pair.values)
    one, other = dequantised(pair), dequantised(want)
    # The reference's gelu has 1 + tanh, which cancels where the gate is negative. If the result is
    # much smaller than others, all its bits are noise. The scale of a block of such results is
    # noise too.
    noise = 4e-6 * np.abs(other).max()
    blocks = np.pad(np.abs(other), [(0, 0), (0, -other.shape[1] % 128)])
    matters = blocks.reshape(len(blocks), -1, 128).max(axis=2) > 2**9 * noise
    scales, exact = (np.broadcast_to(x.scales, matters.shape) for x in (pair, want))
    np.testing.assert_allclose(scales[matters], exact[matters], rtol=2**-7)
    # A scale of several blocks is as accurate as the largest of these blocks.
    spans = tuple(axis for axis in (0, 1) if want.scales.shape[axis] == 1)
    sure = np.broadcast_to(matters.any(axis=spans, keepdims=True), matters.shape)
    matters, sure, exact = (
        np.repeat(x, 128, axis=1)[:, : one.shape[1]] for x in (matters, sure, exact)
    )
    same = values.astype(np.float32) == np.asarray(want.values).astype(np.float32)
    assert same[matters].sum() >= 0.9 * matters.sum()
    step = 2.0 ** -jnp.finfo(values.dtype).nmant
    bound = 1.02 * step * np.abs(other) + np.where(sure, exact * 2.0**-6, 0) + noise
    assert np.all(np.abs(one - other) <= bound)


def elementwise_operands(rng, layer, rows, dtype):
    """Returns projections, the gradient of hidden, and weights of rows, of which one is zero."""
    gate, up, dh = (
        jnp.asarray(2 * rng.standard_normal((rows, layer.columns)), dtype) for _ in range(3)
    )
    weights = jnp.asarray(rng.uniform(0, 1, rows), F32).at[rows // 2].set(0)
    return layer.join(gate, up), dh, weights


def check_elementwise_steps(rng, activation, rows, columns, dtype, recipe):
    """Checks quantised hidden values, and the gradients."""
    layer = HiddenLayer(ACTIVATIONS[activation], columns, True, recipe)
    projections, dh, weights = elementwise_operands(rng, layer, rows, dtype)
    got, want = (
        jax.jit(partial(quantized_hidden, layer, implementation=name))(projections, weights)
        for name in ("cuda", "xla")
    )
    assert_quantised(got, want)
    got, want = (
        jax.jit(partial(hidden_gradients, layer, implementation=name))(projections, dh, weights)
        for name in ("cuda", "xla")
    )
    assert_quantised(got.projections, want.projections)
    for name in ("gate", "up", "hidden", "weights"):
        one, other = (np.float64(getattr(x, name)) for x in (got, want))
        np.testing.assert_allclose(
            one, other, rtol=2**-6, atol=1e-4 * max(np.abs(other).max(), 1e-6)
        )
