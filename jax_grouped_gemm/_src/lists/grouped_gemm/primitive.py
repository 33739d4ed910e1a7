"""Products of lists of stacks of matrices, as one primitive.

For each problem i, a stack of g matrices:

    out [g, m, n] = alpha lhs [g, m, k] rhs [g, k, n] + beta c [g, m, n]

It is linear in alpha, in lhs and in rhs, and affine in c. Its tangent is made of the primitive
without c and of elementwise operations on c; so only products without c are ever transposed, and
with respect to lhs or rhs their transposes are such products again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_grouped_gemm._src.lists import stacks as _stacks
from jax_grouped_gemm._src.lists.grouped_gemm import call, plan, reference
from jax_grouped_gemm._src.lists.scaling import accumulator_dtype, per_matrix
from jax_grouped_gemm._src.op import Op


class Problems(NamedTuple):
    """The operands: of each a list with an entry for every problem, of a missing one of None."""

    alpha: list[Any]
    lhs: list[Any]
    rhs: list[Any]
    beta: list[Any]
    c: list[Any]

    def only(self, indices: Sequence[int]) -> Problems:
        """Some of the problems."""
        return Problems(*([operand[i] for i in indices] for operand in self))


def grouped_gemm(problems: Problems, **params: Any) -> list[jax.Array]:
    """Binds the primitive.

    Args:
      problems: alpha [g], lhs [g, m, k] ([g, k, m] if transposed), rhs [g, k, n] ([g, n, k]), beta
        [g], c [g, m, n]; alpha, beta and c may be missing.
      **params: alpha and beta, the numbers that missing operands stand for; transpose_lhs and
        transpose_rhs, a boolean for each problem; result_dtype, precision, scheduler,
        sort_problems, implementation.
    """
    operands = [x for operand in problems for x in operand if x is not None]
    return OP.bind(
        *operands,
        num_problems=len(problems.lhs),
        has_alpha=problems.alpha[0] is not None,
        has_beta=problems.beta[0] is not None,
        has_c=problems.c[0] is not None,
        **params,
    )


def split(
    operands: Sequence[Any], *, num_problems: int, has_alpha: bool, has_beta: bool, has_c: bool
) -> Problems:
    """The flat operands of the primitive by what they are."""
    present = (has_alpha, True, True, has_beta, has_c)
    return Problems(*_stacks.split(operands, num_problems, present))


SHAPE_PARAMS = ("num_problems", "has_alpha", "has_beta", "has_c")


def reference_products(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    """What the primitive computes, in pure JAX."""
    problems, rest = _split(operands, params)
    count = len(problems.lhs)
    return [
        reference.product(
            *factors,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            result_dtype=rest["result_dtype"],
            precision=rest["precision"],
        )
        for *factors, transpose_lhs, transpose_rhs in zip(
            problems.alpha if params["has_alpha"] else [rest["alpha"]] * count,
            problems.lhs,
            problems.rhs,
            problems.beta if params["has_beta"] else [rest["beta"]] * count,
            problems.c,
            rest["transpose_lhs"],
            rest["transpose_rhs"],
            strict=True,
        )
    ]


def _split(operands, params) -> tuple[Problems, dict[str, Any]]:
    """The operands, and the parameters that do not follow from them."""
    shape = {name: params[name] for name in SHAPE_PARAMS}
    rest = {name: value for name, value in params.items() if name not in SHAPE_PARAMS}
    return split(operands, **shape), rest


def _avals(*operands, **params):
    problems, rest = _split(operands, params)
    results = []
    for lhs, rhs, transpose_lhs, transpose_rhs in zip(
        problems.lhs, problems.rhs, rest["transpose_lhs"], rest["transpose_rhs"], strict=True
    ):
        m = lhs.shape[-1 if transpose_lhs else -2]
        n = rhs.shape[-2 if transpose_rhs else -1]
        shape = (lhs.shape[0], m, n)
        results.append(OP.unsharded_aval(operands, shape, rest["result_dtype"]))
    return results


OP = Op(
    name="grouped_gemm",
    operand_ranks=None,
    targets=(call.TARGET, call.TARGET_F32, call.TARGET_FP64),
    avals=_avals,
    planner=plan.plan_grouped_gemm,
    call=call.grouped_gemm,
    reference=reference_products,
    multiple_results=True,
)


def _jvp(primals, tangents, **params):
    problems, rest = _split(primals, params)
    dots, _ = _split(tangents, params)
    outs = grouped_gemm(problems, **rest)
    sums = [[] for _ in outs]
    missing = [None] * len(outs)

    def add_products(alpha, lhs, rhs):
        terms = Problems(alpha, lhs, rhs, missing, missing)
        live = [
            i
            for i, factors in enumerate(zip(*terms, strict=True))
            if not any(type(x) is ad.Zero for x in factors)
        ]
        if live:
            options = {**rest, **_transposes(rest, live)}
            for i, term in zip(live, grouped_gemm(terms.only(live), **options), strict=True):
                sums[i].append(term)

    if params["has_alpha"]:
        add_products(dots.alpha, problems.lhs, problems.rhs)
    add_products(problems.alpha, dots.lhs, problems.rhs)
    add_products(problems.alpha, problems.lhs, dots.rhs)
    if params["has_c"]:
        for i, terms in enumerate(sums):
            terms += _c_tangents(problems.beta[i], problems.c[i], dots.beta[i], dots.c[i], rest)

    out_dots = []
    for out, terms in zip(outs, sums, strict=True):
        if terms:
            out_dots.append(sum(terms[1:], terms[0]))
        else:
            out_dots.append(ad.Zero(jax.typeof(out).to_tangent_aval()))
    return outs, out_dots


def _transposes(params, indices):
    return {
        name: tuple(params[name][i] for i in indices) for name in ("transpose_lhs", "transpose_rhs")
    }


def _c_tangents(beta, c, beta_dot, c_dot, params):
    """The tangents of the part of the result that depends on beta and c."""
    dtype = accumulator_dtype(params["result_dtype"])
    tangents = []
    if beta_dot is not None and type(beta_dot) is not ad.Zero:
        tangents.append(per_matrix(beta_dot, dtype) * c.astype(dtype))
    if type(c_dot) is not ad.Zero:
        scale = params["beta"] if beta is None else per_matrix(beta, dtype)
        tangents.append(scale * c_dot.astype(dtype))
    return [tangent.astype(params["result_dtype"]) for tangent in tangents]


def _transpose(cotangents, *operands, **params):
    problems, rest = _split(operands, params)
    if params["has_c"]:
        raise NotImplementedError("a product with c is not linear in its operands")
    count = len(cotangents)
    found = Problems(*([None] * count for _ in Problems._fields))

    def fill(name, cotangents_of):
        missing = getattr(problems, name)
        wanted = [
            i
            for i, ct in enumerate(cotangents)
            if ad.is_undefined_primal(missing[i]) and type(ct) is not ad.Zero
        ]
        if wanted:
            results = cotangents_of(wanted, cotangents, problems, rest)
            for i, result in zip(wanted, results, strict=True):
                getattr(found, name)[i] = result

    fill("alpha", _alpha_cotangents)
    fill("lhs", functools.partial(_factor_cotangents, _lhs_cotangent))
    fill("rhs", functools.partial(_factor_cotangents, _rhs_cotangent))
    present = (found.alpha if params["has_alpha"] else [], found.lhs, found.rhs)
    return [x for operand in present for x in operand]


def _alpha_cotangents(indices, cotangents, problems, params):
    """The inner product of each matrix's cotangent with its unscaled product."""
    dtype = accumulator_dtype(params["result_dtype"])
    missing = [None] * len(problems.lhs)
    products = grouped_gemm(
        problems._replace(alpha=missing, beta=missing, c=missing).only(indices),
        **{**params, **_transposes(params, indices), "alpha": 1.0, "result_dtype": dtype},
    )
    return [
        jnp.sum(cotangents[i].astype(dtype) * product, axis=(1, 2)).astype(
            problems.alpha[i].aval.dtype
        )
        for i, product in zip(indices, products, strict=True)
    ]


def _factor_cotangents(factor_cotangent, indices, cotangents, problems, params):
    """The cotangents of one factor of some problems, as it is stored: one more list of products."""
    products = []
    for i in indices:
        lhs, rhs = problems.lhs[i], problems.rhs[i]
        # Back to the dtype that the forward pass multiplied (bf16 x bf16 may return f32): the
        # cotangent is rounded to it anyway, and equal dtypes are what the kernels take.
        dtype = (lhs.aval if ad.is_undefined_primal(lhs) else lhs).dtype
        transposes = params["transpose_lhs"][i], params["transpose_rhs"][i]
        products.append(factor_cotangent(cotangents[i].astype(dtype), lhs, rhs, *transposes))
    lhs, rhs, transpose_lhs, transpose_rhs = map(list, zip(*products, strict=True))
    missing = [None] * len(indices)
    alpha = [problems.alpha[i] for i in indices]
    options = dict(transpose_lhs=tuple(transpose_lhs), transpose_rhs=tuple(transpose_rhs))
    return grouped_gemm(
        Problems(alpha, lhs, rhs, missing, missing), **{**params, **options, "result_dtype": dtype}
    )


def _lhs_cotangent(ct, _, rhs, transpose_lhs, transpose_rhs):
    """ct rhs^T, or its transpose: two factors, and whether each is stored transposed."""
    return (rhs, ct, transpose_rhs, True) if transpose_lhs else (ct, rhs, False, not transpose_rhs)


def _rhs_cotangent(ct, lhs, _, transpose_lhs, transpose_rhs):
    """lhs^T ct, or its transpose: two factors, and whether each is stored transposed."""
    return (ct, lhs, True, transpose_lhs) if transpose_rhs else (lhs, ct, not transpose_lhs, False)


def _batch(operands, dims, **params):
    """A mapped axis becomes part of each problem: more rows or a longer stack, the same launch."""
    problems, rest = _split(operands, params)
    problem_dims, _ = _split(dims, params)
    folded, unfolds = [], []
    for factors, factor_dims, transpose_lhs in zip(
        zip(*problems, strict=True),
        zip(*problem_dims, strict=True),
        rest["transpose_lhs"],
        strict=True,
    ):
        size = _stacks.mapped_size(factors, factor_dims)
        if not transpose_lhs and _maps_rows_only(factors, factor_dims):
            fold = _fold_rows
            unfolds.append(functools.partial(_unfold_rows, size=size))
        else:
            fold = functools.partial(_stacks.fold, size=size)
            unfolds.append(functools.partial(_stacks.unfold, size=size))
        folded.append([fold(x, dim) for x, dim in zip(factors, factor_dims, strict=True)])
    outs = grouped_gemm(Problems(*map(list, zip(*folded, strict=True))), **rest)
    outs = [unfold(out) for unfold, out in zip(unfolds, outs, strict=True)]
    # An entry that nothing maps has no new axis.
    return outs, [0 if out.ndim == 4 else None for out in outs]


def _maps_rows_only(factors, dims) -> bool:
    """Whether one matrix's rows, and those of c if there is one, are all that is mapped."""
    mapped = Problems(*(dim is not None for dim in dims))
    c_fits = mapped.c or Problems(*factors).c is None
    if not mapped.lhs or not c_fits or mapped.alpha or mapped.rhs or mapped.beta:
        return False
    lhs, dim = Problems(*factors).lhs, Problems(*dims).lhs
    return lhs.shape[1 if dim == 0 else 0] == 1 and lhs.shape[dim] > 0


def _fold_rows(x, dim):
    """[1, m, k] with a mapped axis as [1, size m, k]."""
    if x is None or dim is None:
        return x
    x = jnp.moveaxis(x, dim, 1)
    return x.reshape(1, x.shape[1] * x.shape[2], x.shape[3])


def _unfold_rows(out, size):
    """[1, size m, n] as [size, 1, m, n]."""
    return out.reshape(size, 1, out.shape[1] // size, out.shape[2])


OP.def_jvp(_jvp)
OP.def_transpose(_transpose)
OP.def_batching(_batch)
