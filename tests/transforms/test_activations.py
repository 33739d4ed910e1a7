"""Activations may close over traced values, such as a parameter of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

T, D, F, E = 6, 8, 16, 2


def activation(slope):
    return lambda gate: jnp.where(gate > 0, gate, slope * gate)


def layers(rng, **options):
    """Returns layers as functions of (slope, x)."""
    wi, wo = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((E, D, F), (E, F, D)))
    routing = moe.route(jnp.asarray(rng.standard_normal((T, E)), jnp.float32), 1)
    sizes, rows = np.array([2, 3]), dict(rows=np.array([0, 2, 1, 5, 4, 3]))

    def layer(function, *operands, **more):
        return lambda slope, x: function(
            x, *operands, activation=activation(slope), **more, **options
        )

    return dict(
        ragged_mlp=layer(jgg.ragged_mlp, wi, wi, wo, sizes),
        of_tokens=layer(jgg.ragged_mlp, wi, None, wo, sizes, **rows),
        gated_ragged_dot=layer(jgg.gated_ragged_dot, wi, wi, sizes),
        dropless_mlp=layer(moe.dropless_mlp, routing, wi, wi, wo),
        on_input=layer(moe.dropless_mlp, routing, wi, wi, wo, apply_router_weight_on_input=True),
    )


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((T, D)), jnp.float32)


RECIPES = [{}, dict(recipe=jgg.Recipe(forward="bf16"))]


@pytest.mark.parametrize("options", RECIPES, ids=["no recipe", "fp8 gradients"])
@pytest.mark.parametrize(
    "name", ["ragged_mlp", "of_tokens", "gated_ragged_dot", "dropless_mlp", "on_input"]
)
def test_traced_slopes(name, options, x, rng):
    layer = layers(rng, **options)[name]

    @jax.jit
    def known(x):
        y, vjp = jax.vjp(lambda x: layer(0.25, x), x)
        return y, *vjp(y)

    @jax.jit
    def traced(slope, x, dy):
        y, vjp = jax.vjp(layer, slope, x)
        return y, *vjp(dy)

    expected, wanted = map(np.asarray, known(x))
    close = dict(rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    y, gradient, dx = traced(0.25, x, expected)
    np.testing.assert_allclose(y, expected, **close)
    made_inside = jax.jit(lambda x: layer(jnp.float32(0.25), x))
    np.testing.assert_allclose(made_inside(x), expected, **close)
    many = jax.jit(jax.vmap(layer, (0, None)))(jnp.array([0.25, 1.0]), x)
    np.testing.assert_allclose(many[0], expected, **close)
    # Layers are linear in the slope, up to FP8 rounding. Terms may cancel, so norms set `atol`.
    # Values at other slopes are those of the vmapped layer for one slope, up to rounding.
    by_slope = np.subtract(traced(1.0, x, expected)[0], traced(0.0, x, expected)[0])
    np.testing.assert_allclose(many[1], traced(1.0, x, expected)[0], **close)
    size = np.linalg.norm(expected) * np.linalg.norm(by_slope)
    atol = (4e-2 if options else 1e-5) * size
    np.testing.assert_allclose(gradient, np.vdot(by_slope, expected), rtol=0, atol=atol)
    np.testing.assert_allclose(dx, wanted, atol=1e-5 * np.abs(wanted).max())


def test_what_fp8_layers_do_not_take(x, rng):
    for name, layer in layers(rng, recipe=jgg.Recipe()).items():
        assert np.isfinite(layer(0.25, x)).all()
        function = "ragged_mlp" if name == "of_tokens" else name.replace("on_input", "dropless_mlp")
        with pytest.raises(NotImplementedError, match=f"{function}: activation closes over traced"):
            jax.jit(layer)(0.25, x)
