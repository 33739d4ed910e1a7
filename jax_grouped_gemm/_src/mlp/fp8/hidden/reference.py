"""The elementwise steps of an MLP in FP8 in pure JAX."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.fp8.quantize.reference import quantize_ragged
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenGradients


def hidden(projections, weights, count, *, layer):
    """Returns the results of a `quantize_hidden`."""
    return list(layer.quantized(projections, weights))


def gradients(projections, dh, weights, *, layer):
    """Returns the results of a `quantize_gradients`."""
    found = layer.gradients(projections, dh, weights)
    return [x for x in jax.tree.leaves(found) if x is not None]


def ragged_gradients(projections, dh, weights, group_sizes, *, layer, joined=False):
    """Returns the results of a `quantize_ragged_gradients`."""
    found = layer.gradients(projections, dh, weights)
    quantize = functools.partial(transposed, quantize_ragged, layer, group_sizes)
    results = in_blocks(layer, found, quantize)
    return joined_in_one(results) if joined else results


def joined_in_one(results: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the results of `ragged_gradients`, with gradients of gate and up in one array."""
    *forms, hidden, hidden_scales, dweights = results
    values, scales = forms[0::2], forms[1::2]
    return [jnp.concatenate([x.ravel() for x in values]), *scales, hidden, hidden_scales, dweights]


def transposed(quantize, layer, group_sizes, x, dtype, **params):
    """Quantises rows x [m, n] in transposed blocks, by `quantize_ragged` or its primitive."""
    return quantize(
        x,
        group_sizes,
        dtype=np.dtype(dtype),
        power_of_two=layer.recipe.power_of_two_scales,
        plain=False,
        transposed=True,
        **params,
    )


def in_blocks(layer, found: HiddenGradients, quantize) -> list[jax.Array]:
    """Returns results of `ragged_gradients` from `found`; `quantize` is a partial `transposed`."""
    assert found.projections is not None
    recipe = layer.recipe
    operands = [(found.gate, recipe.gradient_dtype), (found.up, recipe.gradient_dtype)]
    operands = [(x, dtype) for x, dtype in operands if x is not None]
    operands.append((found.hidden, recipe.forward_dtype))
    transposed = [y for x, dtype in operands for y in quantize(x, dtype)]
    return [*found.projections, *transposed, found.weights]
