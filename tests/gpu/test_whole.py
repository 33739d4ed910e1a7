"""Small products, which plans leave to XLA's products of all rows, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.ops import BOTH_OPS, CONTRACTING, MAJORS, random, swap
from tests.support.products import random_list

pytestmark = pytest.mark.plans_as_users_get_them

# Groups, rows, k and n.
SHAPES = [(1, 512, 1600, 1312), (2, 8, 856, 1816), (2, 64, 384, 512), (4, 16, 200, 392)]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@MAJORS
@BOTH_OPS
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_products(op, transpose_lhs, transpose_rhs, dtype, sizes, rng):
    g, m, k, n = sizes
    for _ in range(4):
        group_sizes = sizes_of.any_kind(rng, m, g)
        lhs, rhs, _ = (random(rng, shape, dtype) for shape in op.shapes(m, k, n, g))
        windows = oracle.group_rows(group_sizes, 0, g, m)
        for group, (start, end) in enumerate(windows):
            if op is not CONTRACTING and start == end:
                rhs[group] = np.nan
        out = op.call(
            swap(lhs, transpose_lhs),
            swap(rhs, transpose_rhs),
            group_sizes,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
        )
        error = PRODUCT_ERROR["default"] if dtype == F32 else 0.0
        oracle.check(out, op.exact(lhs, rhs, group_sizes, 0), product_error=error)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_short_lists(dtype, rng):
    for shapes in ([(96, 24, 40)], [(72, 320, 88)], [(576, 512, 24), (384, 48, 88)]):
        problems = random_list(rng, shapes, dtype)
        error = PRODUCT_ERROR["default"] if dtype == F32 else 0.0
        problems.check(problems(), product_error=error)


def test_it_is_what_runs():
    x, w = (jnp.ones(s, BF16) for s in ((8, 1856), (2, 1856, 2816)))
    program = jax.jit(jgg.ragged_dot).lower(x, w, jnp.array([3, 5])).compile()
    assert "jax_grouped_gemm." not in program.as_text()
