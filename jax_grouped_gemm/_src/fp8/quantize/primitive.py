"""The primitives of the quantisers, with the shapes and semantics of their references.

No quantiser has a derivative. All have the parameters dtype, power_of_two and implementation.
Quantisers with two forms also have the parameters plain and transposed, which ask for a form each.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import rows_or_zeros, stacked
from jax_grouped_gemm._src.fp8.formats import NO_DERIVATIVE, letters_of_blocks, quantized_groups
from jax_grouped_gemm._src.fp8.quantize import call, plan, reference
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims, leading


def _planned_op(name, operand_ranks, target, run, reference, dims=None) -> Op:
    """Makes an operation that is not a product. `plan.RESULTS` has its results."""

    def avals(*operands, **params):
        found = plan.RESULTS[name](params, *operands)
        return [op.unsharded_aval(operands, x.shape, x.dtype) for x in found if x is not None]

    op = Op(
        name=name,
        function=f"{name}(x)",
        operand_ranks=operand_ranks,
        targets=(target,),
        avals=avals,
        planner=partial(plan.plan_quantizer, name),
        call=run,
        reference=reference,
        multiple_results=True,
        is_matmul=False,
        dims=dims,
    )
    return op


def _quantizer(name, operand_ranks, reference, dims=None) -> Op:
    target = call.QUANTIZERS[name]
    return _planned_op(name, operand_ranks, target, call.quantize, reference, dims)


def quantize_rows(x, **params) -> list[jax.Array]:
    """Quantises x [rows, cols]; returns values and scales."""
    return ROWS.bind(x, **params)


ROWS = _quantizer("quantize_rows", (2,), reference.quantize_rows, leading)


def quantize_tokens(x, rows, **params) -> list[jax.Array]:
    """Quantises the rows `rows` (int32 [m]) of x [T, cols], zeros where an index is invalid."""
    return TOKENS.bind(x, rows, **params)


def _tokens_reference(x, rows, **params):
    return reference.quantize_rows(rows_or_zeros(x, rows), **params)


TOKENS = _quantizer("quantize_tokens", (2, 1), _tokens_reference)


def quantize_blocks(x, **params) -> list[jax.Array]:
    """Quantises x [g, rows, cols]; returns values and scales of each form that is asked for."""
    return BLOCKS.bind(x, **params)


def _blocks_dims(operands, results, *, plain, transposed, **params) -> Dims:
    """Names dimensions: matrices are independent, and so are their blocks."""
    forms, whole, blocks = letters_of_blocks(
        plain=plain, transposed=transposed, joined=len(operands) > 1
    )
    named = [("g", *letters) for letters in (*["kn"] * len(operands), *forms)]
    count = len(operands)
    return Dims(tuple(named[:count]), tuple(named[count:]), whole, blocks=blocks)


BLOCKS = _quantizer("quantize_blocks", (3,), reference.quantize_blocks, _blocks_dims)


def quantize_joined(x, y, **params) -> list[jax.Array]:
    """Quantises x and y [g, rows, cols] side by side; returns what `quantize_blocks` does."""
    return JOINED.bind(x, y, **params)


JOINED = _quantizer("quantize_joined", (3, 3), reference.quantize_joined, _blocks_dims)


def quantize_ragged(x, group_sizes, **params) -> list[jax.Array]:
    """Quantises x [b?, m, cols]; returns values and scales of each form that is asked for."""
    return RAGGED.bind(x, group_sizes, **params)


RAGGED = _quantizer("quantize_ragged", (2, 1), reference.quantize_ragged)


def column_maxima(x, window, **params) -> jax.Array:
    """Returns float32 [ceil(m / 256), cols] of x [m, cols], see `reference.column_maxima`."""
    (maxima,) = COLUMN_MAXIMA.bind(x, window, **params)
    return maxima


COLUMN_MAXIMA = _planned_op(
    "column_maxima",
    (2, 1),
    call.COLUMN_MAXIMA_TARGET,
    call.column_maxima,
    reference.column_maxima,
)


def quantize_gathered(x, rows, scale, group_sizes, **params) -> jax.Array:
    """Quantises rows [m] of x [T, cols] with scale [cols]; returns values in transposed blocks.
    Blocks without rows of a group are undefined."""
    (values,) = GATHERED.bind(x, rows, scale, group_sizes, **params)
    return values


def _gathered_aval(*operands, dtype, **_):
    x, rows, _scale, group_sizes = operands
    values, _scales = quantized_groups(rows.shape[0], x.shape[1], group_sizes.shape[0])
    return [GATHERED.result_aval(operands, values, dtype)]


GATHERED = Op(
    name="quantize_gathered",
    operand_ranks=(2, 1, 1, 1),
    targets=(call.GATHERED_TARGET,),
    avals=_gathered_aval,
    planner=partial(plan.plan_quantizer, "quantize_gathered"),
    call=call.quantize_gathered,
    reference=reference.quantize_gathered,
    multiple_results=True,
    is_matmul=False,
)


def _register_folding(op: Op) -> None:
    """Registers vmap: a mapped axis joins the first dimension, whose elements are independent."""

    def rule(operands, dims, **params):
        operands = stacked(operands, dims)
        leading = operands[0].shape[:2]
        results = op.bind(*(x.reshape(-1, *x.shape[2:]) for x in operands), **params)
        results = [y.reshape(*leading, *y.shape[1:]) for y in results]
        return results, [0] * len(results)

    op.def_batching(rule)


def _register_map(op: Op) -> None:
    """Registers vmap as a loop over the batch, because the kernel has no batch dimension."""

    def rule(operands, dims, **params):
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

        def one(i):
            return op.bind(
                *(
                    x if d is None else lax.dynamic_index_in_dim(x, i, d, keepdims=False)
                    for x, d in zip(operands, dims, strict=True)
                ),
                **params,
            )

        out = lax.map(one, jnp.arange(size))
        return out, [0] * len(out)

    op.def_batching(rule)


def _batch_tokens(operands, dims, **params):
    out = jax.vmap(lambda x, rows: quantize_rows(rows_or_zeros(x, rows), **params), dims)(*operands)
    return out, [0, 0]


TOKENS.def_batching(_batch_tokens)

for _op in (ROWS, BLOCKS, JOINED):
    _register_folding(_op)

RAGGED.def_batching(lambda operands, dims, **params: RAGGED.bind_batched(operands, dims, params))

for _op in (GATHERED, COLUMN_MAXIMA):
    _register_map(_op)

for _op in (ROWS, TOKENS, BLOCKS, JOINED, RAGGED, GATHERED, COLUMN_MAXIMA):
    _op.has_no_derivative(NO_DERIVATIVE)
