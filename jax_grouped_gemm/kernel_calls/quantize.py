"""Calls of the quantisers."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_grouped_gemm._ffi import TARGETS
from jax_grouped_gemm.plan_fp8 import QuantizePlan


def quantize(plan: QuantizePlan, x: jax.Array, *group_sizes: jax.Array) -> list[jax.Array]:
    """Runs the quantiser of `plan`, whose path is not "reference", on its primitive's operands."""
    wanted = [result is not None for result in plan.results]
    nothing = jax.ShapeDtypeStruct((0,), jnp.float32)
    results = [nothing if result is None else result for result in plan.results]
    if 0 in x.shape:
        outs = [jnp.full(r.shape, r.dtype == jnp.float32, r.dtype) for r in results]
    else:
        # A kernel's buffers are never empty.
        sizes = [y if y.size else jnp.zeros((1,), y.dtype) for y in group_sizes]
        outs = jax.ffi.ffi_call(TARGETS[plan.op], results)(
            x, *sizes, power_of_two=plan.power_of_two
        )
    return [out for out, is_wanted in zip(outs, wanted, strict=True) if is_wanted]
