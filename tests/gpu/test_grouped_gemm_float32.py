"""Lists of products of float32 operands on the tensor cores: their range and their accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import F32
from tests.support.families import FLOAT32, check_list, each
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.products import random_list

on_gpu = dict(implementation="cuda")


@each(*FLOAT32)
class TestRange:
    def test_each_matrix_has_its_own_scale(self, family, rng):
        problems = random_list(rng, [(9, 136, 72, 200), (64, 64, 64), (64, 64, 64)], F32)
        for x in (*problems.lhs, *problems.rhs):
            exponents = rng.integers(-50, 50, (len(x), 1, 1) if x.ndim == 3 else ())
            x[...] = np.ldexp(np.clip(x, -3, 3), exponents)
        for i, out in enumerate(problems(**family.options)):
            out, exact = np.asarray(out), problems.exact(i)
            error = np.abs(out - exact.value)
            allowed = PRODUCT_ERROR[family.precision] + 2.0**-23 * exact.depth
            assert (error <= allowed * exact.magnitude).all()

    @pytest.mark.parametrize("exponents", [(-140, 125), (125, -140), (60, 60), (0, -144)])
    def test_extreme_scales(self, family, exponents, rng):
        problems = random_list(rng, [(2, 136, 72, 200)], F32)
        for x, exponent in zip((problems.lhs[0], problems.rhs[0]), exponents, strict=True):
            x[...] = np.ldexp(np.clip(x, -3, 3), exponent)
        check_list(family, problems)

    def test_magnitudes_within_a_matrix(self, family, rng):
        problems = random_list(rng, [(136, 200, 200)], F32)
        for x in (problems.lhs[0], problems.rhs[0]):
            x[...] = np.copysign(2.0 ** rng.uniform(-13, 13, x.shape), x)
        check_list(family, problems)

    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_non_finite_is_what_the_sum_of_products_is(self, family, value, rng):
        problems = random_list(rng, [(264, 136, 200)], F32)
        for x in (problems.lhs[0], problems.rhs[0]):
            x.flat[rng.integers(0, x.size, 3)] = value
        (out,) = problems(**family.options)
        with np.errstate(invalid="ignore"):
            want = problems.exact(0).value
        out = np.asarray(out)
        np.testing.assert_array_equal(out[~np.isfinite(want)], want[~np.isfinite(want)])
        assert np.isfinite(out[np.isfinite(want)]).all()


@pytest.mark.parametrize("depth", [64, 1024, 4096])
def test_no_worse_than_a_float32_dot(depth, rng):
    """Compares the mean square and the maximum of the error relative to |lhs| |rhs|.

    The bound of the maximum leaves room for chance.
    """
    problems = random_list(rng, [(1024, depth, 1024)], F32)
    exact = problems.exact(0)
    (ours,) = problems(precision="highest", **on_gpu)
    dot = jnp.matmul(problems.lhs[0], problems.rhs[0], precision="highest")

    def errors(out):
        relative = np.abs(np.asarray(out).astype(np.float64) - exact.value) / exact.magnitude
        return np.array([relative.max(), np.sqrt(np.mean(relative**2))])

    assert (errors(ours) <= [1.2, 1] * errors(dot)).all(), (errors(ours), errors(dot))


def test_exported(rng):
    problems = random_list(rng, [(136, 72, 200), (64, 64, 64)], F32)

    @jax.jit
    def function(lhs, rhs):
        return jgg.grouped_gemm(lhs, rhs, precision="highest", **on_gpu)

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (problems.lhs, problems.rhs)
    )
    exported = jax.export.export(
        function, platforms=["cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(*shapes)
    outs = jax.export.deserialize(exported.serialize()).call(problems.lhs, problems.rhs)
    for out, want in zip(outs, function(problems.lhs, problems.rhs), strict=True):
        np.testing.assert_array_equal(out, want)
