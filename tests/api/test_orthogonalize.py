"""Both methods of Newton-Schulz against float64, and what must not change their results."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.muon.coefficients import NAMED
from jax_grouped_gemm.optim import COEFFICIENTS, orthogonalize

SHAPE = (64, 176)
TABLES = ("classic", "dion", "polar_express")
# Five exact steps map singular values of at least 0.003 times the norm into these intervals.
BANDS = {"classic": (0.68, 1.21), "dion": (0.97, 1.15), "polar_express": (0.84, 1.13)}
# Options, how far rounding may widen a band, and a bound of the relative error of a result.
METHODS = {
    "standard float16": (dict(method="standard", dtype=jnp.float16), 0.02, 0.02),
    "standard bfloat16": (dict(method="standard", dtype=jnp.bfloat16), 0.05, 0.1),
    "gram": (dict(method="gram"), 0.02, 0.02),
    "gram (2,)": (dict(method="gram", restarts=(2,)), 0.2, 0.12),
    "gram (2, 4)": (dict(method="gram", restarts=(2, 4)), 0.02, 0.02),
}


def steps_of(name, steps=5):
    table = NAMED[name]
    return [table] * steps if np.ndim(table) == 1 else table


def exact(x, triples):
    """Returns Newton-Schulz of one wide matrix in float64, computed from its singular values."""
    return exact_of_factors(*decomposed(x), triples)


def exact_of_factors(u, s, vt, triples):
    s = s / np.linalg.norm(s)
    for a, b, c in triples:
        s = s * (a + b * s**2 + c * s**4)
    return (u * s) @ vt


def decomposed(x):
    return np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)


def factors(rng, values, shape=SHAPE, xp=np):
    """Returns U, `values` and V^T of a random matrix, U and V as arrays of the module `xp`."""
    n = min(shape)
    u, v = (xp.linalg.qr(xp.asarray(rng.standard_normal((size, n))))[0] for size in shape)
    return u, np.asarray(values, np.float64), v.T


def with_spectrum(rng, values, shape=SHAPE):
    u, s, vt = factors(rng, values, shape)
    return np.asarray((u * s) @ vt, np.float32)


def spectra(rng, shape=SHAPE):
    n = min(shape)
    floor = np.full(n, 1e-4)
    floor[:2] = 1
    return {
        "gaussian": rng.standard_normal(shape, np.float32),
        "three decades": with_spectrum(rng, np.geomspace(1, 1e-3, n), shape),
        "five decades": with_spectrum(rng, np.geomspace(1, 1e-5, n), shape),
        "rank 10": with_spectrum(rng, np.arange(n) < 10, shape),
        "half zero": with_spectrum(rng, np.arange(n) < n // 2, shape),
        "two over a floor": with_spectrum(rng, floor, shape),
    }


def check_singular_values(out, table, method, u, s, vt, xp=np):
    """Checks that the iteration brought the singular values of U S V^T into the table's band."""
    out = xp.asarray(out, np.float64)
    _, widened, _ = METHODS[method]
    low, high = BANDS[table]
    # Measure along the singular vectors, because the iteration may reorder singular values.
    gains = xp.sum((u.T @ out) * vt, axis=1)
    assert (gains[s >= 0.003 * np.linalg.norm(s)] > low - widened).all()
    assert xp.linalg.eigvalsh(out @ out.T)[-1] ** 0.5 < high + widened


def check_error(out, table, method, u, s, vt, xp=np):
    want = exact_of_factors(u, s, vt, steps_of(table))
    error = xp.linalg.norm(xp.asarray(out, np.float64) - want) / xp.linalg.norm(want)
    assert error < METHODS[method][-1]


def check_accuracy(rng, table, method, shape=SHAPE):
    """Checks the results for matrices of all spectra."""
    matrices = spectra(rng, shape)
    call = jax.jit(partial(orthogonalize, coefficients=table, **METHODS[method][0]))
    outs = call(list(matrices.values()))
    for (name, x), out in zip(matrices.items(), outs, strict=True):
        parts = decomposed(x)
        check_singular_values(out, table, method, *parts)
        if name in ("gaussian", "three decades"):
            check_error(out, table, method, *parts)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("table", TABLES)
def test_accuracy(table, method, rng):
    check_accuracy(rng, table, method)


@pytest.mark.parametrize("method", ["standard", "gram"])
class TestMethods:
    # Absolute tolerance of the elements of float32 results.
    float32 = 2e-5

    def test_float32(self, method, rng):
        x = rng.standard_normal(SHAPE, np.float32)
        for table in TABLES:
            options = dict(coefficients=table, dtype=jnp.float32, method=method)
            (out,) = orthogonalize([x], **options)
            np.testing.assert_allclose(out, exact(x, steps_of(table)), atol=self.float32)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 10])
    def test_any_number_of_steps(self, method, steps, rng):
        x = with_spectrum(rng, np.geomspace(1, 0.01, 64))
        (out,) = orthogonalize([x], steps=steps, method=method)
        want = exact(x, [COEFFICIENTS] * steps)
        assert np.linalg.norm(out - want) < 0.03 * np.linalg.norm(want)

    def test_eight_steps_and_two_of_others(self, method, rng):
        x = rng.standard_normal(SHAPE, np.float32)
        triples = [COEFFICIENTS] * 8 + [(2, -1.5, 0.5)] * 2
        (out,) = orthogonalize([x], coefficients=triples, method=method)
        want = exact(x, triples)
        assert np.linalg.norm(out - want) < 0.03 * np.linalg.norm(want)

    def test_segments(self, method, rng):
        """Restarts may come after every step, or never: a segment has one step or all steps."""
        if method == "standard":
            pytest.skip("has no segments")
        x = rng.standard_normal(SHAPE, np.float32)
        for restarts in ((1, 2, 3, 4), ()):
            (out,) = orthogonalize([x], method=method, restarts=restarts, dtype=jnp.float32)
            np.testing.assert_allclose(out, exact(x, [COEFFICIENTS] * 5), atol=3 * self.float32)

    def test_zeros_and_one_row(self, method, rng):
        zeros = np.zeros((2, 8, 24), np.float32)
        row = np.outer(rng.standard_normal(16), rng.standard_normal(40)).astype(np.float32)
        out_of_zeros, out = orthogonalize([zeros, row], method=method)
        assert not np.asarray(out_of_zeros).any()
        assert 0.6 < np.linalg.norm(out) < 1.3

    def test_nan_stays_in_its_matrix(self, method, rng):
        x = rng.standard_normal((3, 16, 48)).astype(np.float32)
        x[1, 3, 4] = np.nan
        (out,) = orthogonalize([x], method=method)
        assert np.isnan(np.asarray(out)[1]).all() and np.isfinite(np.asarray(out)[[0, 2]]).all()

    def test_of_the_transpose(self, method, rng):
        x = rng.standard_normal((2, 32, 80)).astype(np.float32)
        wide, tall = orthogonalize([x, np.swapaxes(x, 1, 2)], method=method)
        np.testing.assert_allclose(wide, np.swapaxes(tall, 1, 2), atol=2e-3)

    def test_bits_do_not_depend_on_the_list(self, method, rng):
        shapes = [(4, 32, 80), (48, 64), (2, 3, 16, 16)]
        matrices = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        call = partial(orthogonalize, method=method)
        together = call(matrices)
        for x, out in zip(matrices, together, strict=True):
            np.testing.assert_array_equal(call([x])[0], out)
        halves = call([matrices[0][:2]])[0], call([matrices[0][2:]])[0]
        np.testing.assert_array_equal(np.concatenate(halves), together[0])

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_scale(self, method, dtype, rng):
        """Results are multiplied by `scale`, which is one number or one for each matrix."""
        matrices = [rng.standard_normal((16, 48)).astype(dtype) for _ in range(3)]
        call = partial(orthogonalize, matrices, method=method)
        plain = [np.asarray(x, np.float64) for x in call()]
        for scales in ((2.0,) * 3, (1e-9, jnp.float32(1.0), 1e6)):
            outs = call(scale=2.0 if scales[0] == 2.0 else scales)
            for out, one, scale in zip(outs, plain, scales, strict=True):
                assert out.dtype == dtype
                np.testing.assert_allclose(np.asarray(out, np.float64), one * scale, rtol=2**-7)

    def test_schatten(self, method, rng):
        x = rng.standard_normal((2, *SHAPE)).astype(np.float32)
        options = dict(method=method, dtype=jnp.float32, preconditioning="schatten")
        (out,) = orthogonalize([x], **options)
        for one, matrix in zip(np.asarray(out), x, strict=True):
            u, s, vt = decomposed(matrix)
            s = s / np.sum(s**4) ** 0.25
            for a, b, c in [COEFFICIENTS] * 5:
                s = s * (a + b * s**2 + c * s**4)
            np.testing.assert_allclose(one, (u * s) @ vt, atol=5 * self.float32)
        zeros = np.zeros((8, 24), np.float32)
        assert not np.asarray(orthogonalize([zeros], **options)[0]).any()


class TestAuto:
    def test_by_the_shape_of_a_matrix(self):
        def is_gram(*shape, **options):
            """Returns whether there are symmetric products of two factors, as only "gram" has."""
            jaxpr = jax.make_jaxpr(lambda x: orthogonalize([x], **options))(
                jax.ShapeDtypeStruct(shape, jnp.float32)
            )
            return any(eqn.primitive.name == "rank_k" and eqn.params["symm"] for eqn in jaxpr.eqns)

        assert is_gram(64, 80) and is_gram(80, 64) and is_gram(3, 64, 200)
        assert not is_gram(64, 64) and not is_gram(64, 72)
        assert not is_gram(64, 200, dtype=jnp.float32)
        assert not is_gram(64, 200, dtype=jnp.bfloat16)
        assert not is_gram(64, 200, method="standard") and is_gram(64, 64, method="gram")

    def test_mixed_list(self, rng):
        """Squares and other shapes use different methods; each result is as in a single call."""
        matrices = [rng.standard_normal(shape).astype(np.float32) for shape in ((32, 32), (32, 96))]
        outs = orthogonalize(matrices)
        for x, out, method in zip(matrices, outs, ("standard", "gram"), strict=True):
            np.testing.assert_array_equal(orthogonalize([x], method=method)[0], out)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(method="fast"), "method must be one of.*fast"),
        (dict(method="gram", dtype=jnp.bfloat16), "gram.*float16"),
        (dict(method="gram", restarts=()), "5 steps in a row, but float16 allows at most 3"),
        (dict(method="gram", restarts=(4,)), "4 steps in a row"),
        (dict(method="gram", restarts=(2, 2)), "restarts must be rising"),
        (dict(method="gram", restarts=(2, 5)), "restarts must be rising"),
        (dict(method="gram", restarts=2), "restarts must be a sequence"),
        (dict(method="gram", steps=jnp.int32(3)), "static number of steps"),
        (dict(preconditioning="aol"), "preconditioning must be one of.*aol"),
        (dict(scale=[1.0, 2.0]), "scale has 2 entries, but matrices has 1"),
        (dict(scale=np.ones(3)), "scale must be a number"),
        (dict(coefficients=[(1.0, 2.0)]), "three"),
    ],
)
def test_options(options, message, rng):
    with pytest.raises(ValueError, match=message):
        orthogonalize([rng.standard_normal((3, 4))], **options)
