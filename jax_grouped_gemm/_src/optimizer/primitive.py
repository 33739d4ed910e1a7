"""Primitives of optimiser steps, with the shapes and semantics of their references.

No step has a derivative. The operands are the step's float32 scalars, the gradient or update, and
the arrays that the step changes: moments, float32 weights, and the weights' forms. The results have
the shapes and dtypes of these arrays. The parameters are layout (a `Layout`), power_of_two
and implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jax_grouped_gemm._src.arrays import stacked
from jax_grouped_gemm._src.fp8.formats import letters_of_blocks
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.optimizer import call, plan, reference
from jax_grouped_gemm._src.optimizer.problem import Layout
from jax_grouped_gemm._src.partition import Dims

_NUM_NUMBERS = 2  # operands that a step only reads: its scalars, and the gradient or update


def _update(name: str, of_reference: Any) -> Op:
    def avals(*operands, **params):
        return [op.unsharded_aval(operands, x.shape, x.dtype) for x in operands[_NUM_NUMBERS:]]

    op = Op(
        name=name,
        operand_ranks=None,
        targets=(call.TARGETS[name],),
        avals=avals,
        planner=functools.partial(plan.plan_update, name),
        call=call.update,
        reference=of_reference,
        multiple_results=True,
        is_matmul=False,
        is_listed=True,
        dims=_dims,
        instead="shards that are whole blocks of 128 x 128",
    )
    op.has_no_derivative("take gradients with respect to the weights that the step updates.")
    op.def_batching(_batching(op))
    return op


def _dims(operands: Sequence[Any], results: Any, *, layout: Layout, **params: Any) -> Dims:
    """Returns the dimensions of a step. Devices may split matrices and blocks, but not joined
    columns."""
    forms, whole, blocks = letters_of_blocks(
        plain=layout.plain, transposed=layout.transposed, joined=layout.is_joined
    )
    forms += ["kn"] * layout.copied
    stacks = ["kn"] * (len(operands) - 1 - len(forms))
    leading = tuple(f"l{i}" for i in range(operands[1].ndim - 2))
    named = [(*leading, *letters) for letters in (*stacks, *forms)]
    return Dims((("t",), *named), tuple(named[1:]), whole | {"t"}, blocks=blocks)


def _batching(op: Op) -> Callable[..., Any]:
    """Returns a rule that adds a mapped axis to the leading dimensions, or loops over it if the
    step's scalars are mapped too."""

    def rule(operands, dims, **params):
        every = stacked(operands, dims)
        if dims[0] is None:
            results = op.bind(operands[0], *every[1:], **params)
        else:
            results = lax.map(lambda one: op.bind(*one, **params), tuple(every))
        return results, [0] * len(results)

    return rule


def adamw_quantized(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Returns the new mean, square, master and forms; see `reference.adamw_quantized`."""
    return ADAMW.bind(*operands, **params)


ADAMW = _update("adamw_quantized", reference.adamw_quantized)


def apply_and_quantize(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Returns the new master and forms; see `reference.apply_and_quantize`."""
    return APPLY.bind(*operands, **params)


APPLY = _update("apply_and_quantize", reference.apply_and_quantize)
