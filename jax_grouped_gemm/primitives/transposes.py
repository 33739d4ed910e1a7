"""The two ragged products are closed under transposition, hence differentiable to any order.

With rows r of group i, y[r] = x[r] w[i] gives dx[r] = dy[r] w[i].T, non-contracting again, and
dw[i] = sum_r x[r].T dy[r], which contracts the ragged dimension; the cotangents of that are
non-contracting. Layouts only flip the static flags: no factor is ever transposed, and a result
only where its own dimensions are stored swapped.
"""

from __future__ import annotations

import jax.numpy as jnp

from jax_grouped_gemm.primitives import bilinear
from jax_grouped_gemm.primitives.ragged_contracting import OP as CONTRACTING
from jax_grouped_gemm.primitives.ragged_noncontracting import OP as NONCONTRACTING


def _noncontracting_lhs(ct, rhs, sizes, offset, aval, *, transpose_lhs, transpose_rhs, **params):
    flags = dict(transpose_lhs=False, transpose_rhs=not transpose_rhs)
    out = NONCONTRACTING.bind(ct, rhs, sizes, offset, **flags, **params)
    return _swap_if(transpose_lhs, out)


def _noncontracting_rhs(ct, lhs, sizes, offset, aval, *, transpose_lhs, transpose_rhs, **params):
    params["num_groups"] = aval.shape[-3]
    if transpose_rhs:
        flags = dict(transpose_lhs=False, transpose_rhs=transpose_lhs)
        return CONTRACTING.bind(ct, lhs, sizes, offset, **flags, **params)
    flags = dict(transpose_lhs=transpose_lhs, transpose_rhs=False)
    return CONTRACTING.bind(lhs, ct, sizes, offset, **flags, **params)


def _contracting_lhs(
    ct, rhs, sizes, offset, aval, *, num_groups, transpose_lhs, transpose_rhs, **params
):
    flags = dict(transpose_lhs=transpose_rhs, transpose_rhs=True)
    out = NONCONTRACTING.bind(rhs, ct, sizes, offset, **flags, **params)
    return _swap_if(transpose_lhs, out)


def _contracting_rhs(
    ct, lhs, sizes, offset, aval, *, num_groups, transpose_lhs, transpose_rhs, **params
):
    flags = dict(transpose_lhs=transpose_lhs, transpose_rhs=False)
    out = NONCONTRACTING.bind(lhs, ct, sizes, offset, **flags, **params)
    return _swap_if(transpose_rhs, out)


def _swap_if(condition, x):
    return jnp.swapaxes(x, -1, -2) if condition else x


bilinear.register_transpose(NONCONTRACTING, _noncontracting_lhs, _noncontracting_rhs)
bilinear.register_transpose(CONTRACTING, _contracting_lhs, _contracting_rhs)
