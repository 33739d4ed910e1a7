"""Mixture-of-experts layer for Flax NNX, and an optimiser for layers in FP8."""

from jax_grouped_gemm.flax.nnx.layer import MoE, Quantized, quantize, set_quantized
from jax_grouped_gemm.flax.nnx.optimizer import Optimizer, quantized_state

__all__ = ["MoE", "Optimizer", "Quantized", "quantize", "quantized_state", "set_quantized"]
