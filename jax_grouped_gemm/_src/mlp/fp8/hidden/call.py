"""Calls of the elementwise steps of an MLP in FP8."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.fp8.formats import BLOCK, quantized_groups, quantized_rows
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.fp8.hidden import reference
from jax_grouped_gemm._src.mlp.fp8.hidden.plan import HiddenPlan
from jax_grouped_gemm._src.plan import COMPOSED

HIDDEN_TARGET = "jax_grouped_gemm.quantize_hidden.v1"
GRADIENTS_TARGET = "jax_grouped_gemm.quantize_gradients.v1"
RAGGED_GRADIENTS_TARGET = "jax_grouped_gemm.quantize_ragged_gradients.v1"
JOINED_GRADIENTS_TARGET = "jax_grouped_gemm.quantize_joined_gradients.v1"


def hidden(plan: HiddenPlan, projections, weights, count):
    """Runs `plan`, whose kernel is not `XLA`, on operands of its primitive."""
    if plan.kernel == COMPOSED:
        return reference.hidden(projections, weights, count, layer=plan.problem.layer)
    layer, rows = plan.problem.layer, projections.shape[0]
    results = _quantized(plan, layer.recipe.forward_dtype, rows)
    operands = (projections, weights, count)[: 3 if count.shape[-1] else 2]
    return list(_call(HIDDEN_TARGET, plan, results, *operands, **_rule(layer)))


def gradients(plan: HiddenPlan, projections, dh, weights):
    """Runs `plan`, whose kernel is not `XLA`, on operands of its primitive."""
    if plan.kernel == COMPOSED:
        return reference.gradients(projections, dh, weights, layer=plan.problem.layer)
    layer, operands = plan.problem.layer, (projections, dh, weights)
    like_dh = [jax.ShapeDtypeStruct(dh.shape, dh.dtype)] * 3
    quantized = _quantized(plan, layer.recipe.gradient_dtype, *projections.shape)
    results = [*quantized, *like_dh, _of_blocks(*dh.shape)]
    # Hidden overwrites its gradient.
    *found, partial_sums = _call(
        GRADIENTS_TARGET, plan, results, *operands, aliases={1: 4}, **_rule(layer)
    )
    return [*found, partial_sums.sum(axis=1)]


def _of_blocks(rows, columns):
    return jax.ShapeDtypeStruct((rows, cdiv(columns, BLOCK)), jnp.float32)


def _rule(layer):
    return dict(power_of_two=layer.recipe.power_of_two_scales)


def ragged_gradients(plan: HiddenPlan, projections, dh, weights, group_sizes):
    """Runs the kernel of `plan`, on operands of its primitive."""
    layer = plan.problem.layer
    recipe, (rows, columns) = layer.recipe, dh.shape
    results = _quantized(plan, recipe.gradient_dtype, *projections.shape)
    shapes = quantized_groups(rows, columns, group_sizes.shape[0])
    for dtype in (recipe.gradient_dtype, recipe.gradient_dtype, recipe.forward_dtype):
        dtypes = np.dtype(dtype), jnp.float32
        results += [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
    results.append(_of_blocks(rows, columns))
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
