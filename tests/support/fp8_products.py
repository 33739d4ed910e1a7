"""Products of FP8 operands with the kernels, and with a tile that the caller chooses."""

from __future__ import annotations

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.fp8.scaled import primitive
from tests.support import fp8_oracle
from tests.support.dtypes import E4M3

OUTPUTS = pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])


def fp8(rng, shape, dtype=E4M3):
    """Returns normal values, rounded to `dtype`."""
    return rng.standard_normal(shape, np.float32).astype(dtype)


def scales(rng, shape):
    """Returns positive scales of different magnitudes."""
    return np.exp(rng.uniform(-2, 2, shape)).astype(np.float32)


def lhs_scaling(lhs, lhs_scale):
    """Returns the name of the layout of `lhs_scale`, if the shapes determine it."""
    m, k = lhs.shape
    if lhs_scale.shape == (m, -(-k // 128)):
        return "1x128"
    if lhs_scale.shape in ((m, 1), (m,)):
        return "1xk"
    return "1x128 column-major" if lhs_scale.size > 1 else "tensor"


@contextlib.contextmanager
def use_tile(tile):
    """Makes FP8 products that are traced in this context take `tile`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("scaled_ragged_noncontracting", "scaled_ragged_contracting"):
            patch.setattr(primitive, name, partial(getattr(primitive, name), tile=tile))
        yield


@partial(jax.jit, static_argnames=("preferred_element_type", "tile", "fast_accumulation"))
def noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes, offset=None, tile=None, **options):
    """Multiplies by rhs [groups, n, k], with the plan's tile unless one is given."""
    with use_tile(tile):
        return jgg.scaled_ragged_dot(
            lhs,
            lhs_scale,
            rhs,
            rhs_scale,
            sizes,
            lhs_scaling=lhs_scaling(lhs, lhs_scale),
            transpose_rhs=True,
            group_offset=offset,
            implementation="cuda",
            **options,
        )


@partial(jax.jit, static_argnames=("num_rows", "num_groups", "preferred_element_type", "tile"))
def contracting(lhs, lhs_scale, rhs, rhs_scale, sizes, offset=None, tile=None, **options):
    """Contracts rows, with the plan's tile unless one is given."""
    with use_tile(tile):
        return jgg.scaled_ragged_dot_contracting(
            lhs,
            lhs_scale,
            rhs,
            rhs_scale,
            sizes,
            group_offset=offset,
            implementation="cuda",
            **options,
        )


def check(lhs, lhs_scale, rhs, rhs_scale, sizes, offset=None, *, tile, **options):
    """Asserts that the result of `noncontracting` is right, and returns it."""
    options["tile"] = tile
    out = noncontracting(lhs, lhs_scale, rhs, rhs_scale, sizes, offset, **options)
    if lhs_scale.ndim < 2:
        lhs_scale = lhs_scale.reshape(-1, 1)
    elif lhs_scale.shape[1] > lhs.shape[0]:
        lhs_scale = lhs_scale[:, : lhs.shape[0]].T
    if rhs_scale.shape == rhs.shape[:2]:
        rhs_scale = rhs_scale[:, :, None]
    elif rhs_scale.ndim < 3:
        rhs_scale = np.broadcast_to(rhs_scale.reshape(-1, 1, 1), (len(rhs), 1, 1))
    swapped = rhs.swapaxes(1, 2), rhs_scale.swapaxes(1, 2)
    exact = fp8_oracle.noncontracting(
        lhs, lhs_scale, *swapped, sizes, 0 if offset is None else offset
    )
    fp8_oracle.check(out, exact)
    return out
