"""Rows copied from tokens and added up again: each is the other's transpose.

JAX transposes a gather into a scatter-add, which is slow and, on a GPU, adds up in any order. Here
sums are in float32 at least, in a fixed order, and rounded once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from jax_grouped_gemm._src.arrays import at_least_float32, rows_or_zeros, vary_over, varying_axes
from jax_grouped_gemm._src.mlp.operands import Rows
from jax_grouped_gemm._src.op import Primitive
from jax_grouped_gemm._src.rows import primitive as moves

# Rows know their tokens, not their pairs.
BY_TOKEN = dict(divisor=1, implementation=None)


def on_rows(rows: Rows) -> jax.Array:
    """The rows [m, D], copies of tokens where those are given."""
    if rows.rows is None:
        return rows.x
    if rows.inverse is not None:
        optional = _optional(rows.x.shape[0], rows.count)
        return moves.gather_rows(rows.x, rows.rows, rows.inverse, *optional, **BY_TOKEN)
    return GATHER.bind(rows.x, rows.rows)


def as_int32(rows: jax.Array, num_tokens: int) -> jax.Array:
    """Numbers of tokens, which stay out of range if they are."""
    if rows.dtype.itemsize < 4 or rows.dtype == jnp.int32:
        return rows.astype(jnp.int32)
    is_token = (rows >= 0) & (rows < num_tokens)
    return jnp.where(is_token, rows, num_tokens).astype(jnp.int32)


def copies(rows: Rows) -> jax.Array:
    """`on_rows` of any dtype without a derivative: the bits of quantised tokens, or scales."""
    x, inverse = rows.x, rows.inverse
    if inverse is None:
        inverse = jnp.zeros((x.shape[0], 0), jnp.int32)
    return moves.gather_rows(x, rows.rows, inverse, *_optional(x.shape[0], None), **BY_TOKEN)


def combine(y: jax.Array, rows: Rows) -> jax.Array:
    """The sum of each token's rows: y [m, D] -> [T, D], the transpose of `on_rows`.

    The order of the terms is that of `inverse`, or of the rows without it.
    """
    num_tokens = rows.x.shape[0]
    if rows.inverse is not None:
        optional = _optional(num_tokens, rows.count)
        return moves.combine_rows(y, rows.rows, rows.inverse, *optional, **BY_TOKEN)
    return COMBINE.bind(y, rows.rows, num_tokens=num_tokens)


def _optional(num_tokens: int, count: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """No weights, and the count, without elements if all rows are valid."""
    count = jnp.zeros((0,), jnp.int32) if count is None else count
    return jnp.zeros((num_tokens, 0), jnp.float32), count


def _combine(y, rows, *, num_tokens):
    dtype = at_least_float32(y.dtype)
    total = vary_over(jnp.zeros((num_tokens, y.shape[-1]), dtype), varying_axes(y, rows))
    if 0 in y.shape:
        return total.astype(y.dtype)
    order = jnp.argsort(rows, stable=True)
    tokens = jnp.arange(num_tokens, dtype=rows.dtype)
    starts, ends = (jnp.searchsorted(rows[order], tokens, side=s) for s in ("left", "right"))

    def add(i, total):
        at = starts + i
        row = y[order[jnp.minimum(at, len(order) - 1)]]
        return total + jnp.where((at < ends)[:, None], row, 0).astype(dtype)

    most = jnp.max(ends - starts, initial=0)
    return lax.fori_loop(0, most, add, total).astype(y.dtype)


def _linear(name, function, transpose) -> Primitive:
    """A primitive that is linear in its first operand; the others are integers."""
    primitive = Primitive(name)

    def aval(x, rows, *_, num_tokens=None):
        count = rows.shape[0] if num_tokens is None else num_tokens
        return x.update(shape=(count, x.shape[1]), weak_type=False)

    def jvp(primals, tangents, **params):
        _, *indices = primals
        out = primitive.bind(*primals, **params)
        if type(tangents[0]) is ad.Zero:
            return out, ad.Zero(jax.typeof(out).to_tangent_aval())
        return out, primitive.bind(tangents[0], *indices, **params)

    def transpose_rule(ct, x, *indices, **params):
        if type(ct) is ad.Zero:
            return [None] * (1 + len(indices))
        return [transpose(ct, x.aval, *indices), *[None] * len(indices)]

    def batch(operands, dims, **params):
        def one(*operands: Any):
            return function(*operands, **params)

        return jax.vmap(one, dims)(*operands), 0

    primitive.def_abstract_eval(aval)
    primitive.def_impl(
        lambda *operands, **params: xla.apply_primitive(primitive, *operands, **params)
    )
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose_rule
    batching.primitive_batchers[primitive] = batch
    return primitive


GATHER: Primitive = _linear(
    "gather_rows",
    rows_or_zeros,
    lambda ct, x, rows: COMBINE.bind(ct, rows, num_tokens=x.shape[0]),
)
COMBINE: Primitive = _linear("combine_rows", _combine, lambda ct, y, rows: GATHER.bind(ct, rows))
