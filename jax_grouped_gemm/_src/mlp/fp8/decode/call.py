"""The custom call of FP8 layers of few tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.plan import COMPOSED

TARGET = "jax_grouped_gemm.decode_fp8_mlp.v2"


def decode(plan: MlpPlan, *leaves: jax.Array) -> jax.Array:
    """Returns y [T, D]."""
    if plan.kernel == COMPOSED:
        return plan.compose(*leaves)
    params = plan.problem.params
    operands = plan.problem.given(leaves)
    given, (wi, wo), layer = operands.given, operands.quantized, params["layer"]
    epilogue = Epilogue.of(layer.hidden_layer.activation)
    assert epilogue is not None  # the plan has a kernel
    (_, d), pairs = given.x.shape, given.chosen.size
    struct, dtype = jax.ShapeDtypeStruct, given.x.dtype
    # All results but the first are buffers between kernels, in the order in which they are written.
    results = [
        struct(given.x.shape, dtype),
        struct(given.chosen.shape, jnp.int32),
        struct((pairs, wi.values_t.shape[1]), dtype),
        struct((pairs, d), dtype),
    ]
    return jax.ffi.ffi_call(TARGET, results)(
        given.x,
        given.chosen,
        given.scores.astype(jnp.float32),
        given.offset,
        wi.values_t,
        wi.scales_t,
        wo.values_t,
        wo.scales_t,
        power_of_two=layer.recipe.power_of_two_scales,
        groups=np.int32(params["num_experts"]),
        **epilogue.attributes(),
    )[0]
