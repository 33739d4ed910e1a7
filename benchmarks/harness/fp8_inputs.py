"""Makes FP8 operands from normal data, with scales of blocks, and references of their products."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks.harness import check
from benchmarks.harness.cases import Case, Problem, Shape
from benchmarks.harness.inputs import Inputs

DTYPE = "float8_e4m3fn"
BLOCK = 128
LARGEST = float(jnp.finfo(DTYPE).max)

# Sums in the tensor cores lose bits with every term. Wrong results have much larger errors.
FAST_ACCUMULATION_ERROR = 0.02


class Scaled(NamedTuple):
    """An FP8 operand with float32 scales, and the bfloat16 array from which it was quantised.

    Rows [m, k] have blocks of 1 x 128, and weights blocks of 128 x 128. Rows for a weight gradient
    are transposed blocks [b, k, 128], each of one group.
    """

    values: jax.Array
    scales: jax.Array
    source: jax.Array


Operands = tuple[Scaled, Scaled, jax.Array]


class ScaledInputs:
    """The operands of `sources`, an `Inputs`, quantised like those of DeepSeek-V3."""

    def __init__(self, shape: Shape, seed: int):
        self.sources = Inputs(shape, "bfloat16", seed)

    def operands(self, case: Case) -> Operands:
        lhs, rhs, sizes = self.sources.operands(case)
        if case.op.contracting:
            lhs, rhs = (Scaled(*_columns(x, sizes), x) for x in (lhs, rhs))
        else:
            lhs = Scaled(*_blockwise(lhs, (1, BLOCK)), lhs)
            rhs = Scaled(*_blockwise(rhs, (BLOCK, BLOCK)), rhs)
        return jax.block_until_ready((lhs, rhs, sizes))

    def reference(self, case: Case, operands: Operands) -> jax.Array:
        """Returns the product of the dequantised operands in float32."""
        return reference(case.problem, *operands)


def reference(problem: Problem, lhs: Scaled, rhs: Scaled, sizes: jax.Array) -> jax.Array:
    """Returns the float32 product of the dequantised operands."""
    if not problem.contracting:
        lhs, rhs = dequantize(lhs.values, lhs.scales), dequantize(rhs.values, rhs.scales)
        return check.reference(problem, lhs, rhs, sizes)
    lhs, rhs = (in_columns(dequantize(x.values, x.scales[..., None])).T for x in (lhs, rhs))
    # Each group is padded to a multiple of 128 rows.
    padded = -(-np.asarray(sizes) // BLOCK) * BLOCK
    return check.reference(dataclasses.replace(problem, m=len(lhs)), lhs, rhs, padded)


@jax.jit
def in_columns(blocks: jax.Array) -> jax.Array:
    """Returns transposed blocks of rows [b, k, 128] side by side as [k, 128 b]."""
    return jnp.moveaxis(blocks, 0, 1).reshape(blocks.shape[1], -1)


@jax.jit
def dequantize(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns values [..., r, c] times scales of elements, of blocks of 128, or of rows."""
    for axis in (-2, -1):
        if scales.shape[axis] not in (1, values.shape[axis]):
            scales = jnp.repeat(scales, BLOCK, axis)
            scales = jax.lax.slice_in_dim(scales, 0, values.shape[axis], axis=axis)
    return values.astype(jnp.float32) * scales


@jax.jit
def rowwise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantises x [..., r, c] to values, and float32 scales [..., r, 1] of rows."""
    x = x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-30) / LARGEST
    return jnp.clip(x / scales, -LARGEST, LARGEST).astype(DTYPE), scales


@functools.partial(jax.jit, static_argnums=1)
def _blockwise(x, block_shape):
    return jgg.quantize_blockwise(x, block_shape, DTYPE)


@jax.jit
def _columns(x, sizes):
    return jgg.quantize_ragged(x, sizes, DTYPE)[2:]
