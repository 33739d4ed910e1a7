"""Calls of the quantisers, one custom call each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.fp8.quantize.plan import QuantizePlan

COLUMN_MAXIMA_TARGET = "jax_grouped_gemm.column_maxima.v1"

QUANTIZERS = {
    name: f"jax_grouped_gemm.{name}.v1"
    for name in (
        "quantize_rows",
        "quantize_tokens",
        "quantize_blocks",
        "quantize_joined",
        "quantize_ragged",
    )
}

GATHERED_TARGET = "jax_grouped_gemm.quantize_gathered.v2"


def column_maxima(plan: QuantizePlan, x: jax.Array, window: jax.Array) -> list[jax.Array]:
    """Runs the kernel of `plan`, which is not `XLA`, on the primitive's operands."""

    def call(results):
        return jax.ffi.ffi_call(COLUMN_MAXIMA_TARGET, results)(x, window)

    return _those_asked_for(plan, call, x)


def _those_asked_for(
    plan: QuantizePlan, call: Callable[..., Sequence[jax.Array]], x: jax.Array
) -> list[jax.Array]:
    """Returns the results that are asked for; `call` gets empty shapes for the rest."""
    nothing = jax.ShapeDtypeStruct((0,), jnp.float32)
    asked_for = plan.problem.results
    results = [nothing if result is None else result for result in asked_for]
    if 0 in x.shape:
        # Without values there are no scales either.
        outs: Sequence[jax.Array] = [jnp.zeros(result.shape, result.dtype) for result in results]
    else:
        outs = call(results)
    return [out for out, wanted in zip(outs, asked_for, strict=True) if wanted is not None]


def quantize_gathered(
    plan: QuantizePlan, x: jax.Array, rows: jax.Array, scale: jax.Array, group_sizes: jax.Array
) -> list[jax.Array]:
    """Runs the kernels of `plan`, which are not `XLA`."""
    values, room = plan.problem.results
    assert values is not None
    if 0 in x.shape or 0 in values.shape:
        return [jnp.zeros(values.shape, values.dtype)]
    # A kernel's buffers are never empty.
    rows, sizes = (y if y.size else jnp.zeros((1,), y.dtype) for y in (rows, group_sizes))
    results = values, room or jax.ShapeDtypeStruct((0,), jnp.uint8)
    call = jax.ffi.ffi_call(GATHERED_TARGET, results)
    return [call(x, rows, scale, sizes, power_of_two=plan.problem.power_of_two)[0]]


def quantize(plan: QuantizePlan, x: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """Runs the quantiser of `plan`, which is not `XLA`, on the primitive's operands."""

    def call(results):
        # A kernel's buffers are never empty.
        filled = (y if y.size else jnp.zeros((1,), y.dtype) for y in others)
        return jax.ffi.ffi_call(QUANTIZERS[plan.problem.op], results)(
            x, *filled, power_of_two=plan.problem.power_of_two
        )

    return _those_asked_for(plan, call, x)
