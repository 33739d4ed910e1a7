"""What all primitives share: manual mesh axes, a native batch dimension, and `jax.vmap` by it.

Every operand may have a native batch dimension in front of its usual rank; an operand without one
is shared by the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_grouped_gemm._varying import align_varying
from jax_grouped_gemm.primitives.avals import unsharded_aval
from jax_grouped_gemm.primitives.lowering import planners


@dataclasses.dataclass(frozen=True)
class GroupedOp:
    """A primitive and the ranks of its operands without the batch dimension."""

    primitive: Primitive
    operand_ranks: tuple[int, ...]

    def bind(self, *operands: jax.Array, **params: Any) -> Any:
        """Binds the primitive, its operands cast to vary over the same manual mesh axes.

        Raises:
          ValueError: the parameter `tile` is no compiled configuration.
        """
        if params.get("tile") is not None:
            planners[self.primitive]([jax.typeof(x) for x in operands], params)
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
    op: GroupedOp, operands: Sequence[Any], shape: tuple[int, ...], dtype: np.dtype
) -> Any:
    """Abstract result of unbatched `shape`, with the operands' batch and varying manual axes.

    Raises:
      NotImplementedError: an operand is sharded over explicit mesh axes.
    """
    batch_size = op.batch_size(operands)
    shape = shape if batch_size is None else (batch_size, *shape)
    return unsharded_aval(op.primitive, operands, shape, dtype)


def bind_batched(
    op: GroupedOp,
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    params: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Binds `op` with the mapped axes of `operands` as its native batch dimension.

    Returns:
      The result or results and their mapped axes, as rules of `jax.interpreters.batching` do.
    """
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
        out = op.bind(*operands, **params)
        return out, jax.tree.map(lambda _: 0, out)

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
    out = jax.tree.map(lambda x: x.reshape(size, batch_size, *x.shape[1:]), out)
    return out, jax.tree.map(lambda _: 0, out)


def register_no_derivative(op: GroupedOp) -> None:
    """Has differentiation with respect to any operand of `op` say what to do instead."""

    def rule(primals, tangents, **params):
        raise NotImplementedError(
            f"{op.primitive} has no derivative: FP8 operands are constants to autodiff. Use "
            "jax_grouped_gemm.fp8_ragged_dot, which is differentiable once, or "
            "jax.lax.stop_gradient."
        )

    ad.primitive_jvps[op.primitive] = rule
