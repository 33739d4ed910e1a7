"""Muon's orthogonalisation with the kernels, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm.optim import orthogonalize
from tests.api import test_orthogonalize as shared
from tests.api.test_optim import plain, spread


def each_matrix(xs):
    return np.asarray(xs).reshape(-1, *xs.shape[-2:])


@pytest.mark.parametrize("method", ["auto", "standard", "gram"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_kernels(method, dtype, rng):
    if method == "gram" and dtype == jnp.bfloat16:
        pytest.skip("refused")
    shapes = [(256, 384), (384, 256), (3, 128, 128), (2, 136, 72), (100, 50)]
    matrices = [spread(rng, shape) for shape in shapes]
    options = dict(implementation="cuda", method=method, dtype=dtype)
    with jax.default_matmul_precision("highest"):
        outs = jax.jit(lambda m: orthogonalize(m, **options))(matrices)
    most = {jnp.float16: 0.02, jnp.bfloat16: 0.15, jnp.float32: 1e-3}[dtype]
    for out, x in zip(outs, matrices, strict=True):
        for one, matrix in zip(each_matrix(out), each_matrix(x), strict=True):
            want = plain(matrix)
            assert np.linalg.norm(one - want) < most * np.linalg.norm(want)


@pytest.mark.parametrize("shape", [(64, 176), (256, 640)])
@pytest.mark.parametrize("method", shared.METHODS)
@pytest.mark.parametrize("table", shared.TABLES)
def test_accuracy(table, method, shape, rng):
    shared.check_accuracy(rng, table, method, shape)


@pytest.mark.parametrize("method", ["standard float16", "gram"])
def test_accuracy_of_large_matrices(method, rng):
    shared.check_accuracy(rng, "polar_express", method, (768, 2048))


@pytest.mark.parametrize("shape", [(2048, 7168)])
def test_accuracy_of_the_largest(shape, rng):
    """Singular values span three decades, for which five steps in float16 have one restart."""
    # CPUs would take minutes in float64.
    with jax.enable_x64(True):
        u, s, vt = shared.factors(rng, np.geomspace(1, 1e-3, min(shape)), shape, jnp)
        x = ((u * s) @ vt).astype(jnp.float32)
    for table in ("classic", "polar_express"):
        for method in ("standard float16", "gram"):
            options, _, _ = shared.METHODS[method]
            call = jax.jit(functools.partial(orthogonalize, coefficients=table, **options))
            (out,) = call([x])
            with jax.enable_x64(True):
                shared.check_singular_values(out, table, method, u, s, vt, jnp)
                shared.check_error(out, table, method, u, s, vt, jnp)


class TestMethods(shared.TestMethods):
    """Runs on the GPU what CPU tests check: zeros, NaN, transposes, segments and other tables."""

    float32 = 1e-4

    @pytest.fixture(autouse=True)
    def in_float32(self):
        """Keeps XLA from computing float32 products in TF32."""
        with jax.default_matmul_precision("highest"):
            yield


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_bits_do_not_depend_on_the_list(method, rng):
    """Bits depend neither on the number of the other matrices nor on their values."""
    shapes = [(12, 256, 640), (520, 1032), (3, 136, 392), (40, 120, 1032), (2, 768, 2048)]
    matrices = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    call = jax.jit(lambda xs: orthogonalize(xs, method=method))
    together = call(matrices)
    for x, out in zip(matrices, together, strict=True):
        np.testing.assert_array_equal(call([x])[0], out)
        if x.ndim > 2:
            for i in range(len(x)):
                np.testing.assert_array_equal(call([x[i]])[0], out[i])
