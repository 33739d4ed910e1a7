"""XLA's products of all rows with every group's matrix, to which small problems fall back.

`_src.fallback` predicts for which problems they are faster than the kernels.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.fallback import Work
from jax_grouped_gemm._src.float32 import FULL_TERMS
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.ragged.reference import local_group_bounds


def xla_work(problem: RaggedProblem) -> Work | None:
    """Returns the work of XLA's product for `fallback`, None if XLA has no such product."""
    g, m, k, n = problem.shape("gmkn")
    if problem.accumulates or problem.batch or not is_static(g, m, k, n):
        return None
    lhs, rhs, out = (math.prod(problem.shape(names)) * x.itemsize for names, x in problem.arrays)
    if problem.contracts_rows:
        kind, products, copied = "contracting", (g, k, n, m), g * (lhs + rhs)
    else:
        kind, products = "noncontracting", (g, m, n, k)
        copied = out if g == 1 else g * (lhs + out)
    return Work(
        kind,
        "XLA's products of all rows",
        (products,),
        problem.lhs_dtype,
        problem.terms,
        moved_bytes=lhs + rhs + out,
        pass_bytes=2 * copied,  # copies are written and read
        copied_bytes=copied,
    )


def product(
    plan: Plan[RaggedProblem],
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """Computes the reference as one batched product and masks.

    A NaN or Inf in another group's matrix or rows reaches no result, because masks select the
    group's rows of the products, or of both factors.
    """
    problem = plan.problem
    g, m = problem.shape("gm")
    starts, ends = local_group_bounds(group_sizes, group_offset, g, m)
    rows = lax.broadcasted_iota(jnp.int32, (g, m), 1)
    owned = (rows >= starts[:, None]) & (rows < ends[:, None])

    def dot(lhs, rhs, lhs_axis, rhs_axis):
        return lax.dot_general(
            lhs,
            rhs,
            (((lhs_axis,), (rhs_axis,)), ((0,), (0,))),
            precision=lax.Precision.HIGHEST if plan.terms == FULL_TERMS else None,
            preferred_element_type=problem.out_dtype,
        )

    lhs = jnp.broadcast_to(lhs, (g, *lhs.shape))
    row_axis = 1 + problem.lhs.index("m")
    if not problem.contracts_rows:
        products = dot(lhs, rhs, 1 + problem.lhs.index("k"), problem.rhs.index("k"))
        # Each row has at most one group, so the sum adds zeros to at most one product.
        return _select(owned, products, 1).sum(axis=0)
    rhs = jnp.broadcast_to(rhs, (g, *rhs.shape))
    rhs_axis = 1 + problem.rhs.index("m")
    # Mask both factors, because a zero in one does not silence a NaN in the other.
    return dot(_select(owned, lhs, row_axis), _select(owned, rhs, rhs_axis), row_axis, rhs_axis)


def _select(owned: jax.Array, x: jax.Array, row_axis: int) -> jax.Array:
    """Returns the rows of x [g, ...] that each group owns, zeros elsewhere."""
    return lax.select(lax.broadcast_in_dim(owned, x.shape, (0, row_axis)), x, jnp.zeros_like(x))
