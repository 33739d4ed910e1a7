"""The primitives of scaled ragged products, with the shapes and semantics of their references.

No product here has a derivative. Operands are (lhs, lhs_scale, rhs, rhs_scale, group_sizes,
group_offset). The batch dimension of an operand is also that of its scales.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import rows_or_zeros
from jax_grouped_gemm._src.fp8.formats import (
    NO_DERIVATIVE,
    VIEWED_RHS,
    VIEWED_ROWS,
    view_of,
    viewed,
)
from jax_grouped_gemm._src.fp8.scaled import call, plan, reference
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, whole
from jax_grouped_gemm._src.ragged import slices
from jax_grouped_gemm._src.ragged.plan import check_tile, plan_product
from jax_grouped_gemm._src.tile_choices import PRODUCT_OPTIONS


def _of_viewed(function, operand, *operands, view=(), **params):
    return function(*viewed(operands, operand, view), **params)


def scaled_ragged_noncontracting(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, *, fast_accumulation=False, **params
) -> jax.Array:
    """Multiplies lhs [b?, m, k] by rhs [b?, g, k, n]: [b?, m, n].

    Parameters: transpose_rhs, lhs_scaling, rhs_scaling, preferred_element_type, implementation.
    Optional parameters: fast_accumulation, for scales that do not change along k; tile, a
    `TileConfig` instead of the plan's choice; view, the place of lhs in a flat array.
    """
    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return SCALED_NONCONTRACTING.bind(*operands, fast_accumulation=fast_accumulation, **params)


def _noncontracting_aval(*operands, transpose_rhs, preferred_element_type, view=(), **params):
    lhs, _, rhs, *_ = operands = viewed(operands, VIEWED_ROWS, view)
    shape = (lhs.shape[-2], rhs.shape[-2 if transpose_rhs else -1])
    return SCALED_NONCONTRACTING.result_aval(operands, shape, preferred_element_type)


def _noncontracting_dims(operands, results, *, view=(), **params) -> Dims:
    """Names dimensions: rows and groups may be split, each with its scales."""
    if view:
        return whole(operands, results)
    lhs, lhs_scale, rhs, rhs_scale, *_ = operands
    scaling = params["lhs_scaling"]
    has_row_scales = scaling.block[0] == 1 and not scaling.column_major
    has_group_scales = rhs_scale.shape[-3] == rhs.shape[-3]
    n_k = "nk" if params["transpose_rhs"] else "kn"
    return Dims.of(
        *("mk", "mp" if has_row_scales else "qp", f"g{n_k}"),
        *("grs" if has_group_scales else "trs", "G", "o"),
        to="mn",
        whole="knpqrstGo",
    )


SCALED_NONCONTRACTING = Op(
    name="scaled_ragged_noncontracting",
    function="scaled_ragged_dot(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)",
    per_row=True,
    operand_ranks=(2, 2, 3, 3, 1, 1),
    targets=(call.SCALED_NONCONTRACTING_TARGET,),
    avals=_noncontracting_aval,
    planner=partial(plan_product, plan.noncontracting),
    planned=PRODUCT_OPTIONS,
    check=partial(check_tile, plan.noncontracting),
    call=call.scaled_noncontracting,
    reference=partial(_of_viewed, reference.scaled_ragged_noncontracting, VIEWED_ROWS),
    dims=_noncontracting_dims,
    localizer=slices.of_groups,
)


def gathered_scaled_noncontracting(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, rows, *, copied, **params
) -> jax.Array:
    """Multiplies the rows `rows` (int32 [m]) of lhs [T, k], as `scaled_ragged_noncontracting` does.

    A row is zero if its index is invalid. There are no batch dimensions. Where no kernel gathers
    rows, `copied` returns these rows and their scales, which are multiplied instead.
    """
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
    return reference.scaled_ragged_noncontracting(*copies, *others, **params)


GATHERED_NONCONTRACTING = Op(
    name="gathered_scaled_noncontracting",
    per_row=True,
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
    """Contracts lhs [b?, blocks, k, 128] and rhs [b?, blocks, n, 128]: [b?, num_groups, k, n].

    A scale is for a column of one block or, with scales [b?, 1, k] and [b?, 1, n], of all blocks.

    Parameters: num_rows, num_groups, preferred_element_type, implementation, and optionally tile
    and view, the place of rhs in a flat array.
    """
    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return SCALED_CONTRACTING.bind(*operands, **params)


def _contracting_aval(*operands, num_groups, preferred_element_type, view=(), **params):
    lhs, _, rhs, *_ = operands = viewed(operands, VIEWED_RHS, view)
    shape = (num_groups, lhs.shape[-2], rhs.shape[-2])
    return SCALED_CONTRACTING.result_aval(operands, shape, preferred_element_type)


SCALED_CONTRACTING = Op(
    name="scaled_ragged_contracting",
    function=(
        "scaled_ragged_dot_contracting(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)"
    ),
    operand_ranks=(3, 2, 3, 2, 1, 1),
    targets=(call.SCALED_CONTRACTING_TARGET,),
    avals=_contracting_aval,
    planner=partial(plan_product, plan.contracting),
    planned=PRODUCT_OPTIONS,
    check=partial(check_tile, plan.contracting),
    call=call.scaled_contracting,
    reference=partial(_of_viewed, reference.scaled_ragged_contracting, VIEWED_RHS),
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
    """Contracts lhs and each of two rhs of one shape, as `scaled_ragged_contracting` does, without
    batch dimensions. If one kernel computes both products, they are one primitive."""
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
    reference=partial(_each, reference.scaled_ragged_contracting),
    multiple_results=True,
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


def _batch_gathered(operands, dims, **params):
    def one(lhs, lhs_scale, *operands):
        *others, rows = operands
        copies = (rows_or_zeros(x, rows) for x in (lhs, lhs_scale))
        return scaled_ragged_noncontracting(*copies, *others, **params)

    return jax.vmap(one, dims)(*operands), 0


def _batch_each(operands, dims, **params):
    each = partial(_each, scaled_ragged_contracting, **params)
    return jax.vmap(each, dims)(*operands), [0, 0]


_register_batching(SCALED_NONCONTRACTING, may_be_viewed=VIEWED_ROWS)

_register_batching(SCALED_CONTRACTING, may_be_viewed=VIEWED_RHS)

GATHERED_NONCONTRACTING.def_batching(_batch_gathered)

PAIRED_CONTRACTING.def_batching(_batch_each)

for _op in (SCALED_NONCONTRACTING, GATHERED_NONCONTRACTING, SCALED_CONTRACTING, PAIRED_CONTRACTING):
    _op.has_no_derivative(NO_DERIVATIVE)
