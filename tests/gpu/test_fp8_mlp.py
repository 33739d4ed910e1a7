"""MLPs of experts in FP8 on the device: each kernel, and whole layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import ACTIVATIONS
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer
from jax_grouped_gemm._src.mlp.fp8.hidden.primitive import quantized_hidden
from tests.support import fp8_oracle, mlp
from tests.support.dtypes import BF16, E4M3, E5M2, F32
from tests.support.fp8_mlp_on_gpu import (
    check_elementwise_steps,
    dequantised,
    elementwise_operands,
)

FORMATS = pytest.mark.parametrize(
    "recipe",
    [
        jgg.Recipe(),
        jgg.Recipe(gradient_dtype=E5M2, power_of_two_scales=True),
        jgg.Recipe(forward_dtype=E5M2),
    ],
)
ROWS_AND_COLUMNS = [(1, 128), (300, 256), (129, 200), (65, 203), (257, 1), (1000, 768)]
RECIPES = {
    "blockwise": jgg.Recipe.blockwise(),
    "blockwise, bf16 wgrad": jgg.Recipe.blockwise(wgrad="bf16"),
}


class TestElementwiseSteps:
    @FORMATS
    @pytest.mark.parametrize("activation", mlp.FUSED)
    def test_are_what_the_reference_computes(self, activation, recipe, rng):
        for rows, columns in ROWS_AND_COLUMNS:
            check_elementwise_steps(rng, activation, rows, columns, BF16, recipe)

    def test_nan_and_infinity_stay_in_their_rows(self, rng):
        layer = HiddenLayer(ACTIVATIONS["silu"], 256, True, jgg.Recipe())
        projections, _, weights = elementwise_operands(rng, layer, 40, BF16)
        run = jax.jit(partial(quantized_hidden, layer, implementation="cuda"))
        clean = dequantised(run(projections, weights))
        poisoned = projections.at[3, 7].set(jnp.nan).at[9, 300].set(jnp.inf)
        got = dequantised(run(poisoned, weights))
        assert np.isnan(got[3, 7]) and np.isnan(got[9, 44])
        others = np.delete(np.arange(40), [3, 9])
        np.testing.assert_array_equal(got[others], clean[others])
        assert np.isfinite(np.delete(got[3], 7)).all()

    def test_rows_up_to_a_count(self, rng):
        layer = HiddenLayer(ACTIVATIONS["silu"], 200, True, jgg.Recipe())
        projections, _, weights = elementwise_operands(rng, layer, 40, BF16)
        run = jax.jit(partial(quantized_hidden, layer, implementation="cuda"))
        every = run(projections, weights)
        poisoned = projections.at[17:].set(jnp.nan)
        for count in (0, 1, 17):
            some = run(poisoned, weights, count=jnp.array([count], jnp.int32))
            for one, other in zip(some, every, strict=True):
                np.testing.assert_array_equal(np.float32(one)[:count], np.float32(other)[:count])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("columns", [128, 100, 2, 2056])
def test_rows_of_fp8_are_copied(columns, dtype, rng):
    tokens, top_k = 77, 3
    x = jnp.asarray(rng.standard_normal((tokens, columns)), F32).astype(dtype)
    order = jnp.asarray(rng.permutation(tokens * top_k), jnp.int32)
    inverse = jnp.argsort(order).reshape(tokens, top_k).astype(jnp.int32)
    for places in (inverse, None):
        run = jax.jit(partial(moe.gather_rows, implementation="cuda"))
        y = run(x, order // top_k, inverse=places)
        np.testing.assert_array_equal(
            np.asarray(y).view(np.uint8), np.asarray(x).view(np.uint8)[np.asarray(order) // top_k]
        )


@pytest.mark.parametrize("embed, hidden, experts", [(512, 768, 64), (136, 200, 3), (13, 7, 2)])
@pytest.mark.parametrize("source", [BF16, F32])
def test_weights_side_by_side(embed, hidden, experts, source, rng):
    """Gate and up are quantised into one array, with zeros after each, bit for bit."""
    shapes = [(experts, embed, hidden)] * 2 + [(experts, hidden, embed)]
    matrices = [jnp.asarray(rng.standard_normal(shape), source) for shape in shapes]
    padding = [(0, 0), (0, 0), (0, -hidden % 128)]
    joined = jnp.concatenate([jnp.pad(x, padding) for x in matrices[:2]], axis=2)
    for power_of_two in (False, True):
        recipe = jgg.Recipe(power_of_two_scales=power_of_two)
        got = jax.jit(partial(jgg.quantize_mlp, recipe=recipe, implementation="cuda"))(*matrices)
        for one, w in zip(got, (joined, matrices[2]), strict=True):
            other = jgg.quantize_weights(w, power_of_two_scales=power_of_two, implementation="cuda")
            for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
                np.testing.assert_array_equal(np.float32(x), np.float32(y))


class TestLayers:
    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
    @pytest.mark.parametrize(
        "tokens, embed, hidden, experts", [(500, 256, 384, 8), (64, 136, 200, 5), (3, 128, 128, 4)]
    )
    def test_are_what_the_reference_computes(self, recipe, tokens, embed, hidden, experts, rng):
        top_k = 3
        scales = dict(x=1, wi=embed**-0.5, wo=hidden**-0.5)
        shapes = [("x", (tokens, embed)), *[("wi", (experts, embed, hidden))] * 2]
        shapes += [("wo", (experts, hidden, embed)), ("x", (tokens, embed))]
        x, wi_0, wi_1, wo, dy = (
            jnp.asarray(scales[name] * rng.standard_normal(shape), BF16) for name, shape in shapes
        )
        routing = moe.route(jnp.asarray(rng.standard_normal((tokens, experts)), F32), top_k)

        def run(implementation, quantized, *factors):
            def layer(x, weights, *matrices):
                return moe.dropless_mlp(
                    x,
                    routing._replace(weights=weights),
                    *matrices,
                    recipe=recipe,
                    quantized=quantized,
                    implementation=implementation,
                )

            y, vjp = jax.vjp(layer, *factors)
            return y, *vjp(dy)

        factors = x, routing.weights, wi_0, wi_1, wo
        quantized = jgg.quantize_mlp(wi_0, wi_1, wo, recipe, implementation="cuda")
        got = jax.jit(partial(run, "cuda"))(None, *factors)
        again = jax.jit(partial(run, "cuda"))(quantized, *factors)
        want = jax.jit(partial(run, "xla"))(None, *factors)
        # The last bit of gate and up may differ, and then some quantised values are an FP8 step
        # away. Such errors average out over many tokens, but not over three.
        bound = 3e-2 if tokens > 16 else 6e-2
        for one, same, other in zip(got, again, want, strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(same))
            assert fp8_oracle.relative_error(one, other) < bound
