"""A dot of two matrices, and masks of rows, for both forms of the reference (tiles and masks)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import at_least_float32, from_bits, to_bits


@dataclasses.dataclass(frozen=True)
class Dot:
    """A dot of two matrices that are given as bits; see `to_bits`.

    Attributes:
      contracting: the contracted dimensions of lhs and of rhs.
      lhs_dtype, rhs_dtype: dtypes of the matrices, of which the operands are the bits.
      accumulator_dtype: dtype in which to sum, and to add up parts of a result.
      result_dtype: dtype of the result.
      precision: precision of the dot.
    """

    contracting: tuple[int, int]
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    accumulator_dtype: np.dtype
    result_dtype: np.dtype
    precision: lax.PrecisionLike

    @classmethod
    def of(
        cls,
        lhs: jax.Array,
        rhs: jax.Array,
        contracting: tuple[int, int],
        result_dtype: np.dtype,
        precision: lax.PrecisionLike,
    ) -> Dot:
        """Returns a dot of matrices of these arrays' dtypes."""
        accumulator_dtype = _accumulator_dtype(lhs, rhs, result_dtype)
        return cls(contracting, lhs.dtype, rhs.dtype, accumulator_dtype, result_dtype, precision)

    def __call__(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Multiplies two matrices that are given as bits; returns `accumulator_dtype`."""
        lhs, rhs = from_bits(lhs, self.lhs_dtype), from_bits(rhs, self.rhs_dtype)
        if lhs.dtype != rhs.dtype:
            lhs, rhs = lhs.astype(self.accumulator_dtype), rhs.astype(self.accumulator_dtype)
        lhs_axis, rhs_axis = self.contracting
        return lax.dot_general(
            lhs,
            rhs,
            (((lhs_axis,), (rhs_axis,)), ((), ())),
            precision=self.precision,
            preferred_element_type=self.accumulator_dtype,
        )

    def result(self, accumulator: jax.Array) -> jax.Array:
        """Returns the bits of the sums in `result_dtype`."""
        if not jnp.issubdtype(self.result_dtype, jnp.complexfloating):
            # The result is the cotangent of a real factor whose other factor is complex.
            accumulator = jnp.real(accumulator)
        return to_bits(accumulator.astype(self.result_dtype))


def element(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], for an index that is in range."""
    return lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)


def rows_between(num_rows: int, start: jax.Array, end: jax.Array) -> jax.Array:
    """Returns whether each of `num_rows` rows is in [start, end)."""
    rows = lax.broadcasted_iota(jnp.int32, (num_rows,), 0)
    return (rows >= start) & (rows < end)


def where_owned(mask: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """Returns the rows along `axis` of `x` where `mask` is true, else zeros."""
    return select_rows(mask, x, jnp.zeros_like(x), axis)


def select_rows(mask: jax.Array, x: jax.Array, other: jax.Array, axis: int) -> jax.Array:
    """Returns the rows along `axis` of `x` where `mask` is true, else those of `other`."""
    # Select instead of multiplying, because other rows may hold NaN or Inf.
    return lax.select(lax.broadcast_in_dim(mask, x.shape, (axis,)), x, other)


def _accumulator_dtype(lhs: jax.Array, rhs: jax.Array, out_dtype: np.dtype) -> np.dtype:
    """Returns at least float32 for floating point; integers wrap, so they need no extra bits."""
    if not jnp.issubdtype(out_dtype, jnp.inexact):
        return out_dtype
    return jnp.result_type(*map(at_least_float32, (lhs.dtype, rhs.dtype, out_dtype)))
