"""Operands of products with quantised weights, and their exact results."""

from __future__ import annotations

import jax
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

FORMATS = "mxfp4", "int4", "int8", "fp8", "fp8_128x128"
SIZES = np.array([5, 0, 9, 2], np.int32)
EXPERTS, EMBED, HIDDEN = 4, 96, 160


def grouped(x, w, sizes):
    """Returns the product in float64, group by group."""
    ends = np.cumsum(sizes)
    out = np.zeros((x.shape[0], w.shape[2]))
    for i, end in enumerate(ends):
        rows = slice(end - sizes[i], end)
        out[rows] = np.asarray(x[rows], np.float64) @ np.asarray(w[i], np.float64)
    return out


def routed(rng, tokens=16, top_k=2):
    x = rng.standard_normal((tokens, EMBED)).astype(np.float32)
    return x, moe.route(rng.standard_normal((tokens, EXPERTS)).astype(np.float32), top_k)


def weights(rng, name, shape=(EXPERTS, EMBED, HIDDEN)):
    """Returns quantised weights, and their exact values in float32."""
    x = rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[1]).astype(np.float32)
    q = jgg.quantize(x, name)
    return q, np.asarray(jgg.dequantize(q, np.float32))


def mlp_weights(rng, name):
    shapes = [(EXPERTS, EMBED, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, EMBED)]
    pairs = [weights(rng, name, shape) for shape in shapes]
    return [q for q, _ in pairs], [w for _, w in pairs]


def with_gradient(layer):
    """Returns a jitted function of dy, x, routing and weights: the layer's y and gradient of x."""

    @jax.jit
    def run(dy, x, routing, *weights):
        y, pullback = jax.vjp(lambda x: layer(x, routing, *weights), x)
        return y, pullback(dy)[0]

    return run


of_one_device = with_gradient(moe.dropless_mlp)
