"""Values in rows that no expert owns never reach router weights or FP8 scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

T, D, F, E = 8, 16, 24, 3
SIZES = np.array([2, 0, 3])
OWNED = np.arange(T) < SIZES.sum()
RECIPES = {
    "no recipe": None,
    "fp8": jgg.Recipe(),
    "fp8 gradients": jgg.Recipe(forward="bf16"),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def random(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def operands(rng):
    """Returns a list of x, wi_0, wi_1 and wo, and the biases of the matrices."""
    factors = [random(rng, *s) for s in ((T, D), (E, D, F), (E, D, F), (E, F, D))]
    return factors, tuple(random(rng, E, n) for n in (F, F, D))


def absent_experts(rng):
    """Returns a routing, and for each token whether it chose an expert that does not exist."""
    experts = np.array([0, 2, -1, 1, E, 2**31 - 1, 0, -(2**31)], np.int32)[:, None]
    routing = moe.Routing(random(rng, T, E), jnp.asarray(experts), random(rng, T, 1))
    return routing, ~((experts[:, 0] >= 0) & (experts[:, 0] < E))


def check_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


class TestWeights:
    @EVERY_RECIPE
    @pytest.mark.parametrize("biased", [True, False])
    def test_ragged_mlp(self, recipe, biased, rng):
        factors, biases = operands(rng)
        weights, ct = random(rng, T), random(rng, T, D)

        def run(weights):
            def layer(*operands):
                *factors, weights, biases = operands
                return jgg.ragged_mlp(
                    *factors, SIZES, weights=weights, biases=biases, recipe=recipe
                )

            y, vjp = jax.vjp(layer, *factors, weights, biases if biased else None)
            return y, vjp(ct)

        check_equal(*(run(np.where(OWNED, weights, value)) for value in np.float32([np.nan, 0])))

    @pytest.mark.parametrize("biased, on_input", [(True, True), (False, False), (True, False)])
    @EVERY_RECIPE
    def test_dropless_mlp(self, recipe, biased, on_input, rng):
        factors, biases = operands(rng)
        routing, absent = absent_experts(rng)
        ct = random(rng, T, D)
        implementations = [None] if recipe is not None else [None, jax.lax.ragged_dot]

        def run(value, implementation):
            def layer(*operands):
                x, *matrices, weights, biases = operands
                return moe.dropless_mlp(
                    x, routing._replace(weights=weights), *matrices, biases=biases, recipe=recipe,
                    apply_router_weight_on_input=on_input, implementation=implementation,
                )  # fmt: skip

            weights = np.where(absent[:, None], value, routing.weights)
            y, vjp = jax.vjp(layer, *factors, weights, biases if biased else None)
            return y, vjp(ct)

        for implementation in implementations:
            check_equal(*(run(value, implementation) for value in np.float32([np.nan, 0])))
