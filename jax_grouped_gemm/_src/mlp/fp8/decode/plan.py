"""Plans FP8 layers of few tokens, whose kernels sort and quantise tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Target
from jax_grouped_gemm._src.fp8.formats import quantized_rows
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.fp8.scaled.plan import noncontracting
from jax_grouped_gemm._src.mlp.decode import plan as decode
from jax_grouped_gemm._src.mlp.fp8.decode.operands import Fp8DecodeOperands
from jax_grouped_gemm._src.mlp.fp8.hidden.plan import unfused_reason
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    COMPOSED,
    Plan,
    TileConfig,
    TiledKernel,
    always,
)
from jax_grouped_gemm._src.ragged.plan import plan_product

SORTS = "the kernels sort tokens by expert, and quantise the rows that they read"

KERNEL = TiledKernel(
    tile=TileConfig(tile_m=8, tile_n=128, cluster=1),
    schedule="quantizing",
    record=("h200_moe_decode.json", "qwen3_30b_1/moe_forward"),
    lhs=("bfloat16",),
    rhs=("float8_e4m3fn",),
    blocks=2,
    in_order=always,
)
"""The kernel of both products, whose results have the same bits as those of the swapped kernel."""

MOST_ROWS = 1.5
"""The most rows of an expert on average. With more rows, quantising them again for each 128 columns
takes longer than a kernel that only quantises (docs/notes/decode.md)."""


class Fp8DecodeProblem(MlpProblem[Fp8DecodeOperands]):
    """Static description of an FP8 layer of few tokens."""

    def __str__(self) -> str:
        given, (wi, wo) = self.operands.given, self.operands.quantized
        arrays = dict(x=given.x, chosen=given.chosen, scores=given.scores)
        arrays |= dict(wi=wi.values_t, wo=wo.values_t)
        operands = (f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items())
        return f"{self.op} {', '.join(operands)}, {self.params['num_experts']} groups"


def plan_decode(problem: Fp8DecodeProblem, target: Target) -> MlpPlan:
    """Plans an FP8 layer of few tokens. If no kernel can sort, other operations sort rows first."""
    given, params = problem.operands.given, problem.params
    layer, sizes = params["layer"], (*given.chosen.shape, params["num_experts"])
    composed = functools.partial(MlpPlan, problem, COMPOSED, target=target)
    if params["implementation"] == "xla":
        return composed(AS_ASKED)
    if not is_static(*sizes) or 0 in sizes:
        return composed("sizes are unknown, or zero")
    if reason := decode.too_many_reason(given.chosen.size, sizes[-1]):
        return composed(reason)
    if layer.alone:
        return composed("bf16 is predicted to be faster")
    if given.experts.has_biases:
        return composed("the kernels add no biases")
    if {given.x.dtype, layer.dtypes.projections, layer.dtypes.out} != {np.dtype(jnp.bfloat16)}:
        return composed("the kernels take tokens of bfloat16, and return bfloat16")
    if layer.tiles.forward is not None:
        return composed("kernels that quantise their rows have one tile")
    products = _products(problem, target)
    hidden = jax.ShapeDtypeStruct(products[0].problem.shape("mn"), jnp.bfloat16)
    if reason := unfused_reason("quantize_hidden", layer.hidden_layer, [hidden]):
        return composed(reason)
    if any(of.kernel_problem != of.problem or not _is_swapped(of) for of in products):
        return composed("groups of this many rows, or rows of this length, have another kernel")
    if given.chosen.size > MOST_ROWS * sizes[-1]:
        return composed(f"experts have more than {MOST_ROWS} rows on average")
    notes = (
        f"{name}: {of.prediction}"
        for name, of in zip(("gate and up", "down"), products, strict=True)
    )
    return MlpPlan(
        problem,
        KERNEL,
        kernel_problem=problem,
        notes=(SORTS, *notes),
        epilogue=f"{layer.hidden_layer.activation}(gate) * up * weights, in the product of down",
        target=target,
    )


def _is_swapped(plan: Plan[Any]) -> bool:
    return plan.launched[1].schedule == "swapped"


def _products(problem: Fp8DecodeProblem, target: Target) -> list[Plan[Any]]:
    """Returns the plans of the products of gate and up, and of down."""
    struct, given, params = jax.ShapeDtypeStruct, problem.operands.given, problem.params
    layer: Fp8Products = params["layer"]
    options = layer.product_params("forward", np.dtype(jnp.bfloat16))
    options["implementation"] = params["implementation"]
    groups = struct((params["num_experts"],), jnp.int32), given.offset
    dtypes = np.dtype(layer.recipe.forward_dtype), np.dtype(jnp.float32)

    def of(matrices: Any) -> Plan[Any]:
        rows = quantized_rows(given.chosen.size, matrices.values_t.shape[2])
        lhs = [struct(*x) for x in zip(rows, dtypes, strict=True)]
        avals = *lhs, matrices.values_t, matrices.scales_t, *groups
        return plan_product(noncontracting, avals, options, target)

    return [of(matrices) for matrices in problem.operands.quantized]
