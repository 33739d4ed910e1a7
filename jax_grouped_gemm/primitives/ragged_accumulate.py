"""A ragged contracting product added to an accumulator, which it takes the place of.

It is affine in the accumulator and bilinear in lhs and rhs. Its tangent is made of the tangent of
the accumulator and of plain products, so it is never transposed itself.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_grouped_gemm.primitives.grouped_op import GroupedOp, bind_batched, result_aval
from jax_grouped_gemm.primitives.ragged_contracting import ragged_contracting

ragged_accumulate_p = Primitive("ragged_accumulate")
OP = GroupedOp(ragged_accumulate_p, operand_ranks=(3, 2, 2, 1, 1))


def ragged_accumulate(accumulator, lhs, rhs, group_sizes, group_offset, **params) -> jax.Array:
    """accumulator [b?, g, k, n] + lhs [b?, m, k] with rhs [b?, m, n]; see `reference`.

    The accumulator has the batch dimension if any operand has it.

    Parameters: transpose_lhs, transpose_rhs, precision, implementation.
    """
    return OP.bind(accumulator, lhs, rhs, group_sizes, group_offset, **params)


@ragged_accumulate_p.def_abstract_eval
def _abstract_eval(*operands, **_):
    accumulator = operands[0]
    return result_aval(OP, operands, accumulator.shape[-3:], accumulator.dtype)


def _jvp(primals, tangents, **params):
    accumulator, lhs, rhs, *indices = primals
    accumulator_dot, lhs_dot, rhs_dot, *_ = tangents
    out = OP.bind(*primals, **params)
    product = functools.partial(
        ragged_contracting,
        num_groups=accumulator.shape[-3],
        preferred_element_type=accumulator.dtype,
        **params,
    )
    terms = [] if type(accumulator_dot) is ad.Zero else [accumulator_dot]
    if type(lhs_dot) is not ad.Zero:
        terms.append(product(lhs_dot, rhs, *indices))
    if type(rhs_dot) is not ad.Zero:
        terms.append(product(lhs, rhs_dot, *indices))
    if not terms:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(ad.add_tangents, terms)


def _batch(operands, dims, **params):
    accumulator, *factors = operands
    dim, *factor_dims = dims
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    if dim is not None:
        accumulator, dim = jnp.moveaxis(accumulator, dim, 0), 0
    if all(d is None for d in factor_dims):
        # One product for the whole batch.
        product = ragged_contracting(
            *factors,
            num_groups=accumulator.shape[-3],
            preferred_element_type=accumulator.dtype,
            **params,
        )
        return accumulator + product, 0
    if dim is None:
        accumulator, dim = jnp.broadcast_to(accumulator, (size, *accumulator.shape)), 0
    return bind_batched(OP, (accumulator, *factors), (dim, *factor_dims), params)


ad.primitive_jvps[ragged_accumulate_p] = _jvp
batching.primitive_batchers[ragged_accumulate_p] = _batch
