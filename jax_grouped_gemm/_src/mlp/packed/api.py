"""Chooses how an MLP of quantised matrices is computed: packed, or dequantised first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jax_grouped_gemm._src.mlp import layer
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import MlpOperands
from jax_grouped_gemm._src.mlp.packed.primitive import PACKED_MLP
from jax_grouped_gemm._src.mlp.packed.reference import dequantized
from jax_grouped_gemm._src.mlp.primitive import Options, bind
from jax_grouped_gemm._src.quantized.plan import dequantized_reason as why_dequantized


def mlp(function: str, options: Options, operands: MlpOperands) -> jax.Array:
    """Computes `layer.mlp` with quantised matrices packed or dequantised, whichever is faster.

    Args:
      function: the public function, for messages.
      options: parameters of the primitive.
      operands: operands; any matrix may be quantised.
    """
    is_quantized = bool(operands.experts.quantized)
    reason = dequantized_reason(operands, vars(options)) if is_quantized else ""
    if not reason and layer.closes_over_traced(options, operands):
        reason = "activation closes over traced values"
    if is_quantized and not reason:
        return bind(PACKED_MLP, operands, **vars(options))
    return dequantized(function, options, operands, reason)


def dequantized_reason(operands: MlpOperands, params: Mapping[str, Any]) -> str:
    """Returns why weights are dequantised first, an empty string if kernels read them packed."""
    experts = operands.experts
    if len(experts.quantized) < len(experts.matrices):
        return "not all matrices are quantised"
    if experts.wi is not None:
        return "gate and up are one matrix"
    if Epilogue.of(params["activation"]) is None:
        return f"no kernel has the activation {params['activation']}"
    asked = params["precision"], params["implementation"]
    return why_dequantized(operands.packed_products, operands, *asked)
