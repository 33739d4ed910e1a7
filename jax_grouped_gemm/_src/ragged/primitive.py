"""Primitives of two ragged products, whose cotangents are such products, and of accumulation.

For rows r of group i, y[r] = x[r] w[i] is a non-contracting product. Its cotangents are dx[r] =
dy[r] w[i].T, which is non-contracting too, and dw[i] = sum_r x[r].T dy[r], which contracts the
ragged dimension. The cotangents of a contracting product are non-contracting. So both primitives
are differentiable to any order. Cotangents need no transposed copies of factors, because static
flags select layouts; a cotangent is transposed only if its factor is stored transposed.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.autodiff import is_zero, tangent_of
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, as_type
from jax_grouped_gemm._src.ragged import call, plan, reference, slices
from jax_grouped_gemm._src.ragged.bilinear import (
    BilinearOp,
    Fold,
    register_batching,
    register_jvp,
    register_transpose,
)
from jax_grouped_gemm._src.tile_choices import PRODUCT_OPTIONS


def ragged_noncontracting(lhs, rhs, group_sizes, group_offset, **params) -> jax.Array:
    """Multiplies lhs [b?, m, k] by rhs [b?, g, k, n] to [b?, m, n]; see `reference`.

    Parameters: transpose_lhs, transpose_rhs, preferred_element_type, precision, implementation, and
    those of `PRODUCT_OPTIONS`.
    """
    return NONCONTRACTING.bind(lhs, rhs, group_sizes, group_offset, **params)


def _noncontracting_aval(
    *operands, transpose_lhs, transpose_rhs, preferred_element_type, **params
) -> jax.core.ShapedArray:
    lhs, rhs, *_ = operands
    m = lhs.shape[-1 if transpose_lhs else -2]
    n = rhs.shape[-2 if transpose_rhs else -1]
    return NONCONTRACTING.result_aval(operands, (m, n), preferred_element_type)


def _noncontracting_dims(*_, transpose_lhs, transpose_rhs, **params) -> Dims:
    lhs, rhs = "km" if transpose_lhs else "mk", "gnk" if transpose_rhs else "gkn"
    return Dims.of(lhs, rhs, "G", "o", to="mn", whole="Go")


NONCONTRACTING = BilinearOp(
    name="ragged_noncontracting",
    function="ragged_dot(lhs, rhs, group_sizes, group_offset)",
    per_row=True,
    operand_ranks=(2, 3, 1, 1),
    result_rank=2,
    targets=(call.NONCONTRACTING_TARGET,),
    avals=_noncontracting_aval,
    planner=functools.partial(plan.plan_product, plan.noncontracting),
    planned=PRODUCT_OPTIONS,
    check=functools.partial(plan.check_tile, plan.noncontracting),
    call=call.ragged,
    reference=reference.ragged_noncontracting,
    dims=_noncontracting_dims,
    localizer=slices.of_groups,
)


def ragged_contracting(lhs, rhs, group_sizes, group_offset, **params) -> jax.Array:
    """Contracts lhs [b?, m, k] with rhs [b?, m, n] to [b?, num_groups, k, n]; see `reference`.

    Parameters: num_groups, transpose_lhs, transpose_rhs, preferred_element_type, precision,
    implementation.
    """
    return CONTRACTING.bind(lhs, rhs, group_sizes, group_offset, **params)


def _contracting_aval(
    *operands, num_groups, transpose_lhs, transpose_rhs, preferred_element_type, **params
) -> jax.core.ShapedArray:
    lhs, rhs, *_ = operands
    k = lhs.shape[-2 if transpose_lhs else -1]
    n = rhs.shape[-2 if transpose_rhs else -1]
    return CONTRACTING.result_aval(operands, (num_groups, k, n), preferred_element_type)


def _contracting_dims(*_, transpose_lhs, transpose_rhs, **params) -> Dims:
    lhs, rhs = "km" if transpose_lhs else "mk", "nm" if transpose_rhs else "mn"
    return Dims.of(lhs, rhs, "G", "o", to="gkn", whole="Go")


CONTRACTING = BilinearOp(
    name="ragged_contracting",
    function="ragged_dot_general(lhs, rhs, group_sizes, group_offset)",
    operand_ranks=(2, 2, 1, 1),
    result_rank=3,
    targets=(call.CONTRACTING_TARGET,),
    avals=_contracting_aval,
    planner=functools.partial(plan.plan_product, plan.contracting),
    planned=PRODUCT_OPTIONS,
    check=functools.partial(plan.check_tile, plan.contracting),
    call=call.ragged,
    reference=reference.ragged_contracting,
    dims=_contracting_dims,
    localizer=slices.of_groups,
)


def ragged_accumulate(accumulator, lhs, rhs, group_sizes, group_offset, **params) -> jax.Array:
    """Adds the contraction of lhs [b?, m, k] and rhs [b?, m, n] to the accumulator [b?, g, k, n].

    See `reference`. The accumulator has the batch dimension if any operand has it. The primitive
    needs no transposition rule, because its tangent consists of the accumulator's tangent and of
    `ragged_contracting` products.

    Parameters: transpose_lhs, transpose_rhs, precision, implementation.
    """
    return ACCUMULATE.bind(accumulator, lhs, rhs, group_sizes, group_offset, **params)


def _accumulate_aval(*operands, **_) -> jax.core.ShapedArray:
    accumulator = operands[0]
    return ACCUMULATE.result_aval(operands, accumulator.shape[-3:], accumulator.dtype)


def _accumulate_dims(*_, transpose_lhs, transpose_rhs, **params) -> Dims:
    lhs, rhs = "km" if transpose_lhs else "mk", "nm" if transpose_rhs else "mn"
    return Dims.of("gkn", lhs, rhs, "G", "o", to="gkn", whole="Go")


ACCUMULATE = Op(
    name="ragged_accumulate",
    function="ragged_dot_accumulate(accumulator, lhs, rhs, group_sizes, group_offset)",
    operand_ranks=(3, 2, 2, 1, 1),
    targets=(call.ACCUMULATE_TARGET,),
    avals=_accumulate_aval,
    planner=functools.partial(plan.plan_product, plan.accumulating),
    planned=PRODUCT_OPTIONS,
    check=functools.partial(plan.check_tile, plan.accumulating),
    call=call.accumulate,
    reference=reference.ragged_accumulate,
    dims=_accumulate_dims,
    localizer=slices.of_accumulator,
)


# How to merge a mapped axis if only one factor has it: a `Fold` for lhs, and one for rhs.


def _noncontracting_folds(params):
    return (
        Fold(operand_axis=-1 if params["transpose_lhs"] else -2, result_axis=-2, ragged=True),
        Fold(operand_axis=-2 if params["transpose_rhs"] else -1, result_axis=-1),
    )


def _contracting_folds(params):
    return (
        Fold(operand_axis=-2 if params["transpose_lhs"] else -1, result_axis=-2),
        Fold(operand_axis=-2 if params["transpose_rhs"] else -1, result_axis=-1),
    )


# The following functions compute the cotangents of both products.


def _noncontracting_lhs(ct, rhs, sizes, offset, aval, *, transpose_lhs, transpose_rhs, **params):
    flags = dict(transpose_lhs=False, transpose_rhs=not transpose_rhs)
    out = NONCONTRACTING.bind(ct, rhs, sizes, offset, **flags, **params)
    return _swap_if(transpose_lhs, out)


def _noncontracting_rhs(ct, lhs, sizes, offset, aval, *, transpose_lhs, transpose_rhs, **params):
    params["num_groups"] = aval.shape[-3]
    if transpose_rhs:
        flags = dict(transpose_lhs=False, transpose_rhs=transpose_lhs)
        return CONTRACTING.bind(ct, lhs, sizes, offset, **flags, **params)
    flags = dict(transpose_lhs=transpose_lhs, transpose_rhs=False)
    return CONTRACTING.bind(lhs, ct, sizes, offset, **flags, **params)


def _contracting_lhs(
    ct, rhs, sizes, offset, aval, *, num_groups, transpose_lhs, transpose_rhs, **params
):
    flags = dict(transpose_lhs=transpose_rhs, transpose_rhs=True)
    out = NONCONTRACTING.bind(rhs, ct, sizes, offset, **flags, **params)
    return _swap_if(transpose_lhs, out)


def _contracting_rhs(
    ct, lhs, sizes, offset, aval, *, num_groups, transpose_lhs, transpose_rhs, **params
):
    flags = dict(transpose_lhs=transpose_lhs, transpose_rhs=False)
    out = NONCONTRACTING.bind(lhs, ct, sizes, offset, **flags, **params)
    return _swap_if(transpose_rhs, out)


def _swap_if(condition, x):
    return jnp.swapaxes(x, -1, -2) if condition else x


for _op, _folds, _lhs, _rhs in (
    (NONCONTRACTING, _noncontracting_folds, _noncontracting_lhs, _noncontracting_rhs),
    (CONTRACTING, _contracting_folds, _contracting_lhs, _contracting_rhs),
):
    register_jvp(_op)
    register_transpose(_op, _lhs, _rhs)
    register_batching(_op, _folds)


def _accumulate_jvp(primals, tangents, **params):
    accumulator, lhs, rhs, *indices = primals
    accumulator_dot, lhs_dot, rhs_dot, *_ = tangents
    out = ACCUMULATE.bind(*primals, **params)
    product = _product_into(accumulator, params)
    terms = [] if is_zero(accumulator_dot) else [accumulator_dot]
    if not is_zero(lhs_dot):
        terms.append(product(lhs_dot, rhs, *indices))
    if not is_zero(rhs_dot):
        terms.append(product(lhs, rhs_dot, *indices))
    # Give the terms the type of the result, because factors do not determine how the accumulator
    # is sharded.
    return out, tangent_of(out, [as_type(term, jax.typeof(out)) for term in terms])


def _accumulate_batching(operands, dims, **params):
    accumulator, *factors = operands
    dim, *factor_dims = dims
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    if dim is not None:
        accumulator, dim = jnp.moveaxis(accumulator, dim, 0), 0
    if all(d is None for d in factor_dims):
        # One product for the whole batch.
        return accumulator + _product_into(accumulator, params)(*factors), 0
    if dim is None:
        accumulator, dim = jnp.broadcast_to(accumulator, (size, *accumulator.shape)), 0
    return ACCUMULATE.bind_batched((accumulator, *factors), (dim, *factor_dims), params)


def _product_into(accumulator, params):
    """Returns the function that computes the product to add to `accumulator`."""
    return functools.partial(
        ragged_contracting,
        num_groups=accumulator.shape[-3],
        preferred_element_type=accumulator.dtype,
        **params,
    )


ACCUMULATE.def_jvp(_accumulate_jvp)
ACCUMULATE.def_batching(_accumulate_batching)
