"""Muon: the grouped orthogonalisation against the plain one, and as an optimiser."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm.optim import COEFFICIENTS, muon, orthogonalize

SHAPES = [(24, 40), (40, 24), (3, 16, 16), (2, 2, 8, 32), (1, 5)]


def plain(x, steps=5):
    """Newton-Schulz of one matrix in float64."""
    a, b, c = COEFFICIENTS
    x = np.asarray(x, np.float64)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def spread(rng, shape):
    """Matrices with singular values from 0.05 to 1: those of random ones may be almost zero."""
    u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return ((u * np.geomspace(1, 0.05, u.shape[-1])) @ vt).astype(np.float32)


def test_equals_the_plain_version(rng):
    matrices = [rng.standard_normal(shape, np.float32) for shape in SHAPES]
    outs = jax.jit(lambda m: orthogonalize(m, dtype=jnp.float32))(matrices)
    for out, x in zip(outs, matrices, strict=True):
        assert out.dtype == x.dtype and out.shape == x.shape
        for one, matrix in zip(
            np.asarray(out).reshape(-1, *x.shape[-2:]), x.reshape(-1, *x.shape[-2:]), strict=True
        ):
            np.testing.assert_allclose(one, plain(matrix), atol=1e-4)


def test_singular_values_are_near_one(rng):
    for out in orthogonalize([spread(rng, shape) for shape in SHAPES]):
        values = np.linalg.svd(np.asarray(out, np.float64), compute_uv=False)
        assert 0.6 < values.min() and values.max() < 1.3


def test_nothing_to_orthogonalize():
    assert orthogonalize([]) == []


def model(rng):
    """Weights, and the loss of a two-layer network on random data that such weights made."""

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-2] ** 0.5)

    def network(w, x):
        return jnp.tanh(x @ w["in"]) @ w["out"]

    target, weights = ({"in": draw(16, 32), "out": draw(32, 8)} for _ in range(2))
    x = jnp.asarray(rng.standard_normal((256, 16), np.float32))
    return weights, lambda w: jnp.mean((network(w, x) - network(target, x)) ** 2)


def train(optimizer, weights, loss, steps=60):
    @jax.jit
    def step(weights, state):
        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return jax.tree.map(jnp.add, weights, updates), state

    state = optimizer.init(weights)
    for _ in range(steps):
        weights, state = step(weights, state)
    return loss(weights)


@pytest.mark.parametrize("nesterov", [False, True])
def test_trains(nesterov, rng):
    weights, loss = model(rng)
    assert train(muon(0.02, nesterov=nesterov), weights, loss) < 0.2 * loss(weights)


def test_in_an_optax_chain(rng):
    optax = pytest.importorskip("optax")
    weights, loss = model(rng)
    chain = optax.chain(optax.clip_by_global_norm(1.0), muon(1.0), optax.scale(0.02))
    assert train(chain, weights, loss) < 0.2 * loss(weights)
    mixed = optax.multi_transform(
        {"muon": muon(0.02), "adam": optax.adam(1e-2)}, {"in": "muon", "out": "adam"}
    )
    assert train(mixed, weights, loss) < 0.3 * loss(weights)


def test_refuses_vectors():
    with pytest.raises(ValueError, match=r"bias.*\(3,\)"):
        muon(0.1).init({"bias": jnp.zeros(3)})
