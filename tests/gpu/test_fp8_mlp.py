"""MLPs of experts in FP8 on the device: each kernel, and whole layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import ACTIVATIONS
from jax_grouped_gemm._src.fp8 import primitive
from jax_grouped_gemm._src.fp8.hidden import HiddenLayer
from jax_grouped_gemm._src.fp8.hidden_op import (
    hidden_gradients,
    quantized_hidden,
    ragged_hidden_gradients,
)
from tests.support import fp8_oracle, mlp
from tests.support.dtypes import BF16, E4M3, E5M2, F32

FORMATS = pytest.mark.parametrize(
    "dtype, recipe",
    [
        (BF16, jgg.Recipe()),
        (BF16, jgg.Recipe(gradient_dtype=E5M2, power_of_two_scales=True)),
        (jnp.float16, jgg.Recipe(forward_dtype=E5M2)),
    ],
)
ROWS_AND_COLUMNS = [(1, 128), (300, 256), (129, 200), (65, 203), (257, 1), (1000, 768)]
RECIPES = {
    "blockwise": jgg.Recipe.blockwise(),
    "blockwise, bf16 wgrad": jgg.Recipe.blockwise(wgrad="bf16"),
    "rowwise, bf16 wgrad": jgg.Recipe.rowwise(wgrad="bf16"),
    "tensorwise": jgg.Recipe.tensorwise(),
}


def dequantised(pair):
    return fp8_oracle.dequantize(*map(np.asarray, pair))


def assert_quantised(pair, want):
    """Equal but where the activation's last bit decides how a number is rounded."""
    values, scales = map(np.asarray, pair)
    exact = np.asarray(want.values), np.asarray(want.scales)
    one, other = dequantised(pair), dequantised(want)
    # The reference's gelu has 1 + tanh, which cancels where the gate is negative: all bits of a
    # number that is that small beside others are noise, and so is the scale of a block of such.
    noise = 4e-6 * np.abs(other).max()
    blocks = np.pad(np.abs(other), [(0, 0), (0, -other.shape[1] % 128)])
    matters = blocks.reshape(len(blocks), -1, 128).max(axis=2) > 2**9 * noise
    np.testing.assert_allclose(scales[matters], exact[1][matters], rtol=2**-7)
    matters = np.repeat(matters, 128, axis=1)[:, : one.shape[1]]
    same = values.astype(np.float32) == exact[0].astype(np.float32)
    assert same[matters].sum() >= 0.9 * matters.sum()
    step = 2.0 ** -jnp.finfo(values.dtype).nmant
    floor = np.repeat(exact[1], 128, axis=1)[:, : one.shape[1]] * 2.0**-6
    bound = 1.02 * step * np.abs(other) + np.where(matters, floor, 0) + noise
    assert np.all(np.abs(one - other) <= bound)


def assert_same_bits(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.float32(one), np.float32(other))


@pytest.mark.parametrize("source", [BF16, jnp.float16, F32])
@pytest.mark.parametrize("columns", [128, 100, 203, 1536])
def test_gathered_rows_are_those_of_separate_kernels(columns, source, rng):
    tokens, rows = 300, 1000
    x = jnp.asarray(rng.standard_normal((tokens, columns)), source)
    where = jnp.asarray(rng.integers(-2, tokens + 2, rows), jnp.int32)
    copies = x.at[where].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    for sizes in ([rows], [0, 1, 400, 599], [7, 0, 130, 60], [1] * 200, [0, 0]):
        sizes = jnp.asarray(sizes, jnp.int32)
        for dtype, power_of_two in ((E4M3, False), (E5M2, True)):
            params = dict(dtype=np.dtype(dtype), power_of_two=power_of_two, implementation="cuda")
            got = jax.jit(partial(primitive.quantize_gathered, **params))(x, where, sizes)
            want = partial(primitive.quantize_ragged, plain=False, transposed=True, **params)
            assert_same_bits(got, jax.jit(want)(copies, sizes))


class TestElementwiseSteps:
    def operands(self, rng, rows, columns, dtype):
        layer = HiddenLayer(ACTIVATIONS["silu"], columns, True, jgg.Recipe())
        gate, up, dh = (
            jnp.asarray(2 * rng.standard_normal((rows, columns)), dtype) for _ in range(3)
        )
        weights = jnp.asarray(rng.uniform(0, 1, rows), F32).at[rows // 2].set(0)
        return layer.join(gate, up), dh, weights

    @FORMATS
    @pytest.mark.parametrize("activation", mlp.FUSED)
    def test_are_what_the_reference_computes(self, activation, dtype, recipe, rng):
        for rows, columns in ROWS_AND_COLUMNS:
            layer = HiddenLayer(ACTIVATIONS[activation], columns, True, recipe)
            projections, dh, weights = self.operands(rng, rows, columns, dtype)
            got, want = (
                jax.jit(partial(quantized_hidden, layer, implementation=name))(projections, weights)
                for name in ("cuda", "reference")
            )
            assert_quantised(got, want)
            got, want = (
                jax.jit(partial(hidden_gradients, layer, implementation=name))(
                    projections, dh, weights
                )
                for name in ("cuda", "reference")
            )
            assert_quantised(got.projections, want.projections)
            for name in ("gate", "up", "hidden", "weights"):
                one, other = (np.float64(getattr(x, name)) for x in (got, want))
                np.testing.assert_allclose(
                    one, other, rtol=2**-6, atol=1e-4 * max(np.abs(other).max(), 1e-6)
                )

    @FORMATS
    @pytest.mark.parametrize("activation", mlp.FUSED)
    def test_transposed_gradients_are_those_of_separate_kernels(
        self, activation, dtype, recipe, rng
    ):
        """Bit for bit, whatever the groups: none, empty ones, partial blocks, rows of no group."""
        for rows, columns in [(300, 256), (1000, 768), (130, 200), (700, 136)]:
            layer = HiddenLayer(ACTIVATIONS[activation], columns, True, recipe)
            operands = self.operands(rng, rows, columns, dtype)
            for sizes in ([rows], [0, 1, rows - 1], [7, 0, 130, 60], [rows // 3] * 2, [0, 0]):
                sizes = jnp.asarray(sizes, jnp.int32)
                got = jax.jit(partial(ragged_hidden_gradients, layer, implementation="cuda"))(
                    *operands, sizes
                )
                want = jax.jit(partial(hidden_gradients, layer, implementation="cuda"))(*operands)
                assert_same_bits(got.projections, want.projections)
                np.testing.assert_allclose(got.weights, want.weights, rtol=1e-5, atol=1e-5)
                for name, fp8 in (
                    ("gate", recipe.gradient_dtype),
                    ("up", recipe.gradient_dtype),
                    ("hidden", recipe.forward_dtype),
                ):
                    assert_same_bits(
                        getattr(got, name),
                        jgg.quantize_ragged(
                            getattr(want, name),
                            sizes,
                            dtype=fp8,
                            power_of_two_scales=recipe.power_of_two_scales,
                            implementation="cuda",
                        )[2:],
                    )

    def test_nan_and_infinity_stay_in_their_rows(self, rng):
        layer = HiddenLayer(ACTIVATIONS["silu"], 256, True, jgg.Recipe())
        projections, _, weights = self.operands(rng, 40, 256, BF16)
        run = jax.jit(partial(quantized_hidden, layer, implementation="cuda"))
        clean = dequantised(run(projections, weights))
        poisoned = projections.at[3, 7].set(jnp.nan).at[9, 300].set(jnp.inf)
        got = dequantised(run(poisoned, weights))
        assert np.isnan(got[3, 7]) and np.isnan(got[9, 44])
        others = np.delete(np.arange(40), [3, 9])
        np.testing.assert_array_equal(got[others], clean[others])
        assert np.isfinite(np.delete(got[3], 7)).all()


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
            assert_same_bits(jax.tree.leaves(one), jax.tree.leaves(other))


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
        want = jax.jit(partial(run, "reference"))(None, *factors)
        for one, same, other in zip(got, again, want, strict=True):
            np.testing.assert_array_equal(np.float32(one), np.float32(same))
            assert fp8_oracle.relative_error(one, other) < 3e-2
