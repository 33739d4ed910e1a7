"""Plans of products that are not run."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.quantized.format import Parts, register
from jax_grouped_gemm._src.ragged import primitive as ragged

PLAIN = register(
    jgg.Format("int8_plain", np.dtype(np.int8), 8),
    dequantize=lambda parts, format, matrix, dtype: parts.values.astype(dtype),
    quantize=lambda x, format: Parts(x.astype(jnp.int8)),
)
"""A format that no kernel reads."""


def how(plan: jgg.Plan) -> str:
    """Returns "kernel", "copies" if the kernel reads copies, or another computation's name."""
    if plan.kernel_problem is None:
        return plan.kernel.name
    return "copies" if plan.copies else "kernel"


def contracting_plan(
    m,
    k,
    n,
    groups,
    dtype=jnp.bfloat16,
    out_dtype=None,
    tile=None,
    *,
    transpose_lhs=False,
    transpose_rhs=False,
    precision=None,
    multiprocessors=None,
):
    """Returns the plan of lhs [m, k] times rhs [m, n], or transposes, into [groups, k, n]."""

    def shape(a, b, transpose):
        return jax.ShapeDtypeStruct((b, a) if transpose else (a, b), dtype)

    (plan,) = jgg.explain(
        partial(
            ragged.ragged_contracting,
            num_groups=groups,
            preferred_element_type=jnp.dtype(dtype if out_dtype is None else out_dtype),
            precision=precision and jax.lax.Precision(precision),
            implementation=None,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            tile=tile,
        ),
        shape(m, k, transpose_lhs),
        shape(m, n, transpose_rhs),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
        multiprocessors=multiprocessors,
    ).plans
    return plan
