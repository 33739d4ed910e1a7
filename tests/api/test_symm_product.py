"""Symmetric products, of which one triangle is computed, and diagonals added to updates."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jax_grouped_gemm as jgg
from tests.support.updates import FORMS, UPDATES, triangle

G, N, K = 3, 7, 5


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(rng, *shape):
    return rng.standard_normal(shape)


def flip(x):
    return np.swapaxes(x, -1, -2)


def exact(a, b, c=0, *, alpha, beta=0, diagonal=0, uplo, transpose, symmetrize):
    """Returns the result in float64."""
    product = flip(a) @ b if transpose else a @ flip(b)
    alpha, beta, diagonal = (np.reshape(x, (-1, 1, 1)) for x in (alpha, beta, diagonal))
    inside = alpha * product + beta * c + diagonal * np.eye(product.shape[-1])
    lower = np.where(triangle(product.shape[-1], uplo), inside, 0)
    outside = flip(lower) if symmetrize else np.broadcast_to(c, inside.shape)
    return np.where(triangle(product.shape[-1], uplo), inside, outside)


@FORMS
@pytest.mark.parametrize("symmetrize", [False, True])
class TestValues:
    def test_triangle_of_a_product(self, uplo, transpose, symmetrize, rng):
        """The triangle is right even if A B^T is not symmetric."""
        shape = (G, K, N) if transpose else (G, N, K)
        a, b, c = draw(rng, *shape), draw(rng, *shape), draw(rng, G, N, N)
        alpha, beta, diagonal = (draw(rng, G) for _ in range(3))
        form = dict(uplo=uplo, transpose=transpose)
        call = partial(jgg.grouped_symm_product, symmetrize_output=symmetrize, alpha=alpha, **form)
        form["symmetrize"] = symmetrize
        np.testing.assert_allclose(call(a, b), exact(a, b, alpha=alpha, **form), atol=1e-12)
        out = call(a, b, c, beta=beta, diagonal=diagonal)
        want = exact(a, b, c, alpha=alpha, beta=beta, diagonal=diagonal, **form)
        np.testing.assert_allclose(out, want, atol=1e-12)

    def test_derivatives(self, uplo, transpose, symmetrize, rng):
        shape = (G, K, N) if transpose else (G, N, K)
        a, b, c = draw(rng, *shape), draw(rng, *shape), draw(rng, G, N, N)
        alpha, beta, diagonal = (draw(rng, G) for _ in range(3))

        def call(a, b, c, alpha, beta, diagonal):
            return jgg.grouped_symm_product(
                a,
                b,
                c,
                alpha=alpha,
                beta=beta,
                diagonal=diagonal,
                uplo=uplo,
                transpose=transpose,
                symmetrize_output=symmetrize,
            )

        check_grads(call, (a, b, c, alpha, beta, diagonal), order=2, modes=["fwd", "rev"])


@pytest.mark.parametrize("update", UPDATES, ids=repr)
@pytest.mark.parametrize("symmetrize", [False, True])
def test_diagonal_of_an_update(update, symmetrize, rng):
    a, b, c = draw(rng, G, N, K), draw(rng, G, N, K), draw(rng, G, N, N)
    diagonal = draw(rng, G)
    call = partial(update, a, b, c, beta=0.5, symmetrize_output=symmetrize)
    added = diagonal[:, None, None] * np.eye(N)
    np.testing.assert_allclose(call(diagonal=diagonal), call() + added, atol=1e-12)
    np.testing.assert_allclose(call(diagonal=2.0), call() + 2 * np.eye(N), atol=1e-12)


def test_diagonal_is_added_before_rounding(rng):
    a = draw(rng, 1, 40, 40).astype(jnp.bfloat16)
    out = jgg.grouped_syrk(a, diagonal=100.3)
    exact = np.square(np.asarray(a, np.float64)).sum(-1) + 100.3
    got = np.diagonal(np.asarray(out, np.float64), axis1=1, axis2=2)
    np.testing.assert_allclose(got, exact, rtol=2.0**-8)
    twice = np.square(np.asarray(a, np.float64)).sum(-1).astype(jnp.bfloat16) + 100.3
    assert np.abs(got - exact).max() <= np.abs(twice.astype(jnp.bfloat16) - exact).max()


def test_lists_and_vmap(rng):
    shapes = [(4, 3), (2, 5, 1), (6, 0), (0, 4, 2)]
    a, b = ([draw(rng, *shape) for shape in shapes] for _ in "ab")
    diagonal = [1.0, [2.0, 3.0], 4.0, 0.0]
    outs = jgg.grouped_symm_product(a, b, diagonal=diagonal, symmetrize_output=True)
    for out, x, y, gamma in zip(outs, a, b, diagonal, strict=True):
        n = x.shape[-2]
        form = dict(uplo="lower", transpose=False, symmetrize=True)
        want = exact(x[None] if x.ndim == 2 else x, y, alpha=1, diagonal=gamma, **form)
        np.testing.assert_allclose(np.reshape(out, want.shape), want, atol=1e-12)
        assert out.shape == (*x.shape[:-1], n)
    stack = draw(rng, 5, G, N, K)
    mapped = jax.vmap(lambda x, d: jgg.grouped_symm_product(x, 2 * x, diagonal=d))
    diagonals = draw(rng, 5)
    want = [
        jgg.grouped_symm_product(x, 2 * x, diagonal=d)
        for x, d in zip(stack, diagonals, strict=True)
    ]
    np.testing.assert_allclose(mapped(stack, diagonals), np.stack(want), atol=1e-12)


def test_c_may_be_a_factor(rng):
    x = jnp.asarray(draw(rng, G, N, N))
    y = x + jnp.swapaxes(x, 1, 2)
    for call in (
        partial(jgg.grouped_syrk, y),
        partial(jgg.grouped_symm_product, y, 2 * y),
        partial(jgg.grouped_symm_product, 2 * y, y),
    ):
        same = jax.jit(lambda c, call=call: call(y, beta=0.5, symmetrize_output=True))
        np.testing.assert_array_equal(same(y), call(y + 0, beta=0.5, symmetrize_output=True))


def test_operands_that_do_not_fit(rng):
    with pytest.raises(TypeError, match=r"b must have shape \(3, 7, 5\)"):
        jgg.grouped_symm_product(draw(rng, G, N, K), draw(rng, G, N, N))
    with pytest.raises(TypeError, match="diagonal must be a scalar or have one element"):
        jgg.grouped_symm_product(*[draw(rng, G, N, K)] * 2, diagonal=[1.0, 2.0])


def test_there_is_no_kernel_of_float64():
    (plan,) = explained(jnp.float64).plans
    assert plan.kernel.name == "xla" and "no kernel of float64" in plan.reason


def explained(dtype):
    x = jax.ShapeDtypeStruct((G, 64, 64), dtype)
    call = partial(jgg.grouped_symm_product, implementation="cuda", symmetrize_output=True)
    return jgg.explain(call, x, x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_there_are_kernels(dtype):
    (plan,) = explained(dtype).plans
    assert plan.problem.op == "symm_product" and plan.kernel.name != "xla"
