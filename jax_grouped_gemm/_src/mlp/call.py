"""From a plan of an MLP's operation to one custom call, or to the products that it is made of."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.mlp.problem import has_up, hidden_columns
from jax_grouped_gemm._src.mlp.rows import as_int32, on_rows
from jax_grouped_gemm._src.plan import COMPOSED
from jax_grouped_gemm._src.ragged.call import limit

GATED = "jax_grouped_gemm.gated_ragged_dot.v3"
GATED_TRANSPOSE = "jax_grouped_gemm.gated_ragged_dot_transpose.v4"
PAIRED = "jax_grouped_gemm.paired_ragged_dot.v2"
PAIRED_WEIGHTS = "jax_grouped_gemm.paired_weight_gradients.v1"
FEW_ROWS = "jax_grouped_gemm.few_rows_dot.v2"

NO_ACTIVATION = Epilogue(alpha=1.0, cubic=0.0, limit=math.inf, shift=0.0)


def gated(plan: MlpPlan, *operands: jax.Array) -> list[jax.Array]:
    """hidden and, if they are kept, gate and up."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given = dict(zip(plan.problem.operands, operands, strict=True))
    rows = given.get("rows", given["x"]).shape[0]
    if plan.gather == "before":
        given["x"] = on_rows(given["x"], given)
        del given["rows"]
    hidden = jax.ShapeDtypeStruct((rows, hidden_columns(given)), given["x"].dtype)
    kept = (1 + has_up(given)) * bool(plan.problem.params["residuals"])
    wi = given["wi" if "wi" in given else "wi_0"]
    optional = ("wi_1", "rows", "b0", "b1")
    activation = Epilogue.of(plan.problem.params["activation"])
    return _activated(plan, given, (given["x"], wi), optional, [hidden] * (1 + kept), activation)


def biased(plan: MlpPlan, *operands: jax.Array) -> jax.Array:
    """hidden wo + weights bo."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given = dict(zip(plan.problem.operands, operands, strict=True))
    hidden, wo = given["hidden"], given["wo"]
    y = jax.ShapeDtypeStruct((hidden.shape[0], wo.shape[2]), hidden.dtype)
    return _activated(plan, given, (hidden, wo), ("bo",), [y], None)[0]


def _activated(plan, given, factors, optional, results, activation) -> list[jax.Array]:
    """One call of a forward kernel, with those of the optional operands that are given."""
    optional = {name: given[name] for name in optional if name in given}
    if "rows" in optional:
        optional["rows"] = as_int32(optional["rows"], factors[0].shape[0])
    if "weights" in given:
        optional["weights"] = given["weights"].astype(jnp.float32)
    function = -1 if activation is None else activation.function
    attributes = (activation or NO_ACTIVATION).attributes()
    is_few_rows = plan.kernel.schedule == "few_rows"
    call = jax.ffi.ffi_call(FEW_ROWS if is_few_rows else GATED, results)
    return call(
        *factors,
        given["group_sizes"],
        given["group_offset"],
        *optional.values(),
        optional=" ".join(optional),
        zeroes_unowned=plan.problem.params["zeroes_unowned"],
        function=np.int32(function),
        divisor=np.int32(1),  # rows are tokens, not pairs
        **attributes,
        **_tile(plan),
    )


def gated_transpose(plan: MlpPlan, *operands: jax.Array) -> list[jax.Array]:
    """dgate, dup if there is an up, hidden and dweights."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given = dict(zip(plan.problem.operands, operands, strict=True))
    dy, wo, gate = (given[name] for name in ("dy", "wo", "gate"))
    rows, columns = gate.shape
    like_gate = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    up = given.get("up", jnp.zeros((1, columns), gate.dtype))
    like_up = jax.ShapeDtypeStruct(up.shape, up.dtype)
    assert plan.tile is not None
    # Of a gradient of weights, one sum for each tile's columns.
    partials = jax.ShapeDtypeStruct((cdiv(columns, plan.tile.tile_n), rows), jnp.float32)
    results = _call(
        GATED_TRANSPOSE,
        plan,
        given,
        (dy, wo, gate, up),
        (like_gate, like_up, like_gate, partials),
        # The gradients of gate and up are written where gate and up are.
        input_output_aliases={2: 0, 3: 1} if "up" in given else {2: 0},
    )
    dgate, dup, hidden, partial_sums = results
    gradients = [dgate, dup] if "up" in given else [dgate]
    # One after the other, an order that no compiler's reduction changes.
    return [*gradients, hidden, functools.reduce(operator.add, partial_sums)]


def paired(plan: MlpPlan, *operands: jax.Array) -> jax.Array:
    """a0 w0^T + a1 w1^T."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    a0, _, w0, *_ = operands
    out = jax.ShapeDtypeStruct((a0.shape[0], w0.shape[1]), a0.dtype)
    results = (out, jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8))
    zeroes_unowned = plan.problem.params["zeroes_unowned"]
    call = jax.ffi.ffi_call(PAIRED, results)
    return call(*operands, zeroes_unowned=zeroes_unowned, **_tile(plan))[0]


def paired_weights(plan: MlpPlan, *operands: jax.Array) -> list[jax.Array]:
    """x^T d0 and x^T d1 of each group."""
    if plan.kernel == COMPOSED:
        return plan.compose(*operands)
    given = dict(zip(plan.problem.operands, operands, strict=True))
    if plan.gather == "before":
        given["x"] = on_rows(given["x"], given)
    x, d0, d1 = (given[name] for name in ("x", "d0", "d1"))
    in_place = plan.gather == "in place"
    rows = as_int32(given["rows"], x.shape[0]) if in_place else jnp.zeros(1, jnp.int32)
    num_groups = plan.problem.params["num_groups"]
    gradient = jax.ShapeDtypeStruct((num_groups, x.shape[1], d0.shape[1]), x.dtype)
    workspace = jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8)
    call = jax.ffi.ffi_call(PAIRED_WEIGHTS, (gradient, gradient, workspace))
    *gradients, _ = call(
        x,
        rows,
        d0,
        d1,
        given["group_sizes"],
        given["group_offset"],
        has_rows=in_place,
        divisor=np.int32(1),  # rows are tokens, not pairs
        **limit(plan.problem.params["max_sms"]),
        **_tile(plan),
    )
    return gradients


def tangent(plan: MlpPlan, *operands: jax.Array) -> jax.Array:
    """The tangent of y, for which there is no kernel."""
    return plan.compose(*operands)


def _call(
    target, plan, given, factors, results, *, input_output_aliases=None, **attributes
) -> list[jax.Array]:
    """One call of a kernel with an activation; its results without the workspace."""
    weights = given.get("weights")
    epilogue = Epilogue.of(plan.problem.params["activation"])
    assert epilogue is not None  # the plan has a kernel for it
    results = (*results, jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8))
    call = jax.ffi.ffi_call(target, results, input_output_aliases=input_output_aliases)
    *results, _ = call(
        *factors,
        jnp.ones(1, jnp.float32) if weights is None else weights.astype(jnp.float32),
        given["group_sizes"],
        given["group_offset"],
        has_weights=weights is not None,
        has_up="up" in given,
        function=np.int32(epilogue.function),
        zeroes_unowned=plan.problem.params["zeroes_unowned"],
        **epilogue.attributes(),
        **_tile(plan),
        **attributes,
    )
    return results


def _tile(plan) -> dict[str, np.int32]:
    return {name: np.int32(size) for name, size in plan.tile.sizes().items()}
