"""Rank-k and rank-2k updates of lists of stacks of matrices, as one primitive.

For each stack i of [g, n, n] results, and one triangle of each:

    rank-k   out = alpha a a^T + beta c
    rank-2k  out = alpha (a b^T + b a^T) + beta c

with ^H for ^T, and conj(alpha) for the second product's alpha, if `hermitian`. The other triangle
is c's, zero without c, or the mirror image of the first.

The update is quadratic in a and affine in c. Its tangent is made of rank-2k updates without c,
which are bilinear in a and b, and of elementwise operations on c; so only updates without c are
ever transposed, and their transposes are symmetric matrices times the other operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_grouped_gemm._src.lists import stacks as _stacks
from jax_grouped_gemm._src.lists.rank_k import call, plan, reference
from jax_grouped_gemm._src.op import Op


class Stacks(NamedTuple):
    """The operands, a list with an entry for each stack; None for every entry of a missing one."""

    alpha: list[Any]
    a: list[Any]
    b: list[Any]
    beta: list[Any]
    c: list[Any]


def rank_k(stacks: Stacks, **params: Any) -> list[jax.Array]:
    """Binds the primitive.

    Args:
      stacks: alpha [g], or [1] for all matrices, a and b [g, n, k] ([g, k, n] with `transpose`),
        beta like alpha, c [g, n, n]; b may be missing, beta and c together.
      **params: hermitian, transpose, upper, symmetrize (see the module), result_dtype, precision,
        implementation.
    """
    operands = [x for operand in stacks for x in operand if x is not None]
    return OP.bind(
        *operands,
        num_stacks=len(stacks.a),
        two_operands=stacks.b[0] is not None,
        has_c=stacks.c[0] is not None,
        **params,
    )


def split(operands: Sequence[Any], *, num_stacks: int, two_operands: bool, has_c: bool) -> Stacks:
    """The flat operands of the primitive by what they are."""
    present = (True, True, two_operands, has_c, has_c)
    return Stacks(*_stacks.split(operands, num_stacks, present))


SHAPE_PARAMS = ("num_stacks", "two_operands", "has_c")


def reference_updates(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """What the primitive computes, in pure JAX."""
    stacks, options = _split(operands, params)
    return [reference.update(*factors, **options) for factors in zip(*stacks, strict=True)]


def _split(operands, params) -> tuple[Stacks, dict[str, Any]]:
    """The operands, and the parameters that do not follow from them."""
    shape = {name: params[name] for name in SHAPE_PARAMS}
    rest = {name: value for name, value in params.items() if name not in SHAPE_PARAMS}
    return split(operands, **shape), rest


def _avals(*operands, **params):
    stacks, _ = _split(operands, params)
    results = []
    for a in stacks.a:
        n = a.shape[-1 if params["transpose"] else -2]
        shape = (a.shape[0], n, n)
        results.append(OP.unsharded_aval(operands, shape, params["result_dtype"]))
    return results


OP = Op(
    name="rank_k",
    operand_ranks=None,
    targets=(call.TARGET, call.TARGET_F32, call.TARGET_FP64),
    avals=_avals,
    planner=plan.plan_rank_k,
    call=call.rank_k,
    reference=reference_updates,
    multiple_results=True,
)


def _jvp(primals, tangents, **params):
    stacks, rest = _split(primals, params)
    dots, _ = _split(tangents, params)
    outs = rank_k(stacks, **rest)
    sums = [[] for _ in outs]

    def add_products(alpha, a, b):
        live = [
            i
            for i, factors in enumerate(zip(alpha, a, b, strict=True))
            if not any(type(x) is ad.Zero for x in factors)
        ]
        if live:
            nothing = [None] * len(live)
            some = [[operand[i] for i in live] for operand in (alpha, a, b)]
            for i, product in zip(
                live, rank_k(Stacks(*some, nothing, nothing), **rest), strict=True
            ):
                sums[i].append(product)

    add_products(dots.alpha, stacks.a, stacks.b)
    if params["two_operands"]:
        add_products(stacks.alpha, dots.a, stacks.b)
        add_products(stacks.alpha, stacks.a, dots.b)
    else:
        # d(a a^T) = da a^T + a da^T is itself a rank-2k update.
        add_products(stacks.alpha, stacks.a, dots.a)
    if params["has_c"]:
        for i, terms in enumerate(sums):
            terms += _c_tangents(stacks.beta[i], stacks.c[i], dots.beta[i], dots.c[i], rest)

    out_dots = []
    for out, terms in zip(outs, sums, strict=True):
        if terms:
            out_dots.append(sum(terms[1:], terms[0]))
        else:
            out_dots.append(ad.Zero(jax.typeof(out).to_tangent_aval()))
    return outs, out_dots


def _c_tangents(beta, c, beta_dot, c_dot, params):
    """The tangents of the part of the result that depends on beta and c."""
    dtype = reference.accumulator_dtype(params["result_dtype"])
    shape = dict(upper=params["upper"], hermitian=params["hermitian"])
    tangents = []
    if type(beta_dot) is not ad.Zero:
        scaled = reference.per_matrix(beta_dot, dtype) * c.astype(dtype)
        tangents.append(reference.fill(scaled, None, symmetrize=params["symmetrize"], **shape))
    if type(c_dot) is not ad.Zero:
        c_dot = c_dot.astype(dtype)
        scaled = reference.per_matrix(beta, dtype) * c_dot
        tangents.append(reference.fill(scaled, c_dot, symmetrize=params["symmetrize"], **shape))
    return [tangent.astype(params["result_dtype"]) for tangent in tangents]


def _transpose(cotangents, *operands, **params):
    stacks, rest = _split(operands, params)
    if params["has_c"]:
        raise NotImplementedError("an update with c is not linear in its operands")
    per_stack = [
        _transpose_stack(*factors, rest)
        for factors in zip(cotangents, stacks.alpha, stacks.a, stacks.b, strict=True)
    ]
    return [
        x
        for operand, present in zip(
            zip(*per_stack, strict=True), (True, True, params["two_operands"]), strict=True
        )
        if present
        for x in operand
    ]


def _transpose_stack(ct, alpha, a, b, params):
    """The cotangents of alpha, a and b; None for those that are not asked for."""
    if type(ct) is ad.Zero:
        return None, None, None
    options = {k: v for k, v in params.items() if k != "implementation"}
    if ad.is_undefined_primal(alpha):
        transpose = jax.linear_transpose(
            lambda alpha: reference.update(alpha, a, b, None, None, **options), alpha.aval
        )
        return *transpose(ct), None, None
    if ad.is_undefined_primal(a):
        return None, _factor_cotangent(ct, alpha, b, a.aval, **options), None
    if params["hermitian"]:
        alpha = jnp.conj(alpha)
    return None, None, _factor_cotangent(ct, alpha, a, b.aval, **options)


def _factor_cotangent(
    ct, alpha, factor, aval, *, hermitian, transpose, upper, symmetrize, precision, **__
):
    """The cotangent of one factor of a rank-2k update: alpha (T + T^T) times the other one.

    T is the cotangent's computed triangle; the whole of it if the result was mirrored, because
    then both triangles depend on the factor.
    """
    dtype = reference.accumulator_dtype(ct.dtype)
    ct = ct.astype(dtype)
    if not symmetrize:
        ct = reference.fill(ct, None, upper=upper, hermitian=hermitian, symmetrize=False)
    symmetric = reference.per_matrix(alpha, dtype) * (ct + reference.flip(ct, hermitian))
    # In the dtype that the forward pass multiplied, for the same tensor cores.
    symmetric = symmetric.astype(jnp.result_type(factor.dtype, aval.dtype))
    factor = jnp.conj(factor) if hermitian else factor
    # Symmetric up to the conjugate, [g, i, j]; j runs over the rows of the factor.
    spec = "gij,gkj->gki" if transpose else "gij,gjk->gik"
    product = reference.multiply(spec, symmetric, factor, precision, dtype)
    return product.astype(aval.dtype)


def _batch(operands, dims, **params):
    """A mapped axis of a stack becomes part of it: one longer stack, the same launch."""
    stacks, rest = _split(operands, params)
    stack_dims, _ = _split(dims, params)
    folded, sizes = [], []
    for factors, factor_dims in zip(
        zip(*stacks, strict=True), zip(*stack_dims, strict=True), strict=True
    ):
        size = _stacks.mapped_size(factors, factor_dims)
        sizes.append(size)
        factors, factor_dims = Stacks(*factors), Stacks(*factor_dims)
        a = _stacks.fold(factors.a, factor_dims.a, size)
        folded.append(
            Stacks(
                alpha=_fold_scale(factors.alpha, factor_dims.alpha, size, len(a)),
                a=a,
                b=_stacks.fold(factors.b, factor_dims.b, size),
                beta=_fold_scale(factors.beta, factor_dims.beta, size, len(a)),
                c=_stacks.fold(factors.c, factor_dims.c, size),
            )
        )
    outs = rank_k(Stacks(*map(list, zip(*folded, strict=True))), **rest)
    outs = [_stacks.unfold(out, size) for out, size in zip(outs, sizes, strict=True)]
    return outs, [None if size is None else 0 for size in sizes]


def _fold_scale(x, dim, size, folded_g):
    """alpha or beta of a stack of `folded_g` when folded: one for all of them if it can be."""
    if x is None or size is None or (dim is None and x.shape == (1,)):
        return x
    x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
    return jnp.broadcast_to(x, (size, folded_g // size)).reshape(folded_g)


OP.def_jvp(_jvp)
OP.def_transpose(_transpose)
OP.def_batching(_batch)
