"""The custom call of FP8 layers of few tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.fp8.formats import quantized_rows
from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.plan import COMPOSED

TARGET = "jax_grouped_gemm.decode_fp8_mlp.v1"


def decode(plan: MlpPlan, *leaves: jax.Array) -> jax.Array:
    """Returns y [T, D]."""
    if plan.kernel == COMPOSED:
        return plan.compose(*leaves)
    params = plan.problem.params
    operands = plan.problem.given(leaves)
    given, (wi, wo), layer = operands.given, operands.quantized, params["layer"]
    epilogue = Epilogue.of(layer.hidden_layer.activation)
    assert epilogue is not None and plan.tile is not None  # the plan has a kernel
    (_, d), pairs = given.x.shape, given.chosen.size
    struct, int32, float32 = jax.ShapeDtypeStruct, jnp.int32, jnp.float32

    def quantized(columns: int) -> list[jax.ShapeDtypeStruct]:
        dtypes = np.dtype(layer.recipe.forward_dtype), float32
        shapes = quantized_rows(pairs, columns)
        return [struct(*x) for x in zip(shapes, dtypes, strict=True)]

    # All results but the first are buffers between kernels, in the order in which they are written.
    results = [
        struct(given.x.shape, given.x.dtype),
        *quantized(d),
        struct((pairs,), float32),
        struct(given.chosen.shape, int32),
        struct((params["num_experts"],), int32),
        struct((pairs, wi.values_t.shape[1]), given.x.dtype),
        *quantized(layer.hidden_layer.columns),
        struct((pairs, d), given.x.dtype),
    ]
    return jax.ffi.ffi_call(TARGET, results)(
        given.x,
        given.chosen,
        given.scores.astype(float32),
        given.offset,
        wi.values_t,
        wi.scales_t,
        wo.values_t,
        wo.scales_t,
        power_of_two=layer.recipe.power_of_two_scales,
        **{name: np.int32(size) for name, size in plan.tile.sizes().items()},
        **epilogue.attributes(),
    )[0]
