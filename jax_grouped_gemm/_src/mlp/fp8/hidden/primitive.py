"""The elementwise steps of an MLP in FP8 as primitives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.arrays import stacked
from jax_grouped_gemm._src.fp8.formats import NO_DERIVATIVE, Scaled
from jax_grouped_gemm._src.fp8.quantize import primitive as quantizers
from jax_grouped_gemm._src.mlp.fp8.hidden import call, reference
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenGradients, HiddenLayer, JoinedGradients
from jax_grouped_gemm._src.mlp.fp8.hidden.plan import HiddenPlan, plan_step, unfused_reason
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.plan import COMPOSED


def quantized_hidden(
    layer: HiddenLayer,
    projections: jax.Array,
    weights: jax.Array,
    implementation: Implementation,
    count: jax.Array | None = None,
) -> Scaled:
    """Computes `layer.quantized` of projections [m, P] and weights [m]. With `count` [1], only the
    first `count` rows are defined."""
    operands = projections, weights, jnp.zeros(0, jnp.int32) if count is None else count
    return Scaled(*HIDDEN.bind(*operands, layer=layer, implementation=implementation))


def hidden_gradients(
    layer: HiddenLayer,
    projections: jax.Array,
    dh: jax.Array,
    weights: jax.Array,
    implementation: Implementation,
) -> HiddenGradients:
    """Computes `layer.gradients` of projections [m, P], dh [m, F] and weights [m]."""
    params = dict(layer=layer, implementation=implementation)
    values, scales, *rest, hidden, dweights = GRADIENTS.bind(projections, dh, weights, **params)
    gate, up = rest if layer.has_up else (*rest, None)
    return HiddenGradients(Scaled(values, scales), gate, up, hidden, dweights)


def ragged_hidden_gradients(
    layer: HiddenLayer,
    projections: jax.Array,
    dh: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    implementation: Implementation,
    *,
    joined: bool = False,
) -> HiddenGradients | JoinedGradients:
    """Computes `hidden_gradients`, with gate, up and hidden as operands of FP8 weight gradients: in
    transposed blocks of each group's rows, see `quantizers.quantize_ragged`. With `joined`, returns
    `JoinedGradients` if a kernel computes them. In rows that no group owns, gradients of weights
    are zero if dh is zero, and all other results are undefined."""
    params: dict[str, Any] = dict(layer=layer, implementation=implementation)
    operands = projections, dh, weights, group_sizes
    is_fused = not unfused_reason(RAGGED_GRADIENTS.name, layer, operands)
    joined = joined and implementation != "xla" and is_fused
    *leaves, dweights = RAGGED_GRADIENTS.bind(*operands, joined=joined, **params)
    if joined:
        values, of_rows, of_gate, of_up, hidden, of_hidden = leaves
        hidden = Scaled(hidden, of_hidden)
        return JoinedGradients(values, of_rows, of_gate, of_up, hidden, dweights)
    rows, gate, *rest, hidden = (Scaled(*leaves[i : i + 2]) for i in range(0, len(leaves), 2))
    return HiddenGradients(rows, gate, rest[0] if rest else None, hidden, dweights)


def _avals_of(reference, op):
    """Returns a function that computes the avals of the operation `op()` from its reference."""

    def avals(*operands, implementation, **params):
        abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        results = jax.eval_shape(functools.partial(reference, **params), *abstract)
        return [op().unsharded_aval(operands, x.shape, x.dtype) for x in results]

    return avals


HIDDEN: Op = Op(
    name="quantize_hidden",
    operand_ranks=(2, 1, 1),
    targets=(call.HIDDEN_TARGET,),
    avals=_avals_of(reference.hidden, lambda: HIDDEN),
    planner=functools.partial(plan_step, "quantize_hidden"),
    call=call.hidden,
    reference=reference.hidden,
    multiple_results=True,
    is_matmul=False,
)

GRADIENTS: Op = Op(
    name="quantize_gradients",
    operand_ranks=(2, 2, 1),
    targets=(call.GRADIENTS_TARGET,),
    avals=_avals_of(reference.gradients, lambda: GRADIENTS),
    planner=functools.partial(plan_step, "quantize_gradients"),
    call=call.gradients,
    reference=reference.gradients,
    multiple_results=True,
    is_matmul=False,
)


def _composed(projections, dh, weights, group_sizes, *, layer, joined, implementation):
    """Composes separate operations, which have batch dimensions."""
    found = hidden_gradients(layer, projections, dh, weights, implementation)
    quantize = functools.partial(
        reference.transposed,
        quantizers.quantize_ragged,
        layer,
        group_sizes,
        implementation=implementation,
    )
    results = reference.in_blocks(layer, found, quantize)
    return reference.joined_in_one(results) if joined else results


def _call_ragged_gradients(plan: HiddenPlan, *operands):
    if plan.kernel != COMPOSED:
        return call.ragged_gradients(plan, *operands)
    problem = plan.problem
    return _composed(*operands, layer=problem.layer, joined=problem.joined, implementation="cuda")


def _batch_ragged_gradients(operands, dims, **params):
    out = jax.vmap(functools.partial(_composed, **params), dims)(*operands)
    return out, [0] * len(out)


RAGGED_GRADIENTS: Op = Op(
    name="quantize_ragged_gradients",
    operand_ranks=(2, 2, 1, 1),
    targets=(call.RAGGED_GRADIENTS_TARGET, call.JOINED_GRADIENTS_TARGET),
    avals=_avals_of(reference.ragged_gradients, lambda: RAGGED_GRADIENTS),
    planner=functools.partial(plan_step, "quantize_ragged_gradients"),
    call=_call_ragged_gradients,
    reference=reference.ragged_gradients,
    multiple_results=True,
    is_matmul=False,
)


def _register_batching(op: Op, *, has_count: bool) -> None:
    def rule(operands, dims, *, layer, implementation):
        # Compute all rows, because rows past the count of a batch element may have any value.
        no_count = [jnp.zeros(0, jnp.int32)] if has_count else []
        of_rows = len(operands) - has_count
        every = stacked(operands[:of_rows], dims[:of_rows])
        size, rows = every[0].shape[:2]
        folded = [x.reshape(size * rows, *x.shape[2:]) for x in every]
        out = op.bind(*folded, *no_count, layer=layer, implementation=implementation)
        return [x.reshape(size, rows, *x.shape[1:]) for x in out], [0] * len(out)

    op.def_batching(rule)


_register_batching(HIDDEN, has_count=True)
_register_batching(GRADIENTS, has_count=False)

RAGGED_GRADIENTS.def_batching(_batch_ragged_gradients)

for _op in (HIDDEN, GRADIENTS, RAGGED_GRADIENTS):
    _op.has_no_derivative(NO_DERIVATIVE)
