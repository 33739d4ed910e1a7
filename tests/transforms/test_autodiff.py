"""Derivatives of both ops: any order, forward and reverse, with operands transposed or not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_grouped_gemm as jgg
from tests.support import oracle
from tests.support.ops import BOTH_OPS, NONCONTRACTING, random, swap

M, K, N, G = 21, 4, 5, 4
SIZES = np.array([6, 0, 9, 3], np.int32)

ALL_MAJORS = pytest.mark.parametrize(
    "majors",
    [dict(transpose_lhs=a, transpose_rhs=b) for a in (False, True) for b in (False, True)],
    ids=lambda majors: "".join("t" if t else "n" for t in majors.values()),
)


@pytest.fixture
def x64():
    """Enables float64, so that finite differences are exact enough to find wrong derivatives."""
    with jax.enable_x64(True):
        yield


def operands(op, rng, dtype=np.float64, **majors):
    """Returns random lhs and rhs of `op`, transposed as `majors` says."""
    shapes = op.shapes(M, K, N, G)[:2]
    return [
        swap(rng.standard_normal(shape).astype(dtype), majors.get(f"transpose_{name}", False))
        for name, shape in zip(("lhs", "rhs"), shapes, strict=True)
    ]


def product(op, group_offset=None, **majors):
    """Returns `op` on SIZES, without its jit, so that each product is compiled only once."""

    def function(lhs, rhs):
        return op.call.__wrapped__(lhs, rhs, SIZES, group_offset, **majors)

    return function


def dense(op, *, transpose_lhs=False, transpose_rhs=False):
    """Returns `product` as one einsum, which JAX differentiates by its own rules."""
    ends = np.cumsum(SIZES)
    member = (np.arange(M) >= (ends - SIZES)[:, None]) & (np.arange(M) < ends[:, None])
    equation = "gm,mk,gkn->mn" if op is NONCONTRACTING else "gm,mk,mn->gkn"

    def function(lhs, rhs):
        lhs = jnp.swapaxes(lhs, -1, -2) if transpose_lhs else lhs
        rhs = jnp.swapaxes(rhs, -1, -2) if transpose_rhs else rhs
        return jnp.einsum(equation, member.astype(lhs.dtype), lhs, rhs)

    return function


def close(actual, want):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), actual, want)


def sum_of_squares(function):
    return lambda lhs, rhs: jnp.sum(jnp.abs(function(lhs, rhs)) ** 2)


class TestAnyOrder:
    @BOTH_OPS
    @ALL_MAJORS
    def test_three_orders_in_both_modes(self, op, majors, rng, x64):
        check_grads(
            product(op, **majors), operands(op, rng, **majors), order=3, modes=("fwd", "rev")
        )

    @BOTH_OPS
    @ALL_MAJORS
    def test_hessian_vector_product(self, op, majors, rng, x64):
        primals, tangents = (tuple(operands(op, rng, **majors)) for _ in range(2))

        def of(function):
            return jax.jit(partial(jax.jvp, jax.grad(sum_of_squares(function), (0, 1))))(
                primals, tangents
            )

        close(of(product(op, **majors)), of(dense(op, **majors)))

    @BOTH_OPS
    def test_linearize(self, op, rng, x64):
        primals, tangents = operands(op, rng), operands(op, rng)
        out, linear = jax.linearize(product(op), *primals)
        close((out, linear(*tangents)), jax.jvp(dense(op), primals, tangents))

    @BOTH_OPS
    @ALL_MAJORS
    @pytest.mark.parametrize("factor", [0, 1])
    def test_linear_transpose(self, op, majors, factor, rng, x64):
        primals = operands(op, rng, **majors)
        cotangent = rng.standard_normal(op.shapes(M, K, N, G)[2])

        def of(function):
            def of_factor(x):
                return function(*(x if i == factor else primals[i] for i in range(2)))

            return jax.linear_transpose(of_factor, primals[factor])(cotangent)

        close(of(product(op, **majors)), of(dense(op, **majors)))


class TestGroupOffset:
    @pytest.mark.parametrize("offset", [-1, 1, 3])
    def test_traced_offset(self, offset, rng):
        shapes = ((M, K), (2, K, N), (M, N))
        lhs, rhs, cotangent = (random(rng, shape, np.float32) for shape in shapes)
        got = NONCONTRACTING.cotangents(lhs, rhs, SIZES, cotangent, np.int32(offset))
        want = oracle.noncontracting_cotangents(lhs, rhs, SIZES, cotangent, offset)
        oracle.check_all(got, want)

    def test_three_orders(self, rng, x64):
        lhs, rhs = operands(NONCONTRACTING, rng)
        function = product(NONCONTRACTING, np.array([1]))
        check_grads(function, (lhs, rhs[:2]), order=3, modes=("fwd", "rev"))


class TestDtypes:
    @BOTH_OPS
    @pytest.mark.parametrize(
        "lhs_dtype, rhs_dtype, out_dtype",
        [
            (jnp.bfloat16, jnp.bfloat16, jnp.float32),
            (jnp.bfloat16, jnp.float32, jnp.float32),
            (jnp.float32, jnp.float16, jnp.float32),
            (jnp.float32, jnp.float32, jnp.bfloat16),
        ],
    )
    def test_cotangents_have_the_operands_dtypes(self, op, lhs_dtype, rhs_dtype, out_dtype, rng):
        lhs_shape, rhs_shape, out_shape = op.shapes(M, K, N, G)
        lhs, rhs = random(rng, lhs_shape, lhs_dtype), random(rng, rhs_shape, rhs_dtype)
        # These integers are exact in every dtype above, so that rounding changes nothing.
        cotangent = rng.integers(-8, 9, out_shape).astype(out_dtype)
        got = op.cotangents(lhs, rhs, SIZES, cotangent, preferred_element_type=out_dtype)
        assert [x.dtype for x in got] == [lhs_dtype, rhs_dtype]
        oracle.check_all(got, op.exact_cotangents(lhs, rhs, SIZES, cotangent))

    @BOTH_OPS
    def test_complex(self, op, rng, x64):
        real, imaginary = operands(op, rng), operands(op, rng)
        primals = [x + 1j * y for x, y in zip(real, imaginary, strict=True)]
        close(product(op)(*primals), dense(op)(*primals))
        check_grads(product(op), primals, order=2, modes=("fwd", "rev"))

    @BOTH_OPS
    def test_real_times_complex(self, op, rng, x64):
        lhs, rhs = operands(op, rng)
        rhs = rhs + 1j * operands(op, rng)[1]

        def of(function):
            return jax.grad(sum_of_squares(function), (0, 1))(lhs, rhs)

        close(of(product(op)), of(dense(op)))


class TestSymbolicZeros:
    """A derivative that nobody asked for costs no product."""

    @BOTH_OPS
    @pytest.mark.parametrize("wrt, products", [(0, 2), (1, 2), ((0, 1), 3)])
    def test_gradient(self, op, wrt, products, rng):
        gradient = jax.grad(sum_of_squares(product(op)), wrt)
        assert len(jgg.explain(gradient, *operands(op, rng, np.float32)).plans) == products

    @BOTH_OPS
    def test_tangent_of_one_factor(self, op, rng):
        lhs, rhs = operands(op, rng, np.float32)

        def tangent(lhs):
            return jax.jvp(lambda lhs: product(op)(lhs, rhs), (lhs,), (lhs,))

        assert len(jgg.explain(tangent, lhs).plans) == 2

    @BOTH_OPS
    def test_group_sizes_have_no_tangent(self, op, rng):
        lhs, rhs = operands(op, rng, np.float32)
        zero = np.zeros(G, jax.dtypes.float0)
        out, tangent = jax.jvp(lambda sizes: op.call(lhs, rhs, sizes), (SIZES,), (zero,))
        oracle.check(out, op.exact(lhs, rhs, SIZES))
        np.testing.assert_array_equal(tangent, np.zeros(out.shape))
