"""The custom calls of layers of few tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import DecodeOperands, ExpertWeights
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.plan import COMPOSED

TARGET = "jax_grouped_gemm.decode_mlp.v1"
PACKED_TARGET = "jax_grouped_gemm.decode_packed_mlp.v3"


def decode(plan: MlpPlan, *leaves: jax.Array) -> jax.Array:
    """Returns y [T, D]."""
    if plan.kernel == COMPOSED:
        return plan.compose(*leaves)
    params = plan.problem.params
    given: DecodeOperands = plan.problem.given(leaves)
    experts, activation = given.experts, Epilogue.of(params["activation"])
    assert activation is not None and plan.tile is not None  # the plan has a kernel
    target, matrices, workspace = TARGET, _arrays(experts), []
    attributes: dict[str, Any] = {name: np.int32(size) for name, size in plan.tile.sizes().items()}
    if quantized := experts.quantized:
        target, matrices = PACKED_TARGET, _packed_arrays(quantized)
        workspace = [jax.ShapeDtypeStruct((plan.workspace_bytes,), jnp.uint8)]
        format = quantized["wo"].format
        attributes = dict(format=format.name, group_size=np.int32(format.group_size or 0))
    gate, down, optional = matrices
    optional |= {name: getattr(experts, name) for name in ("b0", "b1", "bo")}
    optional = {name: x for name, x in optional.items() if x is not None}
    (tokens, d), pairs = given.x.shape, given.chosen.size
    shapes = (tokens, d), (pairs, experts.hidden_columns), (pairs, d)
    results = [jax.ShapeDtypeStruct(shape, given.x.dtype) for shape in shapes]
    found = jax.ffi.ffi_call(target, [*workspace, *results])(
        given.x,
        given.chosen,
        given.scores.astype(jnp.float32),
        given.offset,
        gate,
        down,
        *optional.values(),
        optional=" ".join(optional),
        groups=np.int32(params["num_experts"]),
        function=np.int32(activation.function),
        **activation.attributes(),
        **attributes,
    )
    return found[len(workspace)]


def _arrays(experts: ExpertWeights) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Returns the matrices of gate (or gate and up) and of down, and a separate up by name."""
    gate, *up = experts.projections
    assert experts.wo is not None
    return gate, experts.wo, dict(wi_1=up[0] if up else None)


def _packed_arrays(quantized: Any) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    given = {
        f"{name}_{part}": array
        for name, matrices in quantized.items()
        for part, array in matrices.arrays.items()
    }
    return given.pop("wi_0_values"), given.pop("wo_values"), given
