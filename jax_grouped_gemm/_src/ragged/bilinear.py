"""Rules shared by all primitives that are bilinear in their first two operands.

The remaining operands (group sizes, group offset) are integers and carry no derivative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.autodiff import is_zero, tangent_of
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.tile_choices import for_cotangent


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BilinearOp(Op):
    """An operation on (lhs, rhs, group_sizes, group_offset), linear in lhs and in rhs."""

    operand_ranks: tuple[int, ...]
    result_rank: int


def register_jvp(op: BilinearOp) -> None:
    """Registers the rule d(lhs * rhs) = d(lhs) * rhs + lhs * d(rhs), where * is the primitive."""

    def rule(primals, tangents, **params):
        lhs, rhs, *indices = primals
        lhs_dot, rhs_dot, *_ = tangents
        out = op.bind(*primals, **params)
        terms = []
        if not is_zero(lhs_dot):
            terms.append(op.bind(lhs_dot, rhs, *indices, **params))
        if not is_zero(rhs_dot):
            terms.append(op.bind(lhs, rhs_dot, *indices, **params))
        return out, tangent_of(out, terms)

    op.def_jvp(rule)


def register_transpose(
    op: BilinearOp,
    lhs_cotangent: Callable[..., jax.Array],
    rhs_cotangent: Callable[..., jax.Array],
) -> None:
    """Registers the transposition of a bilinear primitive with respect to either factor.

    Args:
      op: the operation.
      lhs_cotangent: `lhs_cotangent(ct, rhs, *indices, aval, **params)` returns the cotangent of
        lhs, whose abstract value is `aval`, in the dtype `preferred_element_type`. `params` are
        those of the operation, with the tile that `use_tiles` chose for this cotangent, if any.
      rhs_cotangent: `rhs_cotangent(ct, lhs, *indices, aval, **params)` does the same for rhs.
    """

    def rule(ct, lhs, rhs, *indices, **params):
        cotangents: list[jax.Array | None] = [None] * (2 + len(indices))
        if is_zero(ct):
            return cotangents
        if ad.is_undefined_primal(lhs):
            missing, aval, factor, cotangent = 0, lhs.aval, rhs, lhs_cotangent
        else:
            missing, aval, factor, cotangent = 1, rhs.aval, lhs, rhs_cotangent

        if factor.dtype == aval.dtype:
            # Cast to the dtype that the forward pass multiplied (bf16 x bf16 may return f32),
            # because kernels take equal dtypes, and the result is rounded to this dtype anyway.
            ct = ct.astype(aval.dtype)
        shared_by_batch = ct.ndim > op.result_rank and aval.ndim == op.operand_ranks[missing]
        dtype = at_least_float32(aval.dtype) if shared_by_batch else aval.dtype
        params = for_cotangent(params, ("dgrad", "wgrad")[missing])
        result = cotangent(
            ct, factor, *indices, aval, **{**params, "preferred_element_type": dtype}
        )
        if shared_by_batch:
            result = jnp.sum(result, axis=0).astype(aval.dtype)
        cotangents[missing] = result
        return cotangents

    op.def_transpose(rule)


@dataclasses.dataclass(frozen=True)
class Fold:
    """Merges a mapped axis of one factor into a dimension that the result keeps.

    Axes are counted from the end, so that a native batch dimension does not shift them.

    Attributes:
      operand_axis: axis of the factor into which the mapped axis is merged.
      result_axis: axis of the result for the same dimension.
      ragged: whether the dimension is the ragged one. The mapped axis then becomes the inner part
        of the merged axis, so that each group's rows stay consecutive. Group sizes are multiplied
        by the size of the mapped axis.
    """

    operand_axis: int
    result_axis: int
    ragged: bool = False


def register_batching(
    op: BilinearOp, folds: Callable[[Mapping[str, Any]], tuple[Fold, Fold]]
) -> None:
    """Registers the batching rule: a `Fold` if only one factor is mapped, else a batch dimension.

    Args:
      op: the operation, with operands (lhs, rhs, group_sizes, group_offset).
      folds: returns the folds of lhs and of rhs for given parameters of the primitive.
    """

    def rule(operands, dims, **params):
        mapped = [i for i, dim in enumerate(dims) if dim is not None]
        if mapped == [0] or mapped == [1]:
            (factor,) = mapped
            if jax.typeof(operands[factor]).sharding.spec[dims[factor]] is not None:
                # The axis is split over explicit mesh axes. Types cannot describe a merged
                # dimension of which only one part is split.
                return op.bind_batched(operands, dims, params)
            return _bind_folded(op, operands, factor, dims[factor], folds(params)[factor], params)
        return op.bind_batched(operands, dims, params)

    op.def_batching(rule)


def _bind_folded(op, operands, factor, dim, fold, params):
    operands = list(operands)
    x = operands[factor]
    axis = x.ndim - 1 + fold.operand_axis
    x = jnp.moveaxis(x, dim, axis + 1 if fold.ragged else axis)
    split = x.shape[axis : axis + 2]
    operands[factor] = x.reshape(*x.shape[:axis], math.prod(split), *x.shape[axis + 2 :])
    if fold.ragged:
        num_rows, size = split
        operands[2] = jnp.clip(operands[2], 0, num_rows) * size

    out = op.bind(*operands, **params)
    axis = out.ndim + fold.result_axis
    out = out.reshape(*out.shape[:axis], *split, *out.shape[axis + 1 :])
    return out, axis + 1 if fold.ragged else axis
