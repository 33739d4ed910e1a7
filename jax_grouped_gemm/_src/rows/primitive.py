"""Primitives that sort by expert and move rows; see `reference` for the semantics.

`gather_rows`, `combine_rows` and `row_dots` are the partial derivatives of one trilinear form. So
each of them is a cotangent of the other two, and all are differentiable to any order. XLA computes
the cotangent of a gather without `row_of_pair`, in the order of the rows. The cotangent of a
combine without `pair_of_row` is XLA's scatter-add, which also takes repeated indices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_grouped_gemm._src.autodiff import is_zero, tangent_of
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.partition import Dims
from jax_grouped_gemm._src.rows import call, plan, reference


def sort_by_expert(experts: jax.Array, **params) -> list[jax.Array]:
    """Sorts experts [b?, n] to order [b?, n], inverse [b?, n], group_sizes [b?, num_experts].

    Parameters: num_experts, implementation.
    """
    return SORT.bind(experts, **params)


def _sort_avals(experts, *, num_experts, **_):
    n = experts.shape[-1]
    return [SORT.result_aval((experts,), (size,), jnp.int32) for size in (n, n, num_experts)]


_INSTEAD = "moe.dropless_mlp or jax.shard_map, whose devices sort their own tokens"

SORT = Op(
    name="sort_by_expert",
    function="sort_by_expert(experts)",
    operand_ranks=(1,),
    targets=(call.SORT_TARGET,),
    avals=_sort_avals,
    planner=plan.plan_sort,
    call=call.sort,
    reference=reference.sort_by_expert,
    multiple_results=True,
    is_matmul=False,
    instead=_INSTEAD,
)


# Indices refer to all rows and tokens, so devices can only split columns.


def _moves_dims(*_, **params) -> Dims:
    return Dims.of("sD", "r", "ik", "jl", "c", to="tD", whole="srikjlct")


def _row_dots_dims(*_, **params) -> Dims:
    return Dims.of("TD", "nD", "r", "Tk", "c", to="Tk", whole="Tnrkc")


def gather_rows(x, pair_of_row, row_of_pair, weights, count, **params) -> jax.Array:
    """Copies tokens x [b?, T, D] to rows [b?, m, D]. Parameters: divisor, implementation."""
    return GATHER.bind(x, pair_of_row, row_of_pair, weights, count, **params)


def _gather_aval(*operands, **params):
    x, pair_of_row, *_ = operands
    return GATHER.result_aval(operands, (pair_of_row.shape[-1], x.shape[-1]), x.dtype)


GATHER = Op(
    name="gather_rows",
    function="gather_rows(x, rows)",
    operand_ranks=plan.RANKS["gather_rows"],
    targets=(call.GATHER_TARGET, call.DISPATCH_TARGET),
    avals=_gather_aval,
    planner=functools.partial(plan.plan_move, "gather_rows"),
    call=call.gather,
    reference=reference.gather_rows,
    is_matmul=False,
    instead=_INSTEAD,
    dims=_moves_dims,
)


def combine_rows(y, pair_of_row, row_of_pair, weights, count, **params) -> jax.Array:
    """Adds rows y [b?, m, D] to tokens [b?, T, D]. Parameters: divisor, implementation."""
    return COMBINE.bind(y, pair_of_row, row_of_pair, weights, count, **params)


def _combine_aval(*operands, **params):
    y, _, row_of_pair, *_ = operands
    return COMBINE.result_aval(operands, (row_of_pair.shape[-2], y.shape[-1]), y.dtype)


COMBINE = Op(
    name="combine_rows",
    function="combine(y)",
    operand_ranks=plan.RANKS["combine_rows"],
    targets=(call.COMBINE_TARGET,),
    avals=_combine_aval,
    planner=functools.partial(plan.plan_move, "combine_rows"),
    call=call.combine,
    reference=reference.combine_rows,
    is_matmul=False,
    instead=_INSTEAD,
    dims=_moves_dims,
)


def row_dots(x, y, pair_of_row, row_of_pair, count, **params) -> jax.Array:
    """Returns dots [b?, T, k] of tokens x and rows y. Parameters: divisor, implementation."""
    return DOTS.bind(x, y, pair_of_row, row_of_pair, count, **params)


def _dots_aval(*operands, **_):
    x, _, _, row_of_pair, _ = operands
    return DOTS.result_aval(operands, row_of_pair.shape[-2:], reference.accumulator(x.dtype))


DOTS = Op(
    name="row_dots",
    operand_ranks=plan.RANKS["row_dots"],
    targets=(call.DOTS_TARGET,),
    avals=_dots_aval,
    planner=functools.partial(plan.plan_move, "row_dots"),
    call=call.dots,
    reference=reference.row_dots,
    is_matmul=False,
    instead=_INSTEAD,
    dims=_row_dots_dims,
)


# The places of each operation's factors, which are the operands in which it is linear.

_FACTORS = {GATHER: (0, 3), COMBINE: (0, 3), DOTS: (0, 1)}


def _register_jvp(op: Op) -> None:
    def rule(primals, tangents, **params):
        out = op.bind(*primals, **params)
        terms = []
        for place in _FACTORS[op]:
            # Missing weights have a tangent without elements.
            if not is_zero(tangents[place]) and primals[place].shape[-1]:
                operands = list(primals)
                operands[place] = tangents[place]
                terms.append(op.bind(*operands, **params))
        return out, tangent_of(out, terms)

    op.def_jvp(rule)


def _register_transpose(op: Op, *cotangents) -> None:
    """Registers `cotangents`, a function of `(ct, aval, *operands, **params)` for each factor."""

    def rule(ct, *operands, **params):
        results: list[jax.Array | None] = [None] * len(operands)
        if is_zero(ct):
            return results
        for place, cotangent in zip(_FACTORS[op], cotangents, strict=True):
            if not ad.is_undefined_primal(operands[place]):
                continue
            aval = operands[place].aval
            if ct.ndim > 2 and aval.ndim == 2:
                # The whole batch shares this operand: add up its cotangents before rounding.
                ct = ct.astype(reference.accumulator(ct.dtype))
                result = jnp.sum(cotangent(ct, aval, *operands, **params), axis=0)
            else:
                result = cotangent(ct, aval, *operands, **params)
            results[place] = result.astype(aval.dtype)
        return results

    op.def_transpose(rule)


def _of_tokens(y, aval, pair_of_row, row_of_pair, weights, count, *, divisor, implementation):
    """Returns the cotangent of x: the sums of the rows y, times the weights."""
    if not row_of_pair.shape[-1]:
        implementation = "xla"  # no kernel adds up rows by `pair_of_row`
    params = dict(divisor=divisor, implementation=implementation)
    return combine_rows(y, pair_of_row, row_of_pair, weights, count, **params)


def _of_rows(x, aval, pair_of_row, row_of_pair, weights, count, *, divisor, implementation):
    """Returns the cotangent of y: copies of the tokens x, times the weights."""
    if not pair_of_row.shape[-1]:
        return reference.spread_rows(x, row_of_pair, weights, count, num_rows=aval.shape[-2])
    params = dict(divisor=divisor, implementation=implementation)
    y = gather_rows(x, pair_of_row, row_of_pair, weights, count, **params)
    if y.ndim > aval.ndim and count.shape[-1]:
        # Rows that the batch shares may be valid in one batch element and undefined in another.
        valid = jnp.arange(y.shape[-2], dtype=jnp.int32) < count
        y = jnp.where(valid[..., None], y, 0)
    return y


def _gather_x(ct, aval, _, pair_of_row, row_of_pair, weights, count, **params):
    return _of_tokens(ct, aval, pair_of_row, row_of_pair, weights, count, **params)


def _gather_weights(ct, aval, x, pair_of_row, row_of_pair, _, count, **params):
    return row_dots(x.astype(ct.dtype), ct, pair_of_row, row_of_pair, count, **params)


def _combine_y(ct, aval, _, pair_of_row, row_of_pair, weights, count, **params):
    return _of_rows(ct, aval, pair_of_row, row_of_pair, weights, count, **params)


def _combine_weights(ct, aval, y, pair_of_row, row_of_pair, _, count, **params):
    return row_dots(ct, y.astype(ct.dtype), pair_of_row, row_of_pair, count, **params)


def _dots_x(ct, aval, _, y, pair_of_row, row_of_pair, count, **params):
    return _of_tokens(y, aval, pair_of_row, row_of_pair, ct, count, **params)


def _dots_y(ct, aval, x, _, pair_of_row, row_of_pair, count, **params):
    return _of_rows(x, aval, pair_of_row, row_of_pair, ct, count, **params)


_register_transpose(GATHER, _gather_x, _gather_weights)
_register_transpose(COMBINE, _combine_y, _combine_weights)
_register_transpose(DOTS, _dots_x, _dots_y)


def _sort_jvp(primals, tangents, **params):
    outs = sort_by_expert(*primals, **params)
    return outs, [tangent_of(out, []) for out in outs]


def _register_batching(op: Op) -> None:
    op.def_batching(lambda operands, dims, **params: op.bind_batched(operands, dims, params))


SORT.def_jvp(_sort_jvp)
for _op in (GATHER, COMBINE, DOTS):
    _register_jvp(_op)
for _op in (SORT, GATHER, COMBINE, DOTS):
    _register_batching(_op)
