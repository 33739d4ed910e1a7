"""MLPs of experts with a recipe, against exact products of operands that NumPy quantises."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import fp8_mlp, fp8_oracle, mlp
from tests.support.dtypes import BF16, F32
from tests.support.fp8_mlp import OTHERS, RECIPES, case, cotangent

# Without `rows`, two recipes suffice, because neither the rounding of scales nor the dtype of
# gradients depends on where rows come from.
WITH_ROWS = [(True, name) for name in RECIPES]
WITH_ROWS += [(False, name) for name in ("blockwise", "blockwise, bf16 wgrad")]


def some_recipes(*names):
    return pytest.mark.parametrize("recipe", [RECIPES[name] for name in names], ids=names)


class TestQuantisedOperands:
    @pytest.mark.parametrize("with_rows, recipe", WITH_ROWS)
    def test_every_product(self, recipe, with_rows, rng):
        recipe = RECIPES[recipe]
        one = case(rng, with_rows=with_rows, with_weights=with_rows)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

    def test_tokens_that_are_read_in_place(self, rng):
        """Products may read tokens in place instead of copied rows, also under `jax.vmap`."""
        recipe = RECIPES["blockwise"]
        one = case(rng, embed=512)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

        def loss(x, rows, *matrices):
            routing = moe.route(rows, 2)
            y = moe.dropless_mlp(x, routing, *matrices, recipe=recipe)
            return jnp.sum(jnp.sin(y))

        # XLA would fold quantised matrices if they were constants, which takes long.
        x, matrices = one.x, (one.wi_0, one.wi_1, one.wo)
        logits = rng.standard_normal((3, len(x), 4)).astype(np.float32)
        gradient = jax.jit(jax.grad(loss))
        plans = jgg.explain(gradient, x, logits[0], *matrices).plans
        assert "gathered_scaled_noncontracting" in [p.problem.op for p in plans]
        many = np.stack([x, 2 * x, -x])
        for axis, tokens in ((None, x), (0, many)):
            of_each = many if axis == 0 else [x] * 3
            each = [gradient(*pair, *matrices) for pair in zip(of_each, logits, strict=True)]
            got = jax.vmap(gradient, (axis, 0, *[None] * 3))(tokens, logits, *matrices)
            assert fp8_oracle.relative_error(got, np.stack(each)) < 1e-3

    def test_gradients_that_share_an_array(self, rng):
        """If F is large and at least D, gradients of gate and up share an array. The
        reference's separate arrays have the same bits, and close values under `jax.vmap`."""
        recipe = RECIPES["powers of two"]
        one = case(rng, tokens=40, embed=136, hidden=264)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

        x, *matrices = (w.astype(BF16) for w in (one.x, one.wi_0, one.wi_1, one.wo))
        matrices.append(rng.standard_normal((len(x), 4)).astype(np.float32))

        def gradients(implementation):
            def loss(x, wi_0, wi_1, wo, logits):
                options = dict(recipe=recipe, implementation=implementation)
                y = moe.dropless_mlp(x, moe.route(logits, 2), wi_0, wi_1, wo, **options)
                return jnp.sum(jnp.sin(y.astype(F32)))

            return jax.jit(jax.grad(loss, range(4)))

        shared, apart = map(gradients, (None, "xla"))
        jaxprs = (str(jax.make_jaxpr(f)(x, *matrices)) for f in (shared, apart))
        assert [jaxpr.count("joined=True") for jaxpr in jaxprs] == [1, 0]
        each = [apart(one_x, *matrices) for one_x in (x, 2 * x)]
        for found, want in zip(shared(x, *matrices), each[0], strict=True):
            np.testing.assert_array_equal(np.float32(found), np.float32(want))
        mapped = jax.vmap(shared, (0, *[None] * 4))(np.stack([x, 2 * x]), *matrices)
        for found, *wanted in zip(mapped, *each, strict=True):
            assert fp8_oracle.relative_error(found, np.stack(wanted)) < 1e-3

    @pytest.mark.parametrize("activation", mlp.ACTIVATIONS)
    def test_every_activation(self, activation, rng):
        recipe = RECIPES["blockwise, bf16 wgrad"]
        one = case(rng, spread=4.0)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe, activation=activation)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, activation, dy), strict=True):
            # A sum in another order may round to the next FP8 number, which changes one row.
            error = np.abs(np.asarray(found) - want)
            assert np.median(error) < 1e-5 * np.sqrt(np.mean(np.square(want)))
            assert fp8_oracle.relative_error(found, want) < 5e-3

    @pytest.mark.parametrize("offset", [1, 3])
    def test_some_of_the_experts(self, offset, rng):
        one = case(rng, offset=offset, local=2)
        dy = cotangent(one, rng)
        recipe = RECIPES["blockwise, bf16 wgrad"]
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3 if want.any() else not found.any()

    @pytest.mark.parametrize(
        "embed, hidden, wgrad",
        [(40, 24, "fp8"), (130, 257, "fp8"), (130, 257, "bf16"), (8, 128, "bf16")],
    )
    def test_dimensions(self, embed, hidden, wgrad, rng):
        one = case(rng, embed=embed, hidden=hidden)
        dy = cotangent(one, rng)
        recipe = jgg.Recipe.blockwise(wgrad=wgrad)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert found.shape == want.shape
            assert fp8_oracle.relative_error(found, want) < 2e-3

    def test_sixteen_bits(self, rng):
        one = case(rng, dtype=BF16)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=jgg.Recipe.blockwise())
        for found, want in zip(got, one.value_and_gradients(dy), strict=True):
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            assert 1e-5 < fp8_oracle.cosine_distance(found, want) < 4e-3


class TestFewRows:
    """If there are few rows, tokens are copied to rows first, and then quantised."""

    @some_recipes("blockwise, bf16 wgrad", "powers of two")
    def test_every_product(self, recipe, rng):
        one = case(rng, tokens=11)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

    def test_the_order_makes_no_difference(self, rng, monkeypatch):
        """Quantising tokens first and copying them to rows second gives the same bits. Some tokens
        have no row, some rows have no token, and some experts are not local."""
        one = case(rng, tokens=11, offset=1, local=2)
        recipe = RECIPES["powers of two"]
        here = np.concatenate([np.arange(*window) for window in one.windows])
        one.rows[one.rows == 3] = 5
        one.rows[[2, 9]] = -1, len(one.x)
        x, weights = one.x.copy(), one.weights.copy()
        one.x[3] = np.nan
        one.weights[np.setdiff1d(np.arange(len(one.rows)), here)] = np.nan

        def run():
            return np.asarray(
                jax.jit(partial(one.run, jgg.ragged_mlp, recipe=recipe))(*one.factors)
            )

        got = run()
        monkeypatch.setattr("jax_grouped_gemm._src.fp8.scaled.plan.QUANTISED_ON_ROWS", 0)
        one.x, one.weights = x, weights
        want = run()
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all() and got[here].any()


class TestQuantizedWeights:
    @some_recipes("blockwise", "powers of two")
    def test_give_the_same_bits(self, recipe, rng):
        one = case(rng, dtype=BF16)
        dy = cotangent(one, rng)
        quantized = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo, recipe)
        got = one.value_and_gradients(dy, recipe=recipe, quantized=quantized)
        for x, want in zip(got, one.value_and_gradients(dy, recipe=recipe), strict=True):
            np.testing.assert_array_equal(np.float32(x), np.float32(want))

    def test_weights_are_not_read(self, rng):
        one = case(rng, dtype=BF16)
        dy = cotangent(one, rng)
        recipe = RECIPES["blockwise"]
        quantized = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo, recipe)
        want = one.value_and_gradients(dy, recipe=recipe)
        one.wi_0, one.wi_1, one.wo = (np.full_like(w, np.nan) for w in (one.wi_0, one.wi_1, one.wo))
        for x, y in zip(
            one.value_and_gradients(dy, recipe=recipe, quantized=quantized), want, strict=True
        ):
            np.testing.assert_array_equal(np.float32(x), np.float32(y))

    def test_both_directions(self, rng):
        """`values_t` is `values` transposed. In wi, zeros as padding separate gate and up."""
        one = case(rng)
        wi, wo = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo)
        both = fp8_mlp.joined(one.wi_0, one.wi_1)
        for found, matrices in ((wi, both), (wo, one.wo)):
            for values, scales, of in (
                (found.values, found.scales, matrices),
                (found.values_t, found.scales_t, matrices.swapaxes(1, 2)),
            ):
                for i, matrix in enumerate(of):
                    want = fp8_oracle.quantize(matrix, (128, 128), jnp.float8_e4m3fn)
                    np.testing.assert_array_equal(np.float32(values[i]), np.float32(want[0]))
                    np.testing.assert_array_equal(scales[i], want[1])

    def test_stacked_layers(self, rng):
        stack = [case(rng) for _ in range(3)]
        recipe = RECIPES["powers of two"]
        together = jgg.quantize_mlp(
            *(np.stack([getattr(c, name) for c in stack]) for name in ("wi_0", "wi_1", "wo")),
            recipe,
        )
        for i, one in enumerate(stack):
            alone = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo, recipe)
            for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
                np.testing.assert_array_equal(np.float32(x[i]), np.float32(y))


class TestErrors:
    def test_recipe_and_precision(self, rng):
        one = case(rng)
        with pytest.raises(ValueError, match="ragged_mlp: recipe.*precision='highest'"):
            one.run(jgg.ragged_mlp, *one.factors, recipe=jgg.Recipe(), precision="highest")

    def test_no_recipe(self, rng):
        one = case(rng)
        with pytest.raises(TypeError, match="recipe must be a jax_grouped_gemm.Recipe, got 'fp8'"):
            one.run(jgg.ragged_mlp, *one.factors, recipe="fp8")
        quantized = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo)
        with pytest.raises(ValueError, match="quantized needs the recipe"):
            one.run(jgg.ragged_mlp, *one.factors, quantized=quantized)

    def test_quantized_for_another_recipe(self, rng):
        one = case(rng)
        run = partial(one.run, jgg.ragged_mlp, *one.factors)
        quantized = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo)
        with pytest.raises(TypeError, match=r"quantized must be quantize_mlp.*wi\.values"):
            run(recipe=jgg.Recipe(forward_dtype=jnp.float8_e5m2), quantized=quantized)
        with pytest.raises(ValueError, match="forward='fp8' and dgrad='fp8'"):
            run(recipe=OTHERS[0], quantized=quantized)
        with pytest.raises(TypeError, match="must be a QuantizedMlp.*got QuantizedWeights"):
            run(recipe=jgg.Recipe(), quantized=quantized.wi)

    def test_quantized_of_other_fields(self, rng):
        one = case(rng)
        run = partial(one.run, jgg.ragged_mlp, *one.factors, recipe=jgg.Recipe())
        good = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo)
        for quantized, message in (
            (good._replace(wi=None), "quantized.wi must be QuantizedWeights.*got NoneType"),
            (good._replace(wo=one.wo), "quantized.wo must be QuantizedWeights.*got ndarray"),
            (good._replace(wo=good.wo._replace(scales=3)), "quantized.wo.scales must be.*got int"),
        ):
            with pytest.raises(TypeError, match=f"ragged_mlp: {message}"):
                run(quantized=quantized)

    def test_shapes_of_weights(self, rng):
        one = case(rng)
        with pytest.raises(TypeError, match=r"wo must be \[..., F, D\]"):
            jgg.quantize_mlp(one.wi_0, one.wi_1, one.wi_0)
        with pytest.raises(TypeError, match="wi_1 must be bfloat16, float16 or float32"):
            jgg.quantize_mlp(one.wi_0, one.wi_1.astype(np.int32), one.wo)

    def test_float64(self, rng):
        one = case(rng)
        with jax.enable_x64(True), pytest.raises(TypeError, match="x must be bfloat16"):
            one.run(jgg.ragged_mlp, np.float64(one.x), *one.factors[1:], recipe=jgg.Recipe())

    def test_second_derivative(self, rng):
        one = case(rng)

        def loss(x):
            y = one.run(jgg.ragged_mlp, x, *one.factors[1:], recipe=jgg.Recipe())
            return jnp.sum(y**2)

        with pytest.raises(NotImplementedError, match="MLP with a recipe is differentiable"):
            jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(jnp.asarray(one.x))
