"""The two ragged products of FP8 operands with scales. They have no derivatives of their own.

Operands are (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset); see `reference_fp8` for
shapes and semantics. An operand and its scales have the native batch dimension together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_grouped_gemm.primitives.grouped_op import (
    GroupedOp,
    bind_batched,
    register_no_derivative,
    result_aval,
)

scaled_ragged_noncontracting_p = Primitive("scaled_ragged_noncontracting")
NONCONTRACTING = GroupedOp(scaled_ragged_noncontracting_p, operand_ranks=(2, 2, 3, 3, 1, 1))

scaled_ragged_contracting_p = Primitive("scaled_ragged_contracting")
CONTRACTING = GroupedOp(scaled_ragged_contracting_p, operand_ranks=(3, 2, 3, 2, 1, 1))


def scaled_ragged_noncontracting(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, **params
) -> jax.Array:
    """lhs [b?, m, k] times rhs [b?, g, k, n] -> [b?, m, n].

    Parameters: transpose_rhs, lhs_scaling, rhs_scaling, preferred_element_type, implementation,
    and optionally tile, a `TileConfig` for the kernel instead of the plan's choice.
    """
    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return NONCONTRACTING.bind(*operands, **params)


def scaled_ragged_contracting(
    lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset, **params
) -> jax.Array:
    """lhs [b?, blocks, k, 128] with rhs [b?, blocks, n, 128] -> [b?, num_groups, k, n].

    Parameters: num_rows, num_groups, preferred_element_type, implementation, and optionally tile.
    """
    operands = (lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset)
    return CONTRACTING.bind(*operands, **params)


@scaled_ragged_noncontracting_p.def_abstract_eval
def _noncontracting_aval(*operands, transpose_rhs, preferred_element_type, **_):
    lhs, _, rhs, *_ = operands
    shape = (lhs.shape[-2], rhs.shape[-2 if transpose_rhs else -1])
    return result_aval(NONCONTRACTING, operands, shape, preferred_element_type)


@scaled_ragged_contracting_p.def_abstract_eval
def _contracting_aval(*operands, num_groups, preferred_element_type, **_):
    lhs, _, rhs, *_ = operands
    shape = (num_groups, lhs.shape[-2], rhs.shape[-2])
    return result_aval(CONTRACTING, operands, shape, preferred_element_type)


def _register_batching(op: GroupedOp) -> None:
    def rule(operands, dims, **params):
        operands, dims = list(operands), list(dims)
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        for pair in ((0, 1), (2, 3)):
            if [dims[i] is None for i in pair].count(True) == 1:
                (shared,) = (i for i in pair if dims[i] is None)
                operands[shared] = jnp.broadcast_to(
                    operands[shared], (size, *operands[shared].shape)
                )
                dims[shared] = 0
        return bind_batched(op, operands, dims, params)

    batching.primitive_batchers[op.primitive] = rule


for _op in (NONCONTRACTING, CONTRACTING):
    _register_batching(_op)
    register_no_derivative(_op)
