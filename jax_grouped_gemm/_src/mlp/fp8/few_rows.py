"""Products of an MLP in FP8 for groups of few rows, one kernel each.

It reads tokens where they are, in 16 bits, quantises them on the way, and applies biases, activation
and the weights of rows to what it adds up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.fp8.formats import Pair
from jax_grouped_gemm._src.fp8.products import Fp8Products
from jax_grouped_gemm._src.mlp import call
from jax_grouped_gemm._src.mlp import rows as token_rows
from jax_grouped_gemm._src.mlp.biases import bias_rows
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.fp8.hidden import HiddenLayer
from jax_grouped_gemm._src.mlp.plan import DTYPES, FEW_ROWS, FEW_ROWS_TILE, MlpPlan
from jax_grouped_gemm._src.mlp.problem import MlpProblem
from jax_grouped_gemm._src.mlp.reference import row_weights
from jax_grouped_gemm._src.op import Op
from jax_grouped_gemm._src.plan import AS_ASKED, TMA_ALIGNMENT_BYTES, symbolic_sizes
from jax_grouped_gemm._src.ragged.reference import owned_rows

TARGET = "jax_grouped_gemm.few_rows_quantized_dot.v1"

OPERANDS = ("x", "rows", "inverse", "b0", "b1", "weights", "group_sizes", "group_offset")


def product(
    products: Fp8Products,
    hidden_layer: HiddenLayer | None,
    matrices: Pair,
    operands: Mapping[str, Any],
) -> jax.Array | None:
    """[m, n] in the dtype of x, as quantised rows and the products of `products` give it; None
    where no kernel for few rows is to compute it.

    Args:
      products: what the layer's products have in common.
      hidden_layer: what the product is the first half of; None for the product alone.
      matrices: [g, n, k] and their scales, of gate and up if there is a `hidden_layer`.
      operands: those of `OPERANDS`, of which x, group_sizes and group_offset are always there.
    """
    given = {name: operands[name] for name in OPERANDS if name in operands}
    given |= dict(matrices._asdict())
    params = dict(
        names=tuple(given),
        products=products,
        hidden_layer=hidden_layer,
        implementation=products.implementation,
    )
    if plan_product([jax.typeof(x) for x in given.values()], params).path != "fused":
        return None
    return PRODUCT.bind(*given.values(), **params)


def plan_product(avals: Sequence[Any], params: Mapping[str, Any], target: Target = H200) -> MlpPlan:
    """Plans a `few_rows_quantized_dot`: on the path "unfused" it is to be several operations."""
    operands = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in zip(params["names"], avals, strict=True)
    }
    problem = MlpProblem("few_rows_quantized_dot", operands, params)
    if params["implementation"] == "reference":
        return MlpPlan(problem, "reference", AS_ASKED, target=target)
    if reason := _unfused_reason(problem):
        return MlpPlan(problem, "unfused", reason, target=target)
    words = "rows quantised on the way"
    if (layer := params["hidden_layer"]) is not None:
        words += f", {layer.activation.function}(gate)" + " * up" * layer.has_up
    return MlpPlan(
        problem,
        "fused",
        kernel_problem=problem,
        tile=FEW_ROWS_TILE,
        epilogue=words + " * weights" * ("weights" in operands),
        gather="in place" if "rows" in operands else "",
        target=target,
    )


def _unfused_reason(problem: MlpProblem) -> str:
    """Why no kernel is to run this, empty if one is."""
    operands = problem.operands
    products, layer = problem.params["products"], problem.params["hidden_layer"]
    x, values = operands["x"], operands["values"]
    if products.recipe.scaling != "blockwise" or values.dtype != jnp.float8_e4m3fn:
        return "the kernel takes float8_e4m3fn with scales of blocks"
    if x.dtype not in DTYPES:
        return f"the kernel takes bfloat16 or float16, got {x.dtype}"
    if layer is not None and Epilogue.of(layer.activation) is None:
        return f"no kernel has the activation {layer.activation.function}"
    sizes = [x for name, x in operands.items() if name != "inverse"]
    if reason := symbolic_sizes(sizes):
        return reason
    if any(0 in x.shape for x in sizes):
        return "there is nothing to multiply"
    if products.tiles.forward is not None:
        return f"another kernel has the tile {products.tiles.forward}"
    if values.shape[2] % TMA_ALIGNMENT_BYTES or _columns(operands, layer) % 8:
        return f"rows of {list(values.shape)} or of the result are not a multiple of 16 bytes"
    groups = operands["group_sizes"].shape[0]
    if problem.num_rows > FEW_ROWS * groups:
        return f"{problem.num_rows} rows of {groups} groups are not few"
    return ""


def _columns(operands, layer) -> int:
    return operands["values"].shape[1] if layer is None else layer.columns


def _aval(*operands, names, hidden_layer, **_):
    given = dict(zip(names, operands, strict=True))
    shape = given.get("rows", given["x"]).shape[0], _columns(given, hidden_layer)
    return PRODUCT.unsharded_aval(operands, shape, given["x"].dtype)


def _call(plan: MlpPlan, *operands: jax.Array) -> jax.Array:
    if plan.path == "unfused":
        return plan.compose(*operands)
    given = dict(zip(plan.problem.operands, operands, strict=True))
    params = plan.problem.params
    layer, recipe = params["hidden_layer"], params["products"].recipe
    shape = given.get("rows", given["x"]).shape[0], _columns(given, layer)
    (y,) = call.activated(
        TARGET,
        plan,
        given,
        (given["x"], given["values"], given["scales"]),
        ("rows", "b0", "b1"),
        [jax.ShapeDtypeStruct(shape, given["x"].dtype)],
        None if layer is None else Epilogue.of(layer.activation),
        zeroes_unowned=True,
        power_of_two=recipe.power_of_two_scales,
    )
    return y


def _reference(*operands, names, products, hidden_layer, **_):
    given = dict(zip(names, operands, strict=True))
    products = dataclasses.replace(products, implementation="reference")
    x = token_rows.on_rows(given["x"], given)
    sizes, offset = given["group_sizes"], given["group_offset"]
    rows, _ = products.quantize_rows(x, sizes, products.recipe.forward_dtype, plain=True)
    matrices = Pair(given["values"], given["scales"])
    has_biases = "b0" in given or "b1" in given
    dtype = np.dtype(at_least_float32(x.dtype) if has_biases else x.dtype)
    y = products.rows_by_weights("forward", rows, matrices, sizes, offset, dtype)
    if hidden_layer is None:
        return y
    y = with_biases(hidden_layer, y, given).astype(x.dtype)
    owned = owned_rows(sizes, offset, given["values"].shape[0], y.shape[0])
    return hidden_layer.hidden(y, row_weights(given.get("weights"), owned, y))


def with_biases(hidden_layer: HiddenLayer, projections: jax.Array, given: Mapping[str, Any]):
    """Projections [m, P] with the biases b0 and b1 [g, F] of `given` added to gate and up."""
    if "b0" not in given and "b1" not in given:
        return projections
    halves = hidden_layer.split(projections)
    sums = [
        x + rows_of_bias(given[name].astype(x.dtype), given, x.shape[0]) if name in given else x
        for name, x in zip(("b0", "b1"), halves, strict=True)
    ]
    return hidden_layer.join(*sums)


def rows_of_bias(bias: jax.Array, given: Mapping[str, Any], num_rows: int) -> jax.Array:
    """The bias [g, n] of each row's expert: [num_rows, n]."""
    return bias_rows(bias, given["group_sizes"], given["group_offset"][0], num_rows)


PRODUCT: Op = Op(
    name="few_rows_quantized_dot",
    operand_ranks=None,
    targets=(TARGET,),
    avals=_aval,
    planner=plan_product,
    call=_call,
    reference=_reference,
)


def _batch(operands, dims, **params):
    out = jax.vmap(lambda *x: _reference(*x, **params), dims)(*operands)
    return out, 0


PRODUCT.def_batching(_batch)
PRODUCT.has_no_derivative()
