"""Runs the plan of an MLP's operation: one custom call, or its separate products."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import (
    DownOperands,
    DownWeightsOperands,
    GradientOperands,
    MlpOperands,
    PairedOperands,
    PairedWeightsOperands,
)
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.mlp.rows import on_rows
from jax_grouped_gemm._src.plan import COMPOSED
from jax_grouped_gemm._src.ragged.call import limit

GATED_TARGET = "jax_grouped_gemm.gated_ragged_dot.v3"
GATED_TRANSPOSE_TARGET = "jax_grouped_gemm.gated_ragged_dot_transpose.v5"
PAIRED_TARGET = "jax_grouped_gemm.paired_ragged_dot.v2"
PAIRED_WEIGHTS_TARGET = "jax_grouped_gemm.paired_weight_gradients.v1"
DOWN_WEIGHTS_TARGET = "jax_grouped_gemm.down_weight_gradient.v1"
FEW_ROWS_TARGET = "jax_grouped_gemm.few_rows_dot.v2"

NO_ACTIVATION = Epilogue(alpha=1.0, cubic=0.0, limit=math.inf, shift=0.0)


def gated(plan: MlpPlan, *operands: jax.Array) -> list[jax.Array]:
    """Returns hidden and, if they are kept, gate and up."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given: MlpOperands = plan.problem.given(operands)
    x, rows, experts = given.rows.x, given.rows.rows, given.experts
    if plan.gather == "before":
        x, rows = on_rows(given.rows), None
    hidden = jax.ShapeDtypeStruct((given.num_rows, experts.hidden_columns), x.dtype)
    kept = (1 + experts.has_up) * bool(plan.problem.params["residuals"])
    wi, *wi_1 = experts.projections
    optional = dict(wi_1=wi_1[0] if wi_1 else None, rows=rows, b0=experts.b0, b1=experts.b1)
    activation = Epilogue.of(plan.problem.params["activation"])
    return _activated(plan, given, (x, wi), optional, [hidden] * (1 + kept), activation)


def biased(plan: MlpPlan, *operands: jax.Array) -> jax.Array:
    """Computes hidden wo + weights bo."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given: DownOperands = plan.problem.given(operands)
    y = jax.ShapeDtypeStruct((given.num_rows, given.wo.shape[2]), given.hidden.dtype)
    return _activated(plan, given, (given.hidden, given.wo), dict(bo=given.bo), [y], None)[0]


def _activated(
    plan, given: MlpOperands | DownOperands, factors, optional, results, activation
) -> list[jax.Array]:
    """Calls a forward kernel with the optional operands that are given."""
    if given.weights is not None:
        optional = dict(optional, weights=given.weights.astype(jnp.float32))
    optional = {name: x for name, x in optional.items() if x is not None}
    function = -1 if activation is None else activation.function
    attributes = (activation or NO_ACTIVATION).attributes()
    is_few_rows = plan.kernel.schedule == "few_rows"
    call = jax.ffi.ffi_call(FEW_ROWS_TARGET if is_few_rows else GATED_TARGET, results)
    found = call(
        *factors,
        *given.groups.indices,
        *optional.values(),
        optional=" ".join(optional),
        zeroes_unowned=plan.problem.params["zeroes_unowned"],
        function=np.int32(function),
        divisor=np.int32(1),  # 1, because rows name tokens, not pairs
        **attributes,
        **_tile(plan),
    )
    return list(found)


def gated_transpose(plan: MlpPlan, *operands: jax.Array) -> list[jax.Array]:
    """Computes dgate, dup if there is an up, hidden and dweights."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given: GradientOperands = plan.problem.given(operands)
    gate, has_up = given.gate, given.up is not None
    in_place = plan.gather == "in place"
    dy = given.rows.x if in_place else on_rows(given.rows)
    tokens = given.rows.rows if in_place else jnp.zeros(1, jnp.int32)
    rows, columns = gate.shape
    like_gate = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    up = jnp.zeros((1, columns), gate.dtype) if given.up is None else given.up
    like_up = jax.ShapeDtypeStruct(up.shape, up.dtype)
    assert plan.tile is not None
    # Partial sums of the gradients of weights: one for the columns of each tile.
    partials = jax.ShapeDtypeStruct((cdiv(columns, plan.tile.tile_n), rows), jnp.float32)
    results = _call(
        GATED_TRANSPOSE_TARGET,
        plan,
        given,
        (dy, tokens, given.wo, gate, up),
        (like_gate, like_up, like_gate, partials),
        # The gradients of gate and up overwrite gate and up.
        input_output_aliases={3: 0, 4: 1} if has_up else {3: 0},
    )
    dgate, dup, hidden, partial_sums = results
    gradients = [dgate, dup] if has_up else [dgate]
    # Add in a fixed order: a compiler may choose another order for a reduction.
    return [*gradients, hidden, functools.reduce(operator.add, partial_sums)]


def paired(plan: MlpPlan, *operands: jax.Array) -> jax.Array:
    """Computes a0 w0^T + a1 w1^T."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given: PairedOperands = plan.problem.given(operands)
    out = jax.ShapeDtypeStruct((given.a0.shape[0], given.w0.shape[1]), given.a0.dtype)
    results = (out, jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8))
    zeroes_unowned = plan.problem.params["zeroes_unowned"]
    call = jax.ffi.ffi_call(PAIRED_TARGET, results)
    return call(*operands, zeroes_unowned=zeroes_unowned, **_tile(plan))[0]


def paired_weights(plan: MlpPlan, *operands: jax.Array) -> list[jax.Array]:
    """Computes x^T d0 and x^T d1 of each group."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given: PairedWeightsOperands = plan.problem.given(operands)
    x, rows = given.rows.x, given.rows.rows
    if plan.gather == "before":
        x = on_rows(given.rows)
    in_place = plan.gather == "in place"
    tokens = rows if in_place else jnp.zeros(1, jnp.int32)
    num_groups = plan.problem.params["num_groups"]
    gradient = jax.ShapeDtypeStruct((num_groups, x.shape[1], given.d0.shape[1]), x.dtype)
    workspace = jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8)
    call = jax.ffi.ffi_call(PAIRED_WEIGHTS_TARGET, (gradient, gradient, workspace))
    *gradients, _ = call(
        x,
        tokens,
        given.d0,
        given.d1,
        *given.groups.indices,
        has_rows=in_place,
        divisor=np.int32(1),  # 1, because rows name tokens, not pairs
        **limit(plan.problem.params["max_sms"]),
        **_tile(plan),
    )
    return gradients


def down_weights(plan: MlpPlan, *operands: jax.Array) -> jax.Array:
    """Computes hidden^T dy of each group."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given: DownWeightsOperands = plan.problem.given(operands)
    dy, hidden = given.rows.x, given.hidden
    shape = plan.problem.params["num_groups"], hidden.shape[1], dy.shape[1]
    workspace = jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8)
    results = jax.ShapeDtypeStruct(shape, dy.dtype), workspace
    call = jax.ffi.ffi_call(DOWN_WEIGHTS_TARGET, results)
    factors = dy, given.rows.rows, hidden
    return call(*factors, *given.groups.indices, divisor=np.int32(1), **_tile(plan))[0]


def _call(
    target, plan, given: GradientOperands, factors, results, *, input_output_aliases=None
) -> list[jax.Array]:
    """Calls a kernel with an activation, and returns its results without the workspace."""
    weights = given.weights
    epilogue = Epilogue.of(plan.problem.params["activation"])
    assert epilogue is not None  # the plan has a kernel for it
    results = (*results, jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8))
    call = jax.ffi.ffi_call(target, results, input_output_aliases=input_output_aliases)
    *results, _ = call(
        *factors,
        jnp.ones(1, jnp.float32) if weights is None else weights.astype(jnp.float32),
        *given.groups.indices,
        has_rows=plan.gather == "in place",
        divisor=np.int32(1),  # 1, because rows name tokens, not pairs
        has_weights=weights is not None,
        has_up=given.up is not None,
        function=np.int32(epilogue.function),
        zeroes_unowned=plan.problem.params["zeroes_unowned"],
        **epilogue.attributes(),
        **_tile(plan),
    )
    return results


def _tile(plan) -> dict[str, np.int32]:
    return {name: np.int32(size) for name, size in plan.tile.sizes().items()}
