"""Ragged non-contracting product: each group's rows of lhs times the group's own matrix."""

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

ragged_noncontracting_p = Primitive("ragged_noncontracting")
OP = BilinearOp(ragged_noncontracting_p, operand_ranks=(2, 3, 1, 1), result_rank=2)


def ragged_noncontracting(lhs, rhs, group_sizes, group_offset, *, tile=None, **params) -> jax.Array:
    """lhs [b?, m, k] times rhs [b?, g, k, n] -> [b?, m, n]; see `reference` for the semantics.

    Parameters: transpose_lhs, transpose_rhs, preferred_element_type, precision, implementation,
    and tile, the `TileConfig` to use or None for the plan's choice.
    """
    return OP.bind(lhs, rhs, group_sizes, group_offset, tile=tile, **params)


@ragged_noncontracting_p.def_abstract_eval
def _abstract_eval(
    lhs,
    rhs,
    group_sizes,
    group_offset,
    *,
    transpose_lhs,
    transpose_rhs,
    preferred_element_type,
    **_,
):
    m = lhs.shape[-1 if transpose_lhs else -2]
    n = rhs.shape[-2 if transpose_rhs else -1]
    operands = (lhs, rhs, group_sizes, group_offset)
    return result_aval(OP, operands, (m, n), preferred_element_type)


def _folds(params):
    return (
        Fold(operand_axis=-1 if params["transpose_lhs"] else -2, result_axis=-2, ragged=True),
        Fold(operand_axis=-2 if params["transpose_rhs"] else -1, result_axis=-1),
    )


register_jvp(OP)
register_batching(OP, _folds)
