"""A small model whose experts an optimiser quantises, and checks of the optimiser's state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from tests.support import optimizer as oracle

E, D, F = 3, 136, 72
RECIPE = jgg.Recipe()


def model(rng, leading=(E,), d=D, f=F, dtype=np.float32):
    """Returns random parameters of a layer of experts, and two other parameters."""

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
    """Asserts that the FP8 weights of a state are those of the float32 weights, bit by bit."""
    jax.tree.map(oracle.assert_same_bits, state.quantized["layer"], quantized_of(masters))


def close(got, want, steps=1, rate=1e-2):
    """Asserts that trees are close: each step rounds weights and changes of about `rate`."""

    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = steps * oracle.HALF_ULP * (4 * np.abs(b) + 64 * rate)
        assert np.all(np.abs(a - b) <= bound), (np.abs(a - b) / bound).max()

    jax.tree.map(check, got, want)


def stepped(optimizer):
    """Returns a jitted step that works in place, because its arguments are donated."""
    return jax.jit(optimizer.step, donate_argnums=(0, 2))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)
