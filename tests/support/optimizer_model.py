"""A small model whose experts are quantised by an optimiser, and what has to hold of its state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from tests.support import optimizer as oracle

E, D, F = 3, 136, 72
RECIPE = jgg.Recipe()


def model(rng, leading=(E,), d=D, f=F, dtype=np.float32):
    """Experts, and parameters that are no experts."""

    def matrix(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    experts = dict(
        wi_0=matrix(*leading, d, f), wi_1=matrix(*leading, d, f), wo=matrix(*leading, f, d)
    )
    return dict(layer=experts, dense=matrix(5, 7), bias=matrix(9))


def like(rng, params, dtype=None):
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), dtype or x.dtype), params
    )


def quantized_of(params):
    return jgg.quantize_mlp(*(params["layer"][name] for name in ("wi_0", "wi_1", "wo")), RECIPE)


def assert_bits(state, masters):
    """The FP8 weights of a state are those of the float32 weights."""
    jax.tree.map(oracle.assert_same_bits, state.quantized["layer"], quantized_of(masters))


def close(got, want, steps=1, rate=1e-2):
    """Each step rounds the weights, and a change of about the learning rate, to float32."""

    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = steps * oracle.HALF_ULP * (4 * np.abs(b) + 64 * rate)
        assert np.all(np.abs(a - b) <= bound), (np.abs(a - b) / bound).max()

    jax.tree.map(check, got, want)


def stepped(optimizer):
    """Takes one step in place: jit with donated arguments, without copies."""
    return jax.jit(optimizer.step, donate_argnums=(0, 2))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)
