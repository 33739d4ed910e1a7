"""Products of lists of stacks of matrices, as one primitive.

For each problem i, a stack of g matrices:

    out [g, m, n] = alpha a [g, m, k] b [g, k, n] + beta c [g, m, n]

The product is linear in a and in b. Transposing it with respect to a or b gives another product of
lists.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.lists.grouped_gemm import call, plan, reference
from jax_grouped_gemm._src.lists.op import (
    ListOp,
    Problem,
    register_batching,
    register_jvp,
    register_transpose,
    split,
)


def grouped_gemm(problems: Sequence[Problem], **params: Any) -> list[jax.Array]:
    """Binds the primitive.

    Args:
      problems: alpha [g], a [g, m, k] ([g, k, m] if transposed), b [g, k, n] ([g, n, k]), beta
        [g], c [g, m, n]; alpha, beta and c may be missing.
      **params: alpha and beta, the numbers in place of missing operands; transpose_lhs and
        transpose_rhs, a boolean for each problem; result_dtype, precision, scheduler,
        sort_problems, implementation.
    """
    return OP.bind_list(problems, **params)


def reference_products(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Computes the primitive in pure JAX."""
    problems, rest = split(operands, params)
    return [
        reference.product(
            rest["alpha"] if problem.alpha is None else problem.alpha,
            problem.a,
            problem.b,
            rest["beta"] if problem.beta is None else problem.beta,
            problem.c,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            result_dtype=rest["result_dtype"],
            precision=rest["precision"],
        )
        for problem, transpose_lhs, transpose_rhs in zip(
            problems, rest["transpose_lhs"], rest["transpose_rhs"], strict=True
        )
    ]


def _avals(*operands, **params):
    problems, rest = split(operands, params)
    results = []
    for problem, transpose_lhs, transpose_rhs in zip(
        problems, rest["transpose_lhs"], rest["transpose_rhs"], strict=True
    ):
        m = problem.a.shape[-1 if transpose_lhs else -2]
        n = problem.b.shape[-2 if transpose_rhs else -1]
        shape = (problem.a.shape[0], m, n)
        results.append(OP.unsharded_aval(operands, shape, rest["result_dtype"]))
    return results


OP = ListOp(
    name="grouped_gemm",
    targets=(call.TARGET, call.TARGET_F32, call.TARGET_FP64),
    avals=_avals,
    planner=plan.plan_grouped_gemm,
    call=call.grouped_gemm,
    reference=reference_products,
    per_problem=("transpose_lhs", "transpose_rhs"),
)


def _product_tangents(problem: Problem, dot: Problem) -> list[Problem]:
    """Applies the product rule to alpha, a and b, or without alpha to a and b."""
    alpha, a, b, *_ = problem
    terms = [Problem(alpha, dot.a, b), Problem(alpha, a, dot.b)]
    return terms if alpha is None else [Problem(dot.alpha, a, b), *terms]


def _alpha_cotangents(cts, problems, params):
    """Returns the inner product of each matrix's cotangent with its unscaled product."""
    dtype = at_least_float32(params["result_dtype"])
    products = grouped_gemm(
        [Problem(a=problem.a, b=problem.b) for problem in problems],
        **{**params, "alpha": 1.0, "result_dtype": dtype},
    )
    return [
        jnp.sum(ct.astype(dtype) * product, axis=(1, 2)).astype(problem.alpha.aval.dtype)
        for ct, problem, product in zip(cts, problems, products, strict=True)
    ]


def _factor_cotangents(factors, cts, problems, params):
    """Computes a factor's cotangents for some problems, as a list of products in its layout."""
    terms, transposes_lhs, transposes_rhs = [], [], []
    stored = zip(params["transpose_lhs"], params["transpose_rhs"], strict=True)
    for ct, problem, transposes in zip(cts, problems, stored, strict=True):
        a = problem.a
        # Cast to the dtype that the forward pass multiplied (bf16 x bf16 may return f32), because
        # kernels take equal dtypes, and the cotangent is rounded to this dtype anyway.
        dtype = (a.aval if ad.is_undefined_primal(a) else a).dtype
        lhs, transpose_lhs, rhs, transpose_rhs = factors(ct.astype(dtype), problem, *transposes)
        terms.append(Problem(problem.alpha, lhs, rhs))
        transposes_lhs.append(transpose_lhs)
        transposes_rhs.append(transpose_rhs)
    options = {
        "transpose_lhs": tuple(transposes_lhs),
        "transpose_rhs": tuple(transposes_rhs),
        "result_dtype": dtype,
    }
    return grouped_gemm(terms, **{**params, **options})


def _factors_of_a(ct, problem, transpose_a, transpose_b):
    """Returns the factors of ct b^T or of its transpose, and whether each is stored transposed."""
    if transpose_a:
        return problem.b, transpose_b, ct, True
    return ct, False, problem.b, not transpose_b


def _factors_of_b(ct, problem, transpose_a, transpose_b):
    """Returns the factors of a^T ct or of its transpose, and whether each is stored transposed."""
    if transpose_b:
        return ct, True, problem.a, transpose_a
    return problem.a, not transpose_a, ct, False


def _fold_rows(problem: Problem, dims: Problem, size: int, params):
    """Folds a mapped axis into the rows of a matrix a; returns None unless only a and c have it."""
    (transpose_lhs,) = params["transpose_lhs"]
    only_rows = (dims.alpha, dims.b, dims.beta) == (None,) * 3 and dims.a is not None
    c_fits = problem.c is None or dims.c is not None
    if transpose_lhs or not only_rows or not c_fits or size == 0:
        return None
    if problem.a.shape[1 if dims.a == 0 else 0] != 1:
        return None

    def fold(x, dim):
        """Turns [1, m, k] with a mapped axis into [1, size m, k]."""
        x = jnp.moveaxis(x, dim, 1)
        return x.reshape(1, x.shape[1] * x.shape[2], x.shape[3])

    def unfold(out):
        """Turns [1, size m, n] into [size, 1, m, n]."""
        return out.reshape(size, 1, out.shape[1] // size, out.shape[2])

    c = None if problem.c is None else fold(problem.c, dims.c)
    return problem._replace(a=fold(problem.a, dims.a), c=c), unfold


register_jvp(OP, _product_tangents)
register_transpose(
    OP,
    alpha=_alpha_cotangents,
    a=functools.partial(_factor_cotangents, _factors_of_a),
    b=functools.partial(_factor_cotangents, _factors_of_b),
)
register_batching(OP, _fold_rows)
