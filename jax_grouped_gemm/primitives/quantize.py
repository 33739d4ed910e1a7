"""The quantisers, see `reference_fp8` for shapes and semantics. They have no derivatives.

Parameters of all: dtype, power_of_two, implementation; of `quantize_blocks` and `quantize_ragged`
also plain and transposed, the forms to return.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching

from jax_grouped_gemm.plan_fp8 import quantized_blocks, quantized_groups, quantized_rows
from jax_grouped_gemm.primitives.grouped_op import (
    GroupedOp,
    bind_batched,
    register_no_derivative,
    result_aval,
)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


quantize_rows_p = _primitive("quantize_rows")
quantize_blocks_p = _primitive("quantize_blocks")
quantize_ragged_p = _primitive("quantize_ragged")
ROWS = GroupedOp(quantize_rows_p, operand_ranks=(2,))
BLOCKS = GroupedOp(quantize_blocks_p, operand_ranks=(3,))
RAGGED = GroupedOp(quantize_ragged_p, operand_ranks=(2, 1))


def quantize_rows(x, **params) -> list[jax.Array]:
    """x [rows, cols] -> values, scales."""
    return ROWS.bind(x, **params)


def quantize_blocks(x, **params) -> list[jax.Array]:
    """x [g, rows, cols] -> values, scales if plain; values, scales if transposed."""
    return BLOCKS.bind(x, **params)


def quantize_ragged(x, group_sizes, **params) -> list[jax.Array]:
    """x [b?, m, cols] -> values, scales if plain; values, scales if transposed."""
    return RAGGED.bind(x, group_sizes, **params)


def _results(op, operands, forms, dtype):
    return [
        result_aval(op, operands, shape, kind)
        for form in forms
        for shape, kind in zip(form, (dtype, np.dtype(np.float32)), strict=True)
    ]


@quantize_rows_p.def_abstract_eval
def _rows_aval(x, *, dtype, **_):
    return _results(ROWS, (x,), [quantized_rows(*x.shape)], dtype)


@quantize_blocks_p.def_abstract_eval
def _blocks_aval(x, *, dtype, plain, transposed, **_):
    g, rows, cols = x.shape
    forms = [quantized_blocks(g, rows, cols)] * plain
    forms += [quantized_blocks(g, cols, rows)] * transposed
    return _results(BLOCKS, (x,), forms, dtype)


@quantize_ragged_p.def_abstract_eval
def _ragged_aval(x, group_sizes, *, dtype, plain, transposed, **_):
    m, cols = x.shape[-2:]
    forms = [quantized_rows(m, cols)] * plain
    forms += [quantized_groups(m, cols, group_sizes.shape[-1])] * transposed
    return _results(RAGGED, (x, group_sizes), forms, dtype)


def _register_folding(op: GroupedOp) -> None:
    """A mapped axis becomes part of the first dimension, whose elements are independent."""

    def rule(operands, dims, **params):
        (x,), (dim,) = operands, dims
        x = jnp.moveaxis(x, dim, 0)
        leading = x.shape[:2]
        results = op.bind(x.reshape(-1, *x.shape[2:]), **params)
        results = [y.reshape(*leading, *y.shape[1:]) for y in results]
        return results, [0] * len(results)

    batching.primitive_batchers[op.primitive] = rule


def _ragged_batching(operands, dims, **params):
    return bind_batched(RAGGED, operands, dims, params)


_register_folding(ROWS)
_register_folding(BLOCKS)
batching.primitive_batchers[quantize_ragged_p] = _ragged_batching
for _op in (ROWS, BLOCKS, RAGGED):
    register_no_derivative(_op)
