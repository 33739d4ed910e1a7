"""The two ragged matmuls through the public API, with flags for transposed operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import oracle

STATIC = (
    "transpose_lhs",
    "transpose_rhs",
    "preferred_element_type",
    "precision",
    "implementation",
    "tile",
)


@partial(jax.jit, static_argnames=STATIC)
def noncontracting(
    lhs,
    rhs,
    group_sizes,
    group_offset=None,
    *,
    transpose_lhs=False,
    transpose_rhs=False,
    tile=None,
    **options,
):
    """Multiplies lhs [m, k] or [k, m] by rhs [g, k, n] or [g, n, k] into [m, n]."""
    m_axis, k_axis = (1, 0) if transpose_lhs else (0, 1)
    dimension_numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((k_axis,), (2 if transpose_rhs else 1,)), ((), ())),
        lhs_ragged_dimensions=(m_axis,),
        rhs_group_dimensions=(0,),
    )
    with jgg.use_tiles(forward=tile):
        return jgg.ragged_dot_general(
            lhs, rhs, group_sizes, dimension_numbers, group_offset=group_offset, **options
        )


@partial(jax.jit, static_argnames=STATIC)
def contracting(
    lhs,
    rhs,
    group_sizes,
    group_offset=None,
    *,
    transpose_lhs=False,
    transpose_rhs=False,
    tile=None,
    **options,
):
    """Multiplies lhs [m, k] or [k, m] by rhs [m, n] or [n, m] into [g, k, n]."""
    lhs_m_axis, rhs_m_axis = int(transpose_lhs), int(transpose_rhs)
    dimension_numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((lhs_m_axis,), (rhs_m_axis,)), ((), ())),
        lhs_ragged_dimensions=(lhs_m_axis,),
        rhs_group_dimensions=(),
    )
    with jgg.use_tiles(forward=tile):
        return jgg.ragged_dot_general(
            lhs, rhs, group_sizes, dimension_numbers, group_offset=group_offset, **options
        )


@dataclass(frozen=True)
class Op:
    """One of the two ops, its exact results, and the shapes of operands and results."""

    call: Callable
    exact: Callable
    exact_cotangents: Callable
    shapes: Callable  # (m, k, n, g) -> (lhs, rhs, out), for operands that are not transposed

    def __repr__(self) -> str:
        return self.call.__name__

    def cotangents(self, lhs, rhs, group_sizes, cotangent, group_offset=None, **options):
        """Returns the cotangents of lhs and rhs by reverse-mode differentiation."""
        return _cotangents(
            self.call, lhs, rhs, group_sizes, cotangent, group_offset, tuple(options.items())
        )


@partial(jax.jit, static_argnums=(0, 6))
def _cotangents(call, lhs, rhs, group_sizes, cotangent, group_offset, options):
    def of_operands(lhs, rhs):
        return call(lhs, rhs, group_sizes, group_offset, **dict(options))

    return jax.vjp(of_operands, lhs, rhs)[1](cotangent)


NONCONTRACTING = Op(
    noncontracting,
    oracle.ragged_noncontracting,
    oracle.noncontracting_cotangents,
    lambda m, k, n, g: ((m, k), (g, k, n), (m, n)),
)
CONTRACTING = Op(
    contracting,
    oracle.ragged_contracting,
    oracle.contracting_cotangents,
    lambda m, k, n, g: ((m, k), (m, n), (g, k, n)),
)
OPS = (NONCONTRACTING, CONTRACTING)
BOTH_OPS = pytest.mark.parametrize("op", OPS, ids=repr)
MAJORS = pytest.mark.parametrize(
    "transpose_lhs, transpose_rhs", [(a, b) for a in (False, True) for b in (False, True)]
)


def random(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    """Returns normal values rounded to `dtype`."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def swap(array, transpose: bool) -> np.ndarray:
    """Returns the array, with its last two dimensions exchanged in memory if `transpose`."""
    array = np.asarray(array)
    return np.ascontiguousarray(np.swapaxes(array, -1, -2)) if transpose else array


def accumulation_shapes(m, k, n, g, dtype=jnp.bfloat16):
    """Returns the shapes of the operands of `ragged_dot_accumulate`."""
    lhs, rhs, accumulator = CONTRACTING.shapes(m, k, n, g)
    return (
        jax.ShapeDtypeStruct(accumulator, jnp.float32),
        jax.ShapeDtypeStruct(lhs, dtype),
        jax.ShapeDtypeStruct(rhs, dtype),
        jax.ShapeDtypeStruct((g,), jnp.int32),
    )
