"""The elementwise steps of an MLP in FP8 as primitives: a kernel each, or XLA's passes.

Where a scale is that of more than a block of 128, the kernel leaves 16 bits and the largest of each
block, and another one divides by the scales that follow.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.arrays import cdiv
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.fp8 import primitive, reference
from jax_grouped_gemm._src.fp8.formats import BLOCK, Scaled, quantized_groups, quantized_rows
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.fp8.hidden import HiddenGradients, HiddenLayer, JoinedGradients
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.plan import AS_ASKED, COMPOSED, XLA, Kernel, Plan, symbolic_sizes
from jax_grouped_gemm._src.sizes import too_large_operands

HIDDEN_TARGET = "jax_grouped_gemm.quantize_hidden.v1"
GRADIENTS_TARGET = "jax_grouped_gemm.quantize_gradients.v1"
HIDDEN_MAXIMA_TARGET = "jax_grouped_gemm.hidden_maxima.v1"
GRADIENT_MAXIMA_TARGET = "jax_grouped_gemm.gradient_maxima.v1"
RAGGED_GRADIENTS_TARGET = "jax_grouped_gemm.quantize_ragged_gradients.v1"
JOINED_GRADIENTS_TARGET = "jax_grouped_gemm.quantize_joined_gradients.v1"
KERNEL_DTYPES = (jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class HiddenProblem:
    """Static description of one elementwise step: its name, what is computed, and whether the
    results are `JoinedGradients`."""

    op: str
    layer: HiddenLayer
    joined: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.layer}"


HiddenPlan = Plan[HiddenProblem]


def quantized_hidden(
    layer: HiddenLayer,
    projections: jax.Array,
    weights: jax.Array,
    implementation: Implementation,
) -> Scaled:
    """`layer.quantized` of projections [m, P] and weights [m]."""
    return Scaled(*HIDDEN.bind(projections, weights, layer=layer, implementation=implementation))


def hidden_gradients(
    layer: HiddenLayer,
    projections: jax.Array,
    dh: jax.Array,
    weights: jax.Array,
    implementation: Implementation,
) -> HiddenGradients:
    """`layer.gradients` of projections [m, P], dh [m, F] and weights [m]."""
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
    """`hidden_gradients`, but gate, up and hidden as operands of an FP8 product of rows by rows:
    in transposed blocks of the rows of each group, see `primitive.quantize_ragged`. If `joined`,
    and a kernel computes them, `JoinedGradients`."""
    params: dict[str, Any] = dict(layer=layer, implementation=implementation)
    operands = projections, dh, weights, group_sizes
    joined = joined and implementation != "xla" and not _unfused_ragged_reason(layer, operands)
    *leaves, dweights = RAGGED_GRADIENTS.bind(*operands, joined=joined, **params)
    if joined:
        values, of_rows, of_gate, of_up, hidden, of_hidden = leaves
        hidden = Scaled(hidden, of_hidden)
        return JoinedGradients(values, of_rows, of_gate, of_up, hidden, dweights)
    rows, gate, *rest, hidden = (Scaled(*leaves[i : i + 2]) for i in range(0, len(leaves), 2))
    return HiddenGradients(rows, gate, rest[0] if rest else None, hidden, dweights)


def _plan(op: str, avals: Sequence[Any], params: Mapping[str, Any], unfused: str) -> HiddenPlan:
    problem = HiddenProblem(op, params["layer"], params.get("joined", False))
    if params["implementation"] == "xla":
        return Plan(problem, XLA, AS_ASKED)
    if reason := too_large_operands(avals):
        return Plan(problem, XLA, reason)
    if unfused:
        return Plan(problem, COMPOSED, unfused)
    return Plan(problem, Kernel(op), kernel_problem=problem)


def _unfused_reason(layer: HiddenLayer, avals: Sequence[Any]) -> str:
    projections = avals[0]
    if not layer.has_up:
        return "the kernels multiply gate and up, and there is no up"
    epilogue = Epilogue.of(layer.activation)
    if epilogue is None or not epilogue.is_sigmoid:
        return f"no kernel has the activation {layer.activation}"
    if projections.dtype not in KERNEL_DTYPES or any(
        x.dtype != projections.dtype for x in avals[1:-1]
    ):
        return f"the kernels take bfloat16 or float16, got {projections.dtype}"
    if reason := symbolic_sizes(avals):
        return reason
    return "there is nothing to compute" if any(0 in x.shape for x in avals) else ""


def plan_hidden(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> HiddenPlan:
    """Plans a `quantize_hidden`."""
    return _plan("quantize_hidden", avals, params, _unfused_reason(params["layer"], avals))


def plan_gradients(avals: Sequence[Any], params: Mapping[str, Any], target: Target) -> HiddenPlan:
    """Plans a `quantize_gradients`."""
    return _plan("quantize_gradients", avals, params, _unfused_reason(params["layer"], avals))


def plan_ragged_gradients(
    avals: Sequence[Any], params: Mapping[str, Any], target: Target
) -> HiddenPlan:
    """Plans a `quantize_ragged_gradients`."""
    reason = _unfused_ragged_reason(params["layer"], avals)
    return _plan("quantize_ragged_gradients", avals, params, reason)


def _unfused_ragged_reason(layer: HiddenLayer, avals: Sequence[Any]) -> str:
    """Why no kernel computes a `quantize_ragged_gradients`, empty if one does."""
    _, dh, _, group_sizes = avals
    if reason := _unfused_reason(layer, avals[:3]):
        return reason
    if layer.recipe.scaling != "blockwise":
        return f"the kernel scales blocks of 128, not {layer.recipe.scaling}"
    if reason := symbolic_sizes(avals):
        return reason
    if 0 in group_sizes.shape:
        return "there are no groups"
    return f"the kernel has columns in eights, got {dh.shape[1]}" if dh.shape[1] % 8 else ""


def _hidden_reference(projections, weights, *, layer):
    return list(layer.quantized(projections, weights))


def _gradients_reference(projections, dh, weights, *, layer):
    found = layer.gradients(projections, dh, weights)
    return [x for x in jax.tree.leaves(found) if x is not None]


def _ragged_gradients_reference(projections, dh, weights, group_sizes, *, layer, joined=False):
    found = layer.gradients(projections, dh, weights)
    quantize = functools.partial(_transposed, reference.quantize_ragged, layer, group_sizes)
    results = _in_blocks(layer, found, quantize)
    return _joined(results) if joined else results


def _joined(results: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of `RAGGED_GRADIENTS` with those of gate and up in one."""
    *pairs, hidden, hidden_scales, dweights = results
    values, scales = pairs[0::2], pairs[1::2]
    return [jnp.concatenate([x.ravel() for x in values]), *scales, hidden, hidden_scales, dweights]


def _transposed(quantize, layer, group_sizes, x, dtype, **params):
    return quantize(
        x,
        group_sizes,
        dtype=np.dtype(dtype),
        power_of_two=layer.recipe.power_of_two_scales,
        plain=False,
        transposed=True,
        **params,
    )


def _in_blocks(layer, found: HiddenGradients, quantize) -> list[jax.Array]:
    """The results of `RAGGED_GRADIENTS`."""
    assert found.projections is not None
    recipe = layer.recipe
    operands = [(found.gate, recipe.gradient_dtype), (found.up, recipe.gradient_dtype)]
    operands = [(x, dtype) for x, dtype in operands if x is not None]
    operands.append((found.hidden, recipe.forward_dtype))
    transposed = [y for x, dtype in operands for y in quantize(x, dtype)]
    return [*found.projections, *transposed, found.weights]


def _call_hidden(plan: HiddenPlan, projections, weights):
    if plan.kernel == COMPOSED:
        return _hidden_reference(projections, weights, layer=plan.problem.layer)
    layer, rows = plan.problem.layer, projections.shape[0]
    if layer.recipe.scaling != "blockwise":
        hidden = jax.ShapeDtypeStruct((rows, layer.columns), projections.dtype)
        results = [hidden, _of_blocks(rows, layer.columns)]
        hidden, maxima = _call(HIDDEN_MAXIMA_TARGET, plan, results, projections, weights)
        return _over_scales(layer, maxima, [hidden], layer.recipe.forward_dtype)
    results = _quantized(plan, layer.recipe.forward_dtype, rows)
    return list(_call(HIDDEN_TARGET, plan, results, projections, weights, **_rule(layer)))


def _call_gradients(plan: HiddenPlan, projections, dh, weights):
    if plan.kernel == COMPOSED:
        return _gradients_reference(projections, dh, weights, layer=plan.problem.layer)
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
    scales = reference.scales_of_largest(largest, np.dtype(dtype), layer.recipe.power_of_two_scales)
    columns = jax.eval_shape(reference.side_by_side, stacks).shape[1]
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


def _call_ragged_gradients(plan: HiddenPlan, projections, dh, weights, group_sizes):
    layer = plan.problem.layer
    if plan.kernel == COMPOSED:
        found = hidden_gradients(layer, projections, dh, weights, "cuda")
        quantize = functools.partial(
            _transposed, primitive.quantize_ragged, layer, group_sizes, implementation="cuda"
        )
        results = _in_blocks(layer, found, quantize)
        return _joined(results) if plan.problem.joined else results
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
        target, results = JOINED_GRADIENTS_TARGET, jax.eval_shape(_joined, results)
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


def _avals_of(reference, op):
    """The abstract results of an operation are those of its reference; `op` returns it."""

    def avals(*operands, implementation, **params):
        abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        results = jax.eval_shape(functools.partial(reference, **params), *abstract)
        return [op().unsharded_aval(operands, x.shape, x.dtype) for x in results]

    return avals


HIDDEN: Op = Op(
    name="quantize_hidden",
    operand_ranks=(2, 1),
    targets=(HIDDEN_TARGET, HIDDEN_MAXIMA_TARGET),
    avals=_avals_of(_hidden_reference, lambda: HIDDEN),
    planner=plan_hidden,
    call=_call_hidden,
    reference=_hidden_reference,
    multiple_results=True,
    is_matmul=False,
)

GRADIENTS: Op = Op(
    name="quantize_gradients",
    operand_ranks=(2, 2, 1),
    targets=(GRADIENTS_TARGET, GRADIENT_MAXIMA_TARGET),
    avals=_avals_of(_gradients_reference, lambda: GRADIENTS),
    planner=plan_gradients,
    call=_call_gradients,
    reference=_gradients_reference,
    multiple_results=True,
    is_matmul=False,
)


RAGGED_GRADIENTS: Op = Op(
    name="quantize_ragged_gradients",
    operand_ranks=(2, 2, 1, 1),
    targets=(RAGGED_GRADIENTS_TARGET, JOINED_GRADIENTS_TARGET),
    avals=_avals_of(_ragged_gradients_reference, lambda: RAGGED_GRADIENTS),
    planner=plan_ragged_gradients,
    call=_call_ragged_gradients,
    reference=_ragged_gradients_reference,
    multiple_results=True,
    is_matmul=False,
)


def _batch_ragged_gradients(operands, dims, *, layer, joined, implementation):
    """As separate operations, which have batch dimensions."""

    def one(projections, dh, weights, group_sizes):
        found = hidden_gradients(layer, projections, dh, weights, implementation)
        quantize = functools.partial(
            _transposed,
            primitive.quantize_ragged,
            layer,
            group_sizes,
            implementation=implementation,
        )
        results = _in_blocks(layer, found, quantize)
        return _joined(results) if joined else results

    out = jax.vmap(one, dims)(*operands)
    return out, [0] * len(out)


def _register_batching(op: Op) -> None:
    def rule(operands, dims, *, layer, implementation):
        if layer.recipe.scaling == "tensorwise":
            # Each element of the batch has a scale of its own.
            out = jax.vmap(lambda *x: op.reference(*x, layer=layer), dims)(*operands)
            return out, [0] * len(out)
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        every = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        rows = every[0].shape[1]
        folded = [x.reshape(size * rows, *x.shape[2:]) for x in every]
        out = op.bind(*folded, layer=layer, implementation=implementation)
        return [x.reshape(size, rows, *x.shape[1:]) for x in out], [0] * len(out)

    op.def_batching(rule)


for _op in (HIDDEN, GRADIENTS):
    _register_batching(_op)
RAGGED_GRADIENTS.def_batching(_batch_ragged_gradients)
for _op in (HIDDEN, GRADIENTS, RAGGED_GRADIENTS):
    _op.has_no_derivative(primitive.NO_DERIVATIVE)
