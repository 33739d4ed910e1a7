"""Programs exported for any number of rows, then compiled for an H200 with a certain number."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jax_grouped_gemm as jgg


@pytest.mark.parametrize("m", [1, 1000])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_only_the_kernel_runs(m, dtype, h200):
    weights = jax.ShapeDtypeStruct((3, 64, 128), dtype)
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    rows = export.symbolic_shape("m, 64")
    program = export.export(
        jax.jit(jgg.ragged_dot),
        platforms=["cuda"],
        disabled_checks=jgg.EXPORT_DISABLED_CHECKS,
    )(jax.ShapeDtypeStruct(rows, dtype), weights, sizes)
    compiled = h200.compile(program.call, jax.ShapeDtypeStruct((m, 64), dtype), weights, sizes)
    assert compiled.kernels == {"ragged_noncontracting": 1}
