"""The MLP of packed matrices, dequantised before they are multiplied."""

from __future__ import annotations

from typing import Any

import jax

from jax_grouped_gemm._src.mlp import layer
from jax_grouped_gemm._src.mlp.operands import MlpOperands
from jax_grouped_gemm._src.mlp.primitive import Options
from jax_grouped_gemm._src.quantized.weights import TRANSFORMED, with_arrays


def dequantized(function: str, options: Options, operands: MlpOperands, reason: str) -> jax.Array:
    """Computes `layer.mlp` with dequantised matrices; `reason` is for `explain`."""

    def of_arrays(experts: Any) -> jax.Array:
        given = MlpOperands(operands.rows, experts, operands.weights, operands.groups)
        return layer.mlp(options, given.promoted())

    return with_arrays(function, of_arrays, operands.experts, x=operands.rows.x, reason=reason)


def mlp(*leaves: jax.Array, tree: Any, **options: Any) -> jax.Array:
    """Computes the primitive in pure JAX."""
    return dequantized("ragged_mlp", Options(**options), tree.unflatten(leaves), TRANSFORMED)
