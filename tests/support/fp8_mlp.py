"""The MLP of experts in NumPy: exact products of operands that are quantised by a recipe."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import fp8_oracle, mlp, oracle

RECIPES = {
    "blockwise": jgg.Recipe.blockwise(),
    "blockwise, bf16 wgrad": jgg.Recipe.blockwise(wgrad="bf16"),
    "powers of two": jgg.Recipe(power_of_two_scales=True, gradient_dtype=jnp.float8_e5m2),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
OTHERS = [jgg.Recipe(forward="bf16"), jgg.Recipe(dgrad="bf16")]


def case(rng, **options):
    return mlp.case(rng, **dict(tokens=80, embed=160, hidden=136, experts=4) | options)


def cotangent(case, rng):
    return rng.standard_normal((len(case.on_rows), case.wo.shape[2])).astype(np.float32)


@dataclass
class Quantiser:
    """Quantises operands and dequantises them to float64."""

    recipe: object

    def rows(self, x, dtype):
        """Returns rows x [m, k], quantised for a product that keeps the rows."""
        return self._matrix(x, (1, 128), dtype)

    def weights(self, w):
        """Returns matrices w [g, k, n], quantised in blocks of 128 x 128."""
        return np.stack([self._matrix(x, (128, 128), self.recipe.forward_dtype) for x in w])

    def _matrix(self, x, block, dtype):
        quantized = fp8_oracle.quantize(x, block, dtype, self.recipe.power_of_two_scales)
        return fp8_oracle.dequantize(*quantized)

    def tokens(self, x, dtype, owned=slice(None)):
        """Returns tokens [T, c] whose copies are contracted. In FP8 each column has one scale."""
        x = np.asarray(x, np.float32)
        if self.recipe.wgrad == "bf16":
            return x.astype(jnp.bfloat16).astype(np.float64)
        tokens = np.zeros(x.shape)
        if len(x[owned]):
            tokens[owned] = self._matrix(x[owned], (len(x[owned]), 1), dtype)
        return tokens

    def contracted(self, x, sizes, dtype):
        """Returns rows [m, c] that are contracted. An FP8 block has 128 rows of a group."""
        x = np.asarray(x, np.float32)
        if self.recipe.wgrad == "bf16":
            return x.astype(jnp.bfloat16).astype(np.float64)
        rows = np.zeros(x.shape)
        for start, end in oracle.group_rows(sizes, 0, len(sizes), len(x)):
            if end > start:
                rows[start:end] = self._matrix(x[start:end], (128, 1), dtype)
        return rows


def padded(hidden: int) -> int:
    """Returns the number of columns of gate with padding, after which those of up begin."""
    return -(-hidden // 128) * 128


def joined(gate, up):
    """Joins gate and up along the last axis, because they are quantised together."""
    growth = [(0, 0)] * (gate.ndim - 1) + [(0, padded(gate.shape[-1]) - gate.shape[-1])]
    return np.concatenate([np.pad(x, growth) for x in (gate, up)], axis=-1)


def layer(case: mlp.Case, recipe, activation: str, dy):
    """Returns y and the gradients of x, wi_0, wi_1, wo and weights, for the gradient dy [m, D].

    Intermediate results are float32, as in a layer of float32 operands. The gradient of a token is
    the sum of the gradients of its rows.
    """
    quantiser = Quantiser(recipe)
    hidden, experts = case.wi_0.shape[2], len(case.wi_0)
    forward, gradient = recipe.forward_dtype, recipe.gradient_dtype
    offset = case.offset or 0

    def times(rows, matrices):
        """Returns rows [m, k] times the matrices [g, k, n] of their experts, rounded to float32."""
        return np.float32(oracle.ragged_noncontracting(rows, matrices, case.sizes, offset).value)

    def on_rows(x):
        return x if case.rows is None else x[case.rows]

    wi = joined(case.wi_0, case.wi_1)
    up_at = padded(hidden)
    x_rows = on_rows(quantiser.rows(case.x, forward))
    projections = times(x_rows, quantiser.weights(wi))
    gate, up = projections[:, :hidden], projections[:, up_at : up_at + hidden]
    weights = np.ones(len(gate)) if case.weights is None else case.weights
    owned = np.zeros(len(gate), bool)
    for start, end in case.windows:
        owned[start:end] = True
    weights = np.where(owned, weights, 0)[:, None].astype(np.float64)
    value, factor, slope, up_slope = mlp.activated(activation, gate, up)
    h = np.float32(value * factor * weights)
    y = times(quantiser.rows(h, forward), quantiser.weights(case.wo))

    dh = times(quantiser.rows(dy, gradient), quantiser.weights(case.wo).swapaxes(1, 2))
    dh = dh.astype(np.float64)
    dgate = np.float32(dh * weights * factor * slope)
    dup = np.float32(dh * weights * value * up_slope)
    rows = quantiser.rows(joined(dgate, dup), gradient)
    dx = times(rows, quantiser.weights(wi).swapaxes(1, 2)).astype(np.float64)
    if case.rows is not None:
        total = np.zeros((len(case.x), dx.shape[1]))
        np.add.at(total, case.rows, dx)
        dx = total
    of_weights = functools.partial(
        oracle.ragged_contracting, group_sizes=case.sizes, group_offset=offset, num_groups=experts
    )
    x = on_rows(quantiser.tokens(case.x, forward, owned if case.rows is None else slice(None)))
    dy = quantiser.tokens(dy, gradient, owned)
    dgate, dup = (quantiser.contracted(z, case.sizes, gradient) for z in (dgate, dup))
    h = quantiser.contracted(h, case.sizes, forward)
    weights_gradients = [of_weights(x, dgate), of_weights(x, dup), of_weights(h, dy)]
    results = [y, dx, *(exact.value for exact in weights_gradients)]
    if case.weights is not None:
        results.append((dh * value * factor).sum(axis=1) * owned)
    return results
