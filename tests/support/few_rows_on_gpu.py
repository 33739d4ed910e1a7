"""Compares the forward kernels with float64, with biases, any activation and any tile."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.mlp import layer
from jax_grouped_gemm._src.mlp.primitive import Options
from tests.support import mlp, oracle
from tests.support.mlp_on_gpu import (
    check_hidden,
    close,
    indices,
    matrices,
    mlp_operands,
    owned_rows,
    unit,
)
from tests.support.ops import random

BF16 = jnp.bfloat16


def options_of(tile, activation="silu"):
    with jgg.use_tiles(forward=tile):  # for groups of any size
        return Options.of(as_activation(activation), None, "cuda")


@partial(jax.jit, static_argnames=("tile", "activation", "residuals"))
def gated(operands, *, tile, activation, residuals):
    options = options_of(tile, activation)
    return layer.gated_ragged_dot(options, mlp_operands(operands), residuals=residuals)


@partial(jax.jit, static_argnames="tile")
def down(operands, *, tile):
    hidden = operands["hidden"]
    return layer.down(options_of(tile), mlp_operands(operands | dict(x=hidden)), hidden)


def bias_of_rows(bias, sizes, offset, m):
    """Returns the bias of each row's group, and zeros for rows of no group."""
    out = np.zeros((m, bias.shape[1]))
    for group, (start, end) in enumerate(oracle.group_rows(sizes, offset, len(bias), m)):
        out[start:end] = np.asarray(bias).astype(np.float64)[group]
    return out


def check_sum(actual, exact, bias, dtype):
    """Checks a float32 product to which `bias` is added before it is rounded."""
    sum_error = 2.0**-22 * exact.depth * (exact.magnitude + np.abs(bias))
    value = exact.value + bias
    tolerance = 1.02 * unit(dtype) * np.abs(value) + 1.1 * sum_error
    tolerance += float(jnp.finfo(dtype).smallest_subnormal)
    close(actual, value, tolerance, "the sum")


def check_random(rng, tile, sizes, m, *, embed, hidden, groups=None, offset=0, dtype=BF16):
    """Checks both products of an MLP. Optional operands are missing at random."""
    groups = len(sizes) if groups is None else groups
    owned = owned_rows(sizes, offset, groups, m)
    activation = rng.choice(mlp.ACTIVATIONS)
    tokens = int(rng.integers(1, 40))
    x = random(rng, (tokens, embed), dtype)
    rows = rng.integers(0, tokens, m).astype(np.int32)
    on_rows = x[rows]
    operands = dict(x=x, rows=rows)
    if rng.integers(2):
        x = on_rows.copy()
        x[~owned] = np.nan
        operands = dict(x=x)
    wi_0, wi_1 = (matrices(rng, (groups, embed, hidden), dtype, 2.0) for _ in range(2))
    if hidden % 64 == 0 and rng.integers(2):
        operands["wi"] = np.concatenate([wi_0, wi_1], axis=2)
    else:
        operands |= dict(wi_0=wi_0, wi_1=wi_1)
    shifts = [np.zeros((m, hidden))] * 2
    for i, name in enumerate(("b0", "b1")):
        if rng.integers(2):
            bias = random(rng, (groups, hidden), rng.choice([dtype, np.float32]))
            operands[name] = bias
            shifts[i] = bias_of_rows(bias, sizes, offset, m)
    weights = None
    if rng.integers(2):
        weights = rng.uniform(0.1, 1, m).astype(np.float32)
        operands["weights"] = weights
    operands |= indices(sizes, offset)

    got = gated(operands, tile=tile, activation=activation, residuals=True)
    out, gate, up = map(np.asarray, got)
    on_rows = np.where(owned[:, None], on_rows.astype(np.float32), 0).astype(dtype)
    for result, matrix, shift in ((gate, wi_0, shifts[0]), (up, wi_1, shifts[1])):
        check_sum(
            result, oracle.ragged_noncontracting(on_rows, matrix, sizes, offset), shift, dtype
        )
        assert not result[~owned].any()
    clean = np.where(owned, 1 if weights is None else weights, 0)
    check_hidden(out, gate, up, clean, activation)
    assert not out[~owned].any()
    (alone,) = gated(operands, tile=tile, activation=activation, residuals=False)
    np.testing.assert_array_equal(alone, out)

    wo = matrices(rng, (groups, hidden, embed), dtype)
    given = dict(hidden=out, wo=wo) | indices(sizes, offset)
    shift = np.zeros((m, embed))
    if rng.integers(2):
        given["bo"] = random(rng, (groups, embed), dtype)
        shift = bias_of_rows(given["bo"], sizes, offset, m)
        if weights is not None:
            given["weights"] = weights
            shift *= weights.astype(np.float64)[:, None]
    y = np.asarray(down(given, tile=tile))
    check_sum(y, oracle.ragged_noncontracting(out, wo, sizes, offset), shift, dtype)
    assert not y[~owned].any()
