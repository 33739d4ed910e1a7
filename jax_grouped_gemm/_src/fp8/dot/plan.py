"""Plans of the FP8 weight gradient of rows that each device quantises for itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_grouped_gemm._src.fp8.formats import quantized_groups
from jax_grouped_gemm._src.fp8.scaled import plan
from jax_grouped_gemm._src.fp8.scaled.problem import ScaledProblem
from jax_grouped_gemm._src.plan import Plan
from jax_grouped_gemm._src.ragged.plan import Candidates, plan_product


@dataclasses.dataclass(frozen=True)
class GradientPlan(Plan[ScaledProblem]):
    """That of the product, and what quantises its operands."""

    params: tuple[tuple[str, Any], ...] = ()


def candidates(avals, params) -> Candidates[ScaledProblem]:
    lhs, rhs, sizes, offset = avals
    recipe = params["products"].recipe
    blocks: list[Any] = []
    for x, dtype in ((lhs, recipe.forward_dtype), (rhs, recipe.gradient_dtype)):
        m, columns = x.shape
        values, scales = quantized_groups(m, columns, sizes.shape[0])
        blocks.append(jax.ShapeDtypeStruct(values, dtype))
        blocks.append(jax.ShapeDtypeStruct(scales, "float32"))
    of_product = dict(params, num_rows=lhs.shape[0], preferred_element_type=params["dtype"])
    return plan.contracting([*blocks, sizes, offset], of_product)


READ = ("products", "dtype", "num_groups", "implementation")
"""The parameters that are read where the operation is composed of others."""


def plan_gradient(avals, params, target) -> GradientPlan:
    """Plans a `quantized_weight_gradient`."""
    found = plan_product(candidates, avals, params, target)
    fields: dict[str, Any] = {x.name: getattr(found, x.name) for x in dataclasses.fields(found)}
    return GradientPlan(**fields, params=tuple((name, params[name]) for name in READ))
