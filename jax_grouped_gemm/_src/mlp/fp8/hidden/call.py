"""Calls of the elementwise steps of an MLP in FP8.

Where a scale is that of more than a block of 128, the kernel leaves 16 bits and the largest of each
block, and another one divides by the scales that follow.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.fp8.formats import (
    BLOCK,
    quantized_groups,
    quantized_rows,
)
from jax_grouped_gemm._src.fp8.quantize import primitive
from jax_grouped_gemm._src.fp8.quantize.reference import scales_of_largest, side_by_side
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.fp8.hidden import reference
from jax_grouped_gemm._src.mlp.fp8.hidden.plan import HiddenPlan
from jax_grouped_gemm._src.plan import COMPOSED

HIDDEN_TARGET = "jax_grouped_gemm.quantize_hidden.v1"
GRADIENTS_TARGET = "jax_grouped_gemm.quantize_gradients.v1"
HIDDEN_MAXIMA_TARGET = "jax_grouped_gemm.hidden_maxima.v1"
GRADIENT_MAXIMA_TARGET = "jax_grouped_gemm.gradient_maxima.v1"
RAGGED_GRADIENTS_TARGET = "jax_grouped_gemm.quantize_ragged_gradients.v1"
JOINED_GRADIENTS_TARGET = "jax_grouped_gemm.quantize_joined_gradients.v1"


def hidden(plan: HiddenPlan, projections, weights):
    """Runs `plan`, whose kernel is not `XLA`, on operands of its primitive."""
    if plan.kernel == COMPOSED:
        return reference.hidden(projections, weights, layer=plan.problem.layer)
    layer, rows = plan.problem.layer, projections.shape[0]
    if layer.recipe.scaling != "blockwise":
        hidden = jax.ShapeDtypeStruct((rows, layer.columns), projections.dtype)
        results = [hidden, _of_blocks(rows, layer.columns)]
        hidden, maxima = _call(HIDDEN_MAXIMA_TARGET, plan, results, projections, weights)
        return _over_scales(layer, maxima, [hidden], layer.recipe.forward_dtype)
    results = _quantized(plan, layer.recipe.forward_dtype, rows)
    return list(_call(HIDDEN_TARGET, plan, results, projections, weights, **_rule(layer)))


def gradients(plan: HiddenPlan, projections, dh, weights):
    """Runs `plan`, whose kernel is not `XLA`, on operands of its primitive."""
    if plan.kernel == COMPOSED:
        return reference.gradients(projections, dh, weights, layer=plan.problem.layer)
    layer, operands = plan.problem.layer, (projections, dh, weights)
    like_dh = [jax.ShapeDtypeStruct(dh.shape, dh.dtype)] * 3
    sums = _of_blocks(*dh.shape)
    # Hidden is written where its gradient is.
    if layer.recipe.scaling != "blockwise":
        results = [*like_dh, _of_blocks(*projections.shape), sums]
        *found, maxima, partial_sums = _call(
            GRADIENT_MAXIMA_TARGET, plan, results, *operands, aliases={1: 2}
        )
        rows = _over_scales(layer, maxima, found[:2], layer.recipe.gradient_dtype)
        return [*rows, *found, partial_sums.sum(axis=1)]
    quantized = _quantized(plan, layer.recipe.gradient_dtype, *projections.shape)
    results = [*quantized, *like_dh, sums]
    *found, partial_sums = _call(
        GRADIENTS_TARGET, plan, results, *operands, aliases={1: 4}, **_rule(layer)
    )
    return [*found, partial_sums.sum(axis=1)]


def _of_blocks(rows, columns):
    return jax.ShapeDtypeStruct((rows, cdiv(columns, BLOCK)), jnp.float32)


def _rule(layer):
    return dict(power_of_two=layer.recipe.power_of_two_scales)


def _over_scales(layer, maxima, stacks, dtype) -> list[jax.Array]:
    """Values and scales of what has these largest magnitudes of blocks: of all blocks of a row, or
    of all rows."""
    axes = (1,) if layer.recipe.scaling == "rowwise" else (0, 1)
    largest = maxima.max(axis=axes, keepdims=True)
    scales = scales_of_largest(largest, np.dtype(dtype), layer.recipe.power_of_two_scales)
    columns = jax.eval_shape(side_by_side, stacks).shape[1]
    (values,) = primitive.quantize_channels(
        *(x[None] for x in stacks),
        jnp.broadcast_to(scales.T, (1, maxima.shape[0])),
        jnp.ones((1, columns), jnp.float32),
        dtype=np.dtype(dtype),
        plain=True,
        transposed=False,
        implementation="cuda",
    )
    return [values[0], scales]


def ragged_gradients(plan: HiddenPlan, projections, dh, weights, group_sizes):
    """Runs the kernel of `plan`, on operands of its primitive."""
    layer = plan.problem.layer
    recipe, (rows, columns) = layer.recipe, dh.shape
    results = _quantized(plan, recipe.gradient_dtype, *projections.shape)
    shapes = quantized_groups(rows, columns, group_sizes.shape[0])
    for dtype in (recipe.gradient_dtype, recipe.gradient_dtype, recipe.forward_dtype):
        dtypes = np.dtype(dtype), jnp.float32
        results += [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
    results.append(jax.ShapeDtypeStruct((rows, cdiv(columns, BLOCK)), jnp.float32))
    operands = projections, dh, weights, group_sizes
    target = RAGGED_GRADIENTS_TARGET
    if plan.problem.joined:
        target, results = JOINED_GRADIENTS_TARGET, jax.eval_shape(reference.joined_in_one, results)
    *found, partial_sums = _call(target, plan, results, *operands, **_rule(layer))
    return [*found, partial_sums.sum(axis=1)]


def _quantized(plan, dtype, rows, columns=None):
    shapes = quantized_rows(rows, plan.problem.layer.columns if columns is None else columns)
    dtypes = np.dtype(dtype), jnp.float32
    return [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]


def _call(target, plan, results, *operands, aliases=None, **attributes):
    epilogue = Epilogue.of(plan.problem.layer.activation)
    assert epilogue is not None  # the plan has a kernel for it
    return jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(
        *operands, **attributes, **epilogue.attributes()
    )
