"""Operands of products with quantised weights, and their exact results."""

from __future__ import annotations

import numpy as np

from jax_grouped_gemm import moe

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
