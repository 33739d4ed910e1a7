"""The operands of an FP8 layer of few tokens."""

from __future__ import annotations

import dataclasses

import jax

from jax_grouped_gemm._src.mlp.fp8.weights import QuantizedMlp
from jax_grouped_gemm._src.mlp.operands import DecodeOperands


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8DecodeOperands:
    """The operands of an FP8 layer of tokens that are not sorted by expert.

    Kernels read the quantised matrices. Derivatives in bf16 read the matrices of `given.experts`.
    """

    given: DecodeOperands
    quantized: QuantizedMlp
