"""Kernels that leave unowned rows undefined.

Owned rows have the same bits as if kernels wrote zeros to unowned rows. Kernels that write in place
do not touch unowned rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.ragged.primitive import ragged_noncontracting
from tests.support import mlp_on_gpu as mlp
from tests.support.ops import random

CASES = pytest.mark.parametrize(
    "sizes, groups, offset",
    [([129, 0, 64, 1, 150], 5, 0), ([40, 300, 7, 200], 2, 1), ([0, 0, 3], 3, 0), ([0, 0], 2, 0)],
)
M, D, F = 1500, 264, 392


def operands(rng, groups, owned, dtype):
    x, dy = random(rng, (M, D), dtype), random(rng, (M, D), dtype)
    x[~owned] = dy[~owned] = np.nan
    wi_0, wi_1 = (mlp.matrices(rng, (groups, D, F), dtype) for _ in range(2))
    return x, dy, wi_0, wi_1, mlp.matrices(rng, (groups, F, D), dtype)


@CASES
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_expert_mlp(sizes, groups, offset, dtype, rng):
    owned = mlp.owned_rows(sizes, offset, groups, M)
    x, dy, wi_0, wi_1, wo = operands(rng, groups, owned, dtype)
    where = mlp.indices(sizes, offset)
    weights = np.where(owned, rng.uniform(0.1, 1, M), np.nan).astype(np.float32)
    given = dict(x=x, wi_0=wi_0, wi_1=wi_1, weights=weights) | where
    both = [
        list(map(np.asarray, mlp.gated(given, activation="silu", zeroes_unowned=zeroes)))
        for zeroes in (True, False)
    ]
    for want, got in zip(*both, strict=True):
        np.testing.assert_array_equal(got[owned], want[owned])

    hidden, gate, up = (x.copy() for x in both[0])
    gate[~owned] = up[~owned] = np.nan
    given = dict(dy=dy, wo=wo, gate=gate, up=up, weights=weights) | where
    both = [
        list(map(np.asarray, mlp.gradient(given, activation="silu", zeroes_unowned=zeroes)))
        for zeroes in (True, False)
    ]
    for want, got in zip(*both, strict=True):
        np.testing.assert_array_equal(got[owned], want[owned])
    if dtype == jnp.bfloat16:  # this kernel writes in place of gate and up
        for got in both[1][:2]:
            assert np.isnan(got[~owned].astype(np.float32)).all()

    pair = gate, up, wi_0, wi_1, *where.values()
    want, got = (np.asarray(mlp.paired(*pair, zeroes_unowned=zeroes)) for zeroes in (True, False))
    np.testing.assert_array_equal(got[owned], want[owned])


@CASES
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_product(sizes, groups, offset, dtype, transpose_rhs, rng):
    owned = mlp.owned_rows(sizes, offset, groups, M)
    x, _, w, *_ = operands(rng, groups, owned, dtype)

    def product(zeroes):
        return ragged_noncontracting(
            x,
            jnp.swapaxes(w, 1, 2) if transpose_rhs else w,
            *mlp.indices(sizes, offset).values(),
            transpose_lhs=False,
            transpose_rhs=transpose_rhs,
            preferred_element_type=np.dtype(dtype),
            precision=None,
            implementation="cuda",
            zeroes_unowned=zeroes,
        )

    want, got = (np.asarray(jax.jit(product, static_argnums=0)(zeroes)) for zeroes in (True, False))
    np.testing.assert_array_equal(got[owned], want[owned])
