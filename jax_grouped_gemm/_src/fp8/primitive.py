"""The scaled ragged products and the quantisers: shapes and semantics are those of the references.

None has a derivative of its own. Operands of the products are (lhs, lhs_scale, rhs, rhs_scale,
group_sizes, group_offset); an operand and its scales have the native batch dimension together.
Parameters of all quantisers: dtype, power_of_two, implementation; of all that can return several
forms also plain and transposed, those to return.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import rows_or_zeros
from jax_grouped_gemm._src.fp8 import call, plan, reference, scaled_reference
from jax_grouped_gemm._src.fp8.formats import (
    VIEWED_RHS,
    VIEWED_ROWS,
    quantized_groups,
    view_of,
    viewed,
)
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, leading, whole
from jax_grouped_gemm._src.plan import PRODUCT_OPTIONS
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.ragged.plan import check_tile, plan_product


def _of_viewed(function, operand, *operands, view=(), **params):
    return function(*viewed(operands, operand, view), **params)


def scaled_ragged_noncontracting(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, *, fast_accumulation=False, **params
) -> jax.Array:
    """lhs [b?, m, k] times rhs [b?, g, k, n] -> [b?, m, n].

    Parameters: transpose_rhs, lhs_scaling, rhs_scaling, preferred_element_type, implementation,
    and optionally fast_accumulation, for scales that do not change along k, tile, a `TileConfig`
    for the kernel instead of the plan's choice, and view, what lhs is of a flat array.
    """
    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return NONCONTRACTING.bind(*operands, fast_accumulation=fast_accumulation, **params)


def _noncontracting_aval(*operands, transpose_rhs, preferred_element_type, view=(), **params):
    lhs, _, rhs, *_ = operands = viewed(operands, VIEWED_ROWS, view)
    shape = (lhs.shape[-2], rhs.shape[-2 if transpose_rhs else -1])
    return NONCONTRACTING.result_aval(operands, shape, preferred_element_type)


def _noncontracting_dims(operands, results, *, view=(), **params) -> Dims:
    """Rows and groups may be split, with those of their scales that belong to them."""
    if view:
        return whole(operands, results)
    lhs, lhs_scale, rhs, rhs_scale, *_ = operands
    has_row_scales = params["lhs_scaling"] in ("1x128", "1xk")
    has_group_scales = rhs_scale.shape[-3] == rhs.shape[-3]
    n_k = "nk" if params["transpose_rhs"] else "kn"
    return Dims.of(
        *("mk", "mp" if has_row_scales else "qp", f"g{n_k}"),
        *("grs" if has_group_scales else "trs", "G", "o"),
        to="mn",
        whole="knpqrstGo",
    )


NONCONTRACTING = Op(
    name="scaled_ragged_noncontracting",
    operand_ranks=(2, 2, 3, 3, 1, 1),
    targets=(call.NONCONTRACTING_TARGET,),
    avals=_noncontracting_aval,
    planner=partial(plan_product, plan.noncontracting),
    planned=PRODUCT_OPTIONS,
    check=partial(check_tile, plan.noncontracting),
    call=call.scaled_noncontracting,
    reference=partial(_of_viewed, scaled_reference.scaled_ragged_noncontracting, VIEWED_ROWS),
    dims=_noncontracting_dims,
    localizer=slices.of_groups,
)


def gathered_scaled_noncontracting(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, rows, *, copied, **params
) -> jax.Array:
    """`scaled_ragged_noncontracting` of rows `rows` [m] of lhs [T, k], int32, zeros where there is
    no such row, all without a batch dimension: as one operation where the plan has a kernel for it,
    else of `copied()`, those rows and their scales."""
    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, rows)
    params = dict(params, fast_accumulation=params.get("fast_accumulation", False))
    if plan.reads_in_place([jax.typeof(x) for x in operands], params):
        return GATHERED_NONCONTRACTING.bind(*operands, **params)
    values, scales = copied()
    return scaled_ragged_noncontracting(values, scales, *operands[2:-1], **params)


def _gathered_noncontracting_aval(*operands, transpose_rhs, preferred_element_type, **params):
    *_, rhs, _, _, _, rows = operands
    shape = (rows.shape[0], rhs.shape[1 if transpose_rhs else 2])
    return GATHERED_NONCONTRACTING.unsharded_aval(operands, shape, preferred_element_type)


def _gathered_reference(lhs, lhs_scale, *operands, **params):
    *others, rows = operands
    copies = (rows_or_zeros(x, rows) for x in (lhs, lhs_scale))
    return scaled_reference.scaled_ragged_noncontracting(*copies, *others, **params)


GATHERED_NONCONTRACTING = Op(
    name="gathered_scaled_noncontracting",
    operand_ranks=(2, 2, 3, 3, 1, 1, 1),
    targets=(call.GATHERED_NONCONTRACTING_TARGET,),
    avals=_gathered_noncontracting_aval,
    planner=partial(plan_product, plan.gathered),
    planned=PRODUCT_OPTIONS,
    check=partial(check_tile, plan.gathered),
    call=call.gathered_noncontracting,
    reference=_gathered_reference,
)


def scaled_ragged_contracting(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, **params
) -> jax.Array:
    """lhs [b?, blocks, k, 128] with rhs [b?, blocks, n, 128] -> [b?, num_groups, k, n].

    Scales are of each block and column, or [b?, 1, k] and [b?, 1, n], of each column.

    Parameters: num_rows, num_groups, preferred_element_type, implementation, and optionally tile,
    and view, what rhs is of a flat array.
    """
    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return CONTRACTING.bind(*operands, **params)


def _contracting_aval(*operands, num_groups, preferred_element_type, view=(), **params):
    lhs, _, rhs, *_ = operands = viewed(operands, VIEWED_RHS, view)
    shape = (num_groups, lhs.shape[-2], rhs.shape[-2])
    return CONTRACTING.result_aval(operands, shape, preferred_element_type)


CONTRACTING = Op(
    name="scaled_ragged_contracting",
    operand_ranks=(3, 2, 3, 2, 1, 1),
    targets=(call.CONTRACTING_TARGET,),
    avals=_contracting_aval,
    planner=partial(plan_product, plan.contracting),
    planned=PRODUCT_OPTIONS,
    check=partial(check_tile, plan.contracting),
    call=call.scaled_contracting,
    reference=partial(_of_viewed, scaled_reference.scaled_ragged_contracting, VIEWED_RHS),
)


def paired_scaled_contracting(
    lhs,
    lhs_scale,
    first,
    first_scale,
    second,
    second_scale,
    group_sizes,
    group_offset,
    **params,
) -> list[jax.Array]:
    """`scaled_ragged_contracting` of one lhs and each of two rhs of the same shape, all without a
    batch dimension: as one operation where the plan has a kernel for it."""
    operands = (
        *(lhs, lhs_scale, first, first_scale),
        *(second, second_scale, group_sizes, group_offset),
    )
    if plan.is_one_launch([jax.typeof(x) for x in operands], params):
        return PAIRED_CONTRACTING.bind(*operands, **params)
    return _each(scaled_ragged_contracting, *operands, **params)


def _each(function: Callable[..., jax.Array], /, *operands, **params) -> list[jax.Array]:
    lhs, pairs, groups = operands[:2], (operands[2:4], operands[4:6]), operands[6:]
    return [function(*lhs, *rhs, *groups, **params) for rhs in pairs]


def _paired_avals(*operands, num_groups, preferred_element_type, **params):
    lhs, _, rhs, *_ = operands
    shape = (num_groups, lhs.shape[1], rhs.shape[1])
    return [PAIRED_CONTRACTING.unsharded_aval(operands, shape, preferred_element_type)] * 2


PAIRED_CONTRACTING = Op(
    name="paired_scaled_contracting",
    operand_ranks=(3, 2, 3, 2, 3, 2, 1, 1),
    targets=(call.PAIRED_CONTRACTING_TARGET,),
    avals=_paired_avals,
    planner=partial(plan_product, plan.paired),
    planned=PRODUCT_OPTIONS,
    check=partial(check_tile, plan.paired),
    call=call.paired_contracting,
    reference=partial(_each, scaled_reference.scaled_ragged_contracting),
    multiple_results=True,
)


def _planned_op(name, operand_ranks, target, run, reference, dims=None) -> Op:
    """An operation that is no product, whose results are those that its plan has."""

    def avals(*operands, **params):
        found = plan.RESULTS[name](params, *operands)
        return [op.unsharded_aval(operands, x.shape, x.dtype) for x in found if x is not None]

    op = Op(
        name=name,
        operand_ranks=operand_ranks,
        targets=(target,),
        avals=avals,
        planner=partial(plan.plan_quantizer, name),
        call=run,
        reference=reference,
        multiple_results=True,
        is_matmul=False,
        dims=dims,
    )
    return op


def _quantizer(name, operand_ranks, reference, dims=None) -> Op:
    target = call.QUANTIZERS[name]
    return _planned_op(name, operand_ranks, target, call.quantize, reference, dims)


def quantize_rows(x, **params) -> list[jax.Array]:
    """x [rows, cols] -> values, scales."""
    return ROWS.bind(x, **params)


ROWS = _quantizer("quantize_rows", (2,), reference.quantize_rows, leading)


def quantize_tokens(x, rows, **params) -> list[jax.Array]:
    """x [T, cols], rows int32 [m] -> `quantize_rows` of those rows, zeros where one is none."""
    return TOKENS.bind(x, rows, **params)


def _tokens_reference(x, rows, **params):
    return reference.quantize_rows(rows_or_zeros(x, rows), **params)


TOKENS = _quantizer("quantize_tokens", (2, 1), _tokens_reference)


def quantize_blocks(x, **params) -> list[jax.Array]:
    """x [g, rows, cols] -> values, scales if plain; values, scales if transposed."""
    return BLOCKS.bind(x, **params)


BLOCKS = _quantizer("quantize_blocks", (3,), reference.quantize_blocks, leading)


def quantize_joined(x, y, **params) -> list[jax.Array]:
    """x, y [g, rows, cols] -> values, scales if plain; values, scales if transposed; of both."""
    return JOINED.bind(x, y, **params)


JOINED = _quantizer("quantize_joined", (3, 3), reference.quantize_joined, leading)


def quantize_ragged(x, group_sizes, **params) -> list[jax.Array]:
    """x [b?, m, cols] -> values, scales if plain; values, scales if transposed."""
    return RAGGED.bind(x, group_sizes, **params)


RAGGED = _quantizer("quantize_ragged", (2, 1), reference.quantize_ragged)


def column_maxima(x, window, **params) -> jax.Array:
    """x [m, cols], window [2] -> float32 [ceil(m / 256), cols], see `reference.column_maxima`."""
    (maxima,) = COLUMN_MAXIMA.bind(x, window, **params)
    return maxima


COLUMN_MAXIMA = _planned_op(
    "column_maxima",
    (2, 1),
    call.MAXIMA["column_maxima"],
    call.maxima,
    reference.column_maxima,
)


def matrix_maxima(x, *, rows: bool, columns: bool, implementation) -> list[jax.Array]:
    """x [g, m, n] -> the largest of blocks of rows, of columns, see `reference.matrix_maxima`."""
    return MATRIX_MAXIMA.bind(x, rows=rows, columns=columns, implementation=implementation)


def _maxima_dims(operands, results, *, columns, **params) -> Dims:
    """Rows are independent, but not in the maxima of columns."""
    if columns:
        return leading(operands, results)
    return Dims.of("gmn", to=["gmp"] * len(results), whole="np")


MATRIX_MAXIMA = _planned_op(
    "matrix_maxima",
    (3,),
    call.MAXIMA["matrix_maxima"],
    call.maxima,
    reference.matrix_maxima,
    _maxima_dims,
)


def quantize_channels(*operands, **params) -> list[jax.Array]:
    """x, y if there is one, and scales of rows and of columns -> values if plain, values if
    transposed, see `reference.quantize_channels`; without power_of_two, which scales are already.
    """
    return CHANNELS.bind(*operands, **params)


def _channels_dims(operands, results, *, plain, transposed, **params) -> Dims:
    """Numbers are independent, each of a row and of a column of stacks side by side."""
    if len(operands) > 3:
        return leading(operands, results)
    to = ["gmn"] * plain + ["gnm"] * transposed
    return Dims.of("gmn", "gm", "gn", to=to, whole="n")


CHANNELS = _planned_op(
    "quantize_channels",
    None,
    call.CHANNELS_TARGET,
    call.quantize_channels,
    reference.quantize_channels,
    _channels_dims,
)


def quantize_gathered(x, rows, scale, group_sizes, **params) -> jax.Array:
    """x [T, cols], rows [m], scale [cols] -> values in transposed blocks."""
    (values,) = GATHERED.bind(x, rows, scale, group_sizes, **params)
    return values


def _gathered_aval(*operands, dtype, **_):
    x, rows, _scale, group_sizes = operands
    values, _scales = quantized_groups(rows.shape[0], x.shape[1], group_sizes.shape[0])
    return [GATHERED.result_aval(operands, values, dtype)]


GATHERED = Op(
    name="quantize_gathered",
    operand_ranks=(2, 1, 1, 1),
    targets=(call.GATHERED_TARGET,),
    avals=_gathered_aval,
    planner=partial(plan.plan_quantizer, "quantize_gathered"),
    call=call.quantize_gathered,
    reference=reference.quantize_gathered,
    multiple_results=True,
    is_matmul=False,
)


NO_DERIVATIVE = (
    "FP8 operands are constants to autodiff. Use jax_grouped_gemm.fp8_ragged_dot, which is "
    "differentiable once, or jax.lax.stop_gradient."
)


def _register_batching(op: Op, may_be_viewed: int) -> None:
    def rule(operands, dims, *, view=(), **params):
        operands, dims = list(operands), list(dims)
        if view:
            of_one = partial(view_of, view=view)
            flat, dim = operands[may_be_viewed], dims[may_be_viewed]
            operands[may_be_viewed] = of_one(flat) if dim is None else jax.vmap(of_one, dim)(flat)
            dims[may_be_viewed] = None if dim is None else 0
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        for pair in ((0, 1), (2, 3)):
            if [dims[i] is None for i in pair].count(True) == 1:
                (shared,) = (i for i in pair if dims[i] is None)
                operands[shared] = jnp.broadcast_to(
                    operands[shared], (size, *operands[shared].shape)
                )
                dims[shared] = 0
        return op.bind_batched(operands, dims, params)

    op.def_batching(rule)


def _register_folding(op: Op) -> None:
    """A mapped axis becomes part of the first dimension, whose elements are independent."""

    def rule(operands, dims, **params):
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        operands = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, dims, strict=True)
        ]
        leading = operands[0].shape[:2]
        results = op.bind(*(x.reshape(-1, *x.shape[2:]) for x in operands), **params)
        results = [y.reshape(*leading, *y.shape[1:]) for y in results]
        return results, [0] * len(results)

    op.def_batching(rule)


def _register_map(op: Op) -> None:
    """One element of the batch after the other: the kernel has no batch dimension."""

    def rule(operands, dims, **params):
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

        def one(i):
            return op.bind(
                *(
                    x if d is None else lax.dynamic_index_in_dim(x, i, d, keepdims=False)
                    for x, d in zip(operands, dims, strict=True)
                ),
                **params,
            )

        out = lax.map(one, jnp.arange(size))
        return out, [0] * len(out)

    op.def_batching(rule)


def _batch_gathered(operands, dims, **params):
    def one(lhs, lhs_scale, *operands):
        *others, rows = operands
        copies = (rows_or_zeros(x, rows) for x in (lhs, lhs_scale))
        return scaled_ragged_noncontracting(*copies, *others, **params)

    return jax.vmap(one, dims)(*operands), 0


def _batch_tokens(operands, dims, **params):
    out = jax.vmap(lambda x, rows: quantize_rows(rows_or_zeros(x, rows), **params), dims)(*operands)
    return out, [0, 0]


def _batch_each(operands, dims, **params):
    each = partial(_each, scaled_ragged_contracting, **params)
    return jax.vmap(each, dims)(*operands), [0, 0]


_register_batching(NONCONTRACTING, may_be_viewed=VIEWED_ROWS)
_register_batching(CONTRACTING, may_be_viewed=VIEWED_RHS)
GATHERED_NONCONTRACTING.def_batching(_batch_gathered)
PAIRED_CONTRACTING.def_batching(_batch_each)
TOKENS.def_batching(_batch_tokens)
for _op in (ROWS, BLOCKS, JOINED, MATRIX_MAXIMA, CHANNELS):
    _register_folding(_op)
RAGGED.def_batching(lambda operands, dims, **params: RAGGED.bind_batched(operands, dims, params))
for _op in (GATHERED, COLUMN_MAXIMA):
    _register_map(_op)
for _op in (NONCONTRACTING, GATHERED_NONCONTRACTING, CONTRACTING, PAIRED_CONTRACTING):
    _op.has_no_derivative(NO_DERIVATIVE)
for _op in (ROWS, TOKENS, BLOCKS, JOINED, RAGGED, GATHERED, COLUMN_MAXIMA, MATRIX_MAXIMA, CHANNELS):
    _op.has_no_derivative(NO_DERIVATIVE)
