"""Plans of the FP8 weight gradient of rows that each device quantises for itself."""

from __future__ import annotations

from typing import Any

import jax

from jax_grouped_gemm._src.fp8.formats import quantized_groups
from jax_grouped_gemm._src.fp8.scaled import plan
from jax_grouped_gemm._src.fp8.scaled.problem import ScaledProblem
from jax_grouped_gemm._src.ragged.plan import Candidates


def candidates(avals, params) -> Candidates[ScaledProblem]:
    """Returns the kernels for the product of a `quantized_weight_gradient`."""
    lhs, rhs, sizes, offset = avals
    recipe = params["products"].recipe
    blocks: list[Any] = []
    for x, dtype in ((lhs, recipe.forward_dtype), (rhs, recipe.gradient_dtype)):
        m, columns = x.shape
        values, scales = quantized_groups(m, columns, sizes.shape[0])
        blocks += jax.ShapeDtypeStruct(values, dtype), jax.ShapeDtypeStruct(scales, "float32")
    of_product = dict(params, num_rows=lhs.shape[0], preferred_element_type=params["dtype"])
    return plan.contracting([*blocks, sizes, offset], of_product)
