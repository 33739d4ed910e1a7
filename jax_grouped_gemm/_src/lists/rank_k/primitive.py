"""Rank-k and rank-2k updates of lists of stacks of matrices, as one primitive.

For each stack i of [g, n, n] results, and one triangle of each:

    rank-k   out = alpha a a^T + beta c
    rank-2k  out = alpha (a b^T + b a^T) + beta c

If `hermitian`, ^H replaces ^T, and conj(alpha) replaces the second product's alpha. The other
triangle comes from c, is zero without c, or mirrors the first.

The update is quadratic in a without b, and bilinear in a and b. The tangent consists of rank-2k
updates, whose transposes are symmetric matrices times the other factor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.lists.op import (
    ListOp,
    Problem,
    register_batching,
    register_jvp,
    register_transpose,
    split,
)
from jax_grouped_gemm._src.lists.rank_k import call, plan, reference
from jax_grouped_gemm._src.lists.scaling import multiply, per_matrix

using_tile = jax.make_user_context(None)
"""The tile of all updates inside `with using_tile(tile)`, for tests of tiles that no plan takes."""


def rank_k(problems: Sequence[Problem], **params: Any) -> list[jax.Array]:
    """Binds the primitive.

    Args:
      problems: alpha [g], or [1] for all matrices, a and b [g, n, k] ([g, k, n] with `transpose`),
        beta and diagonal like alpha, c [g, n, n]. There may be no b, no diagonal, and neither beta
        nor c.
      **params: hermitian, transpose, upper, symmetrize (see the module), result_dtype, precision,
        implementation; `symm`, whether the product of a and b is A B^T alone; `whole_tiles`,
        whether no tile is cut, so that the bits of a matrix do not depend on other matrices;
        `c_is_factor`, for each problem whether its c is also one of its factors.
    """
    if using_tile.value is not None:
        params["tile"] = using_tile.value
    return OP.bind_list(problems, **params)


def reference_updates(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Computes the primitive in pure JAX."""
    problems, options = split(operands, params)
    return [reference.update(*problem, **options) for problem in problems]


def _avals(*operands, **params):
    problems, _ = split(operands, params)
    results = []
    for problem in problems:
        g, *matrix = problem.a.shape
        n = matrix[1 if params["transpose"] else 0]
        results.append(OP.unsharded_aval(operands, (g, n, n), params["result_dtype"]))
    return results


OP = ListOp(
    name="rank_k",
    targets=(call.TARGET, call.TARGET_F32, call.TARGET_FP64),
    avals=_avals,
    planner=plan.plan_rank_k,
    call=call.rank_k,
    reference=reference_updates,
    planned=("tile",),
    single_scales=True,
    per_problem=("c_is_factor",),
)


def _product_tangents(problem: Problem, dot: Problem) -> list[Problem]:
    """Applies the product rule."""
    alpha, a, b, *_ = problem
    if b is None:
        # d(a a^T) = da a^T + a da^T is itself a rank-2k update.
        return [Problem(dot.alpha, a), Problem(alpha, a, dot.a)]
    return [Problem(dot.alpha, a, b), Problem(alpha, dot.a, b), Problem(alpha, a, dot.b)]


def _place(scaled, outside, params):
    return reference.fill(
        scaled,
        outside,
        upper=params["upper"],
        hermitian=params["hermitian"],
        symmetrize=params["symmetrize"],
    )


def _alpha_cotangents(cts, problems, params):
    options = {name: x for name, x in params.items() if name not in ("implementation", "tile")}

    def of_update(ct, problem):
        def scaled(alpha):
            return reference.update(*problem._replace(alpha=alpha), **options)

        (result,) = jax.linear_transpose(scaled, problem.alpha.aval)(ct)
        return result

    return list(map(of_update, cts, problems))


def _a_cotangents(cts, problems, params):
    return [
        _factor_cotangent(ct, problem.alpha, problem.b, problem.a.aval, of_b=False, **params)
        for ct, problem in zip(cts, problems, strict=True)
    ]


def _b_cotangents(cts, problems, params):
    return [
        _factor_cotangent(
            ct,
            jnp.conj(problem.alpha) if params["hermitian"] else problem.alpha,
            problem.a,
            problem.b.aval,
            of_b=True,
            **params,
        )
        for ct, problem in zip(cts, problems, strict=True)
    ]


def _factor_cotangent(
    ct,
    alpha,
    factor,
    aval,
    *,
    of_b,
    hermitian,
    transpose,
    upper,
    symmetrize,
    symm,
    precision,
    **__,
):
    """Computes a factor's cotangent in a rank-2k update: alpha (T + T^T) times the other factor.

    T is the computed triangle of the cotangent, or all of it if the result was mirrored, because
    then both triangles depend on the factor. Where the product is A B^T alone, the cotangents are
    alpha T B and alpha T^T A, and the cotangent of the mirror image is added to T.
    """
    dtype = at_least_float32(ct.dtype)
    ct = ct.astype(dtype)
    triangle = functools.partial(reference.fill, upper=upper, hermitian=hermitian, symmetrize=False)
    if symm:
        if symmetrize:
            on_diagonal = jnp.eye(ct.shape[-1], dtype=bool)[None]
            ct = ct + jnp.where(on_diagonal, jnp.zeros_like(ct), reference.flip(ct, False))
        ct = triangle(ct, None)
        ct = reference.flip(ct, False) if of_b else ct
    else:
        ct = ct if symmetrize else triangle(ct, None)
        ct = ct + reference.flip(ct, hermitian)
    # Multiply in the dtype of the forward pass, so that the same tensor cores run.
    scaled = (per_matrix(alpha, dtype) * ct).astype(jnp.result_type(factor.dtype, aval.dtype))
    factor = jnp.conj(factor) if hermitian else factor
    # [g, i, j]; j runs over the rows of the factor.
    spec = "gij,gkj->gki" if transpose else "gij,gjk->gik"
    product = multiply(spec, scaled, factor, precision, dtype)
    return product.astype(aval.dtype)


register_jvp(OP, _product_tangents, _place)
register_transpose(OP, alpha=_alpha_cotangents, a=_a_cotangents, b=_b_cotangents)
register_batching(OP)
