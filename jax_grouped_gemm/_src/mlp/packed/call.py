"""Calls of the kernels that read packed matrices, for an MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import MlpOperands
from jax_grouped_gemm._src.mlp.plan import MlpPlan
from jax_grouped_gemm._src.mlp.rows import copies
from jax_grouped_gemm._src.quantized import call


def mlp(of_mlp: MlpPlan, *leaves: jax.Array) -> jax.Array:
    """Runs the kernels of both products of a plan."""
    given: MlpOperands = of_mlp.problem.given(leaves)
    of_hidden, *of_down = of_mlp.packed
    experts, weights, params = given.experts, given.weights, of_mlp.problem.params
    weights = None if weights is None else weights.astype(jnp.float32)
    arrays = {name: matrices.arrays for name, matrices in experts.quantized.items()}
    activation = Epilogue.of(params["activation"])
    assert activation is not None  # the plan has a kernel
    indices, options = given.groups.indices, dict(zeroes_unowned=params["zeroes_unowned"])
    x, rows = given.rows.x, given.rows.rows
    if of_mlp.gather == "before":
        x, rows = copies(given.rows), None
    optional = dict(rows=rows, b0=experts.b0, b1=experts.b1, weights=weights)
    hidden = call.dot(
        of_hidden,
        x,
        arrays["wi_0"],
        indices,
        optional,
        up=arrays.get("wi_1"),
        activation=dict(activation.attributes(), function=np.int32(activation.function)),
        **options,
    )
    if not of_down:
        return hidden
    of_bias = dict(bo=experts.bo, weights=None if experts.bo is None else weights)
    return call.dot(of_down[0], hidden, arrays["wo"], indices, of_bias, **options)
