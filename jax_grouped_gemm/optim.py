"""Optimisers: Muon, and AdamW and Optax transformations that write FP8 weights.

`adamw` and `quantized` return an `Optimizer`, whose state has the FP8 weights of the next forward
pass. The pass that updates the float32 weights also writes the FP8 weights.

`muon` is momentum with orthogonalised updates. Newton-Schulz orthogonalisation consists of
symmetric products of small matrices, and of products of small and large matrices. One launch
computes such a product for all matrices of a model, whatever their shapes.

Muon is described at https://kellerjordan.github.io/posts/muon/.
"""

from jax_grouped_gemm._src.muon.coefficients import CLASSIC as COEFFICIENTS
from jax_grouped_gemm._src.muon.dimensions import MuonDimensionNumbers
from jax_grouped_gemm._src.muon.orthogonalize import orthogonalize
from jax_grouped_gemm._src.muon.state import MuonState, load_muon_state
from jax_grouped_gemm._src.muon.transform import muon, scale_by_muon
from jax_grouped_gemm._src.optimizer.api import Optimizer, OptimizerState, adamw, quantized
from jax_grouped_gemm._src.optimizer.rules import AdamWState
from jax_grouped_gemm._src.optimizer.weights import experts

__all__ = [
    "AdamWState",
    "COEFFICIENTS",
    "MuonDimensionNumbers",
    "MuonState",
    "Optimizer",
    "OptimizerState",
    "adamw",
    "experts",
    "load_muon_state",
    "muon",
    "orthogonalize",
    "quantized",
    "scale_by_muon",
]
