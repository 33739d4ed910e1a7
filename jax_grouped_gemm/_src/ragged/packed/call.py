"""The custom call of a product that reads packed matrices."""

from __future__ import annotations

import jax

from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.quantized import call
from jax_grouped_gemm._src.quantized.plan import PackedProblem


def dot(plan: Plan[PackedProblem], x: jax.Array, *leaves: jax.Array) -> jax.Array:
    """Runs the kernel of `plan` on the leaves of `PackedOperands`."""
    *parts, sizes, offset = leaves
    arrays = dict(zip(plan.problem.names, parts, strict=True))
    return call.dot(plan, x, arrays, (sizes, offset), {})
