"""Rules shared by all primitives that are bilinear in their first two operands.

The remaining operands (group sizes, group offset) are integers and carry no derivative. Every
operand may have a native batch dimension in front of its usual rank; an operand without one is
shared by the whole batch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding, PartitionSpec

from jax_grouped_gemm._varying import align_varying


@dataclasses.dataclass(frozen=True)
class BilinearOp:
    """A primitive and the ranks of its operands and result without the batch dimension."""

    primitive: Primitive
    operand_ranks: tuple[int, ...]
    result_rank: int

    def bind(self, *operands: jax.Array, **params: Any) -> jax.Array:
        """Binds the primitive, its operands cast to vary over the same manual mesh axes."""
        return self.primitive.bind(*align_varying(*operands), **params)

    def batch_size(self, operands: Sequence[Any]) -> int | None:
        """Native batch size of `operands` (arrays or avals), None without a batch dimension."""
        sizes = [
            x.shape[0]
            for x, rank in zip(operands, self.operand_ranks, strict=True)
            if x.ndim > rank
        ]
        return sizes[0] if sizes else None


def result_aval(
    op: BilinearOp, operands: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    """Abstract result of unbatched `shape`, with the operands' batch and varying manual axes.

    Raises:
      NotImplementedError: an operand is sharded over explicit mesh axes.
    """
    for x in operands:
        if any(axes is not None for axes in x.sharding.spec):
            raise NotImplementedError(
                f"{op.primitive} infers no sharding over explicit mesh axes, got an operand of "
                f"type {x}; call it inside jax.shard_map or use a mesh with auto axes."
            )
    batch_size = op.batch_size(operands)
    shape = shape if batch_size is None else (batch_size, *shape)
    on_mesh = next((x for x in operands if not x.sharding.mesh.empty), operands[0])
    sharding = NamedSharding(on_mesh.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return on_mesh.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def register_jvp(op: BilinearOp) -> None:
    """d(lhs * rhs) = d(lhs) * rhs + lhs * d(rhs), with the primitive itself as the product."""

    def rule(primals, tangents, **params):
        lhs, rhs, *indices = primals
        lhs_dot, rhs_dot, *_ = tangents
        out = op.bind(*primals, **params)
        terms = []
        if type(lhs_dot) is not ad.Zero:
            terms.append(op.bind(lhs_dot, rhs, *indices, **params))
        if type(rhs_dot) is not ad.Zero:
            terms.append(op.bind(lhs, rhs_dot, *indices, **params))
        if not terms:
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, functools.reduce(ad.add_tangents, terms)

    ad.primitive_jvps[op.primitive] = rule


def register_transpose(
    op: BilinearOp,
    lhs_cotangent: Callable[..., jax.Array],
    rhs_cotangent: Callable[..., jax.Array],
) -> None:
    """Registers the transposition of a bilinear primitive with respect to either factor.

    Args:
      op: the primitive.
      lhs_cotangent: called as `lhs_cotangent(ct, rhs, *indices, aval, **params)` with the abstract
        value of the missing factor; `preferred_element_type` is the dtype it must return.
      rhs_cotangent: called as `rhs_cotangent(ct, lhs, *indices, aval, **params)`, likewise.
    """

    def rule(ct, lhs, rhs, *indices, **params):
        cotangents = [None] * (2 + len(indices))
        if type(ct) is ad.Zero:
            return cotangents
        if ad.is_undefined_primal(lhs):
            missing, aval, factor, cotangent = 0, lhs.aval, rhs, lhs_cotangent
        else:
            missing, aval, factor, cotangent = 1, rhs.aval, lhs, rhs_cotangent

        if factor.dtype == aval.dtype:
            # Back to the dtype that the forward pass multiplied (bf16 x bf16 may return f32): the
            # result is rounded to it anyway, and equal dtypes are what the kernels take.
            ct = ct.astype(aval.dtype)
        shared_by_batch = ct.ndim > op.result_rank and aval.ndim == op.operand_ranks[missing]
        dtype = _at_least_float32(aval.dtype) if shared_by_batch else aval.dtype
        result = cotangent(
            ct, factor, *indices, aval, **{**params, "preferred_element_type": dtype}
        )
        if shared_by_batch:
            result = jnp.sum(result, axis=0).astype(aval.dtype)
        cotangents[missing] = result
        return cotangents

    ad.primitive_transposes[op.primitive] = rule


def _at_least_float32(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Fold:
    """How a mapped axis of one factor alone disappears into a dimension that the result keeps.

    Axes are counted from the end, so that a native batch dimension does not shift them.

    Attributes:
      operand_axis: axis of the factor that takes in the mapped axis.
      result_axis: the same dimension in the result.
      ragged: whether it is the ragged dimension. Then the mapped axis goes inside it, so that each
        group's rows stay consecutive, and the group sizes grow with it.
    """

    operand_axis: int
    result_axis: int
    ragged: bool = False


def register_batching(
    op: BilinearOp, folds: Callable[[Mapping[str, Any]], tuple[Fold, Fold]]
) -> None:
    """Registers vmap: fold where one factor alone is mapped, a native batch dimension otherwise.

    Args:
      op: the primitive, with operands (lhs, rhs, group_sizes, group_offset).
      folds: the folds of lhs and of rhs under the given parameters of the primitive.
    """

    def rule(operands, dims, **params):
        mapped = [i for i, dim in enumerate(dims) if dim is not None]
        if mapped == [0] or mapped == [1]:
            factor = mapped[0]
            return _bind_folded(op, operands, factor, dims[factor], folds(params)[factor], params)
        return _bind_batched(op, operands, dims, params)

    batching.primitive_batchers[op.primitive] = rule


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


def _bind_batched(op, operands, dims, params):
    mapped = [dim is not None for dim in dims]
    operands = [
        x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)
    ]
    size = next(x.shape[0] for x, is_mapped in zip(operands, mapped, strict=True) if is_mapped)
    native = [
        x.ndim - is_mapped > rank
        for x, is_mapped, rank in zip(operands, mapped, op.operand_ranks, strict=True)
    ]
    if not any(native):
        return op.bind(*operands, **params), 0

    batch_size = next(
        x.shape[is_mapped]
        for x, is_mapped, is_native in zip(operands, mapped, native, strict=True)
        if is_native
    )

    def merge_batches(x, is_mapped, is_native, rank):
        if not (is_mapped or is_native):
            return x
        shape = x.shape[x.ndim - rank :]
        outer, inner = (size if is_mapped else 1), (batch_size if is_native else 1)
        x = jnp.broadcast_to(x.reshape(outer, inner, *shape), (size, batch_size, *shape))
        return x.reshape(size * batch_size, *shape)

    merged = map(merge_batches, operands, mapped, native, op.operand_ranks)
    out = op.bind(*merged, **params)
    return out.reshape(size, batch_size, *out.shape[1:]), 0
