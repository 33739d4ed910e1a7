"""Ragged contracting product: the rows of each group in lhs and rhs contracted to one matrix."""

from __future__ import annotations

import jax
from jax.extend.core import Primitive

from jax_grouped_gemm.primitives.bilinear import (
    BilinearOp,
    Fold,
    register_batching,
    register_jvp,
)
from jax_grouped_gemm.primitives.grouped_op import result_aval

ragged_contracting_p = Primitive("ragged_contracting")
OP = BilinearOp(ragged_contracting_p, operand_ranks=(2, 2, 1, 1), result_rank=3)


def ragged_contracting(lhs, rhs, group_sizes, group_offset, *, tile=None, **params) -> jax.Array:
    """lhs [b?, m, k] with rhs [b?, m, n] -> [b?, num_groups, k, n]; see `reference`.

    Parameters: num_groups, transpose_lhs, transpose_rhs, preferred_element_type, precision,
    implementation, and tile, the `TileConfig` to use or None for the plan's choice.
    """
    return OP.bind(lhs, rhs, group_sizes, group_offset, tile=tile, **params)


@ragged_contracting_p.def_abstract_eval
def _abstract_eval(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    *,
    num_groups,
    transpose_lhs,
    transpose_rhs,
    preferred_element_type,
    **_,
):
    k = lhs.shape[-2 if transpose_lhs else -1]
    n = rhs.shape[-2 if transpose_rhs else -1]
    operands = (lhs, rhs, group_sizes, group_offset)
    return result_aval(OP, operands, (num_groups, k, n), preferred_element_type)


def _folds(params):
    return (
        Fold(operand_axis=-2 if params["transpose_lhs"] else -1, result_axis=-2),
        Fold(operand_axis=-2 if params["transpose_rhs"] else -1, result_axis=-1),
    )


register_jvp(OP)
register_batching(OP, _folds)
