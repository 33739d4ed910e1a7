"""MLPs of experts with a recipe: against exact products of the operands that are quantised."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.mlp.experts import Experts
from jax_grouped_gemm._src.mlp.operands import ExpertWeights, Groups, Rows
from tests.support import fp8_mlp, fp8_oracle, mlp
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import BF16, F32

RECIPES = {
    "blockwise": jgg.Recipe.blockwise(),
    "blockwise, bf16 wgrad": jgg.Recipe.blockwise(wgrad="bf16"),
    "powers of two": jgg.Recipe(power_of_two_scales=True, gradient_dtype=jnp.float8_e5m2),
}
EVERY_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
OTHERS = [jgg.Recipe(forward="bf16"), jgg.Recipe(dgrad="bf16")]


def case(rng, **options):
    return mlp.case(rng, **dict(tokens=80, embed=160, hidden=136, experts=4) | options)


def cotangent(case, rng):
    return rng.standard_normal((len(case.on_rows), case.wo.shape[2])).astype(np.float32)


class TestQuantisedOperands:
    @EVERY_RECIPE
    @pytest.mark.parametrize("with_rows", [True, False])
    def test_every_product(self, recipe, with_rows, rng):
        one = case(rng, with_rows=with_rows, with_weights=with_rows)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

    def test_tokens_that_are_read_in_place(self, rng):
        """Mapped, too."""
        recipe = RECIPES["blockwise"]
        one = case(rng, embed=512)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

        x, matrices = jnp.asarray(one.x), [jnp.asarray(w) for w in (one.wi_0, one.wi_1, one.wo)]

        def loss(x, rows):
            routing = moe.route(rows, 2)
            y = moe.dropless_mlp(x, routing, *matrices, recipe=recipe)
            return jnp.sum(jnp.sin(y))

        logits = jnp.asarray(rng.standard_normal((3, len(x), 4)), F32)
        gradient = jax.jit(jax.grad(loss))
        plans = jgg.explain(gradient, x, logits[0]).plans
        assert "gathered_scaled_noncontracting" in [p.problem.op for p in plans]
        many = jnp.stack([x, 2 * x, -x])
        for axes, operands in (((None, 0), (x, logits)), ((0, 0), (many, logits))):
            each = [gradient(many[i] if axes[0] == 0 else x, logits[i]) for i in range(len(logits))]
            got = jax.vmap(gradient, axes)(*operands)
            assert fp8_oracle.relative_error(got, jnp.stack(each)) < 1e-3

    def test_gradients_that_share_an_array(self, rng):
        """Those of gate and up where hidden is at least as wide as tokens: bit for bit what they
        are apart, as in the reference, and mapped too."""
        recipe = RECIPES["powers of two"]
        one = case(rng, tokens=40, embed=136, hidden=264)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

        x, *matrices = (jnp.asarray(w, BF16) for w in (one.x, one.wi_0, one.wi_1, one.wo))
        routing = moe.route(jnp.asarray(rng.standard_normal((len(x), 4)), F32), 2)

        def gradients(implementation):
            def loss(x, *matrices):
                options = dict(recipe=recipe, implementation=implementation)
                y = moe.dropless_mlp(x, routing, *matrices, **options)
                return jnp.sum(jnp.sin(y.astype(F32)))

            return jax.jit(jax.grad(loss, range(4)))

        shared, apart = map(gradients, (None, "xla"))
        jaxprs = (str(jax.make_jaxpr(f)(x, *matrices)) for f in (shared, apart))
        assert [jaxpr.count("joined=True") for jaxpr in jaxprs] == [1, 0]
        each = [apart(one_x, *matrices) for one_x in (x, 2 * x)]
        for found, want in zip(shared(x, *matrices), each[0], strict=True):
            np.testing.assert_array_equal(np.float32(found), np.float32(want))
        mapped = jax.vmap(shared, (0, None, None, None))(jnp.stack([x, 2 * x]), *matrices)
        for found, *wanted in zip(mapped, *each, strict=True):
            assert fp8_oracle.relative_error(found, jnp.stack(wanted)) < 1e-3

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

    @pytest.mark.parametrize("offset", [0, 1, 3])
    def test_some_of_the_experts(self, offset, rng):
        one = case(rng, offset=offset, local=2)
        dy = cotangent(one, rng)
        recipe = RECIPES["blockwise, bf16 wgrad"]
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3 if want.any() else not found.any()

    @pytest.mark.parametrize("embed, hidden", [(40, 24), (130, 257), (8, 128)])
    def test_dimensions(self, embed, hidden, rng):
        one = case(rng, embed=embed, hidden=hidden)
        dy = cotangent(one, rng)
        for recipe in (RECIPES["blockwise"], RECIPES["blockwise, bf16 wgrad"]):
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
    """Tokens are copied to rows before they are quantised."""

    @EVERY_RECIPE
    def test_every_product(self, recipe, rng):
        one = case(rng, tokens=11)
        dy = cotangent(one, rng)
        got = one.value_and_gradients(dy, recipe=recipe)
        for found, want in zip(got, fp8_mlp.layer(one, recipe, "silu", dy), strict=True):
            assert fp8_oracle.relative_error(found, want) < 2e-3

    @EVERY_RECIPE
    def test_the_order_makes_no_difference(self, recipe, rng, monkeypatch):
        """Bit for bit, with tokens that nobody reads, rows without a token, and experts that are
        not here."""
        one = case(rng, tokens=11, offset=1, local=2)
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
    @EVERY_RECIPE
    def test_give_the_same_bits(self, recipe, rng):
        one = case(rng, dtype=BF16)
        dy = cotangent(one, rng)
        quantized = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo, recipe)
        got = one.value_and_gradients(dy, recipe=recipe, quantized=quantized)
        for x, want in zip(got, one.value_and_gradients(dy, recipe=recipe), strict=True):
            np.testing.assert_array_equal(np.float32(x), np.float32(want))

    def test_weights_are_not_read(self, rng):
        one = case(rng)
        dy = cotangent(one, rng)
        recipe = RECIPES["blockwise"]
        quantized = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo, recipe)
        want = one.value_and_gradients(dy, recipe=recipe)
        one.wi_0, one.wi_1, one.wo = (np.full_like(w, np.nan) for w in (one.wi_0, one.wi_1, one.wo))
        for x, y in zip(
            one.value_and_gradients(dy, recipe=recipe, quantized=quantized), want, strict=True
        ):
            np.testing.assert_array_equal(x, y)

    def test_both_directions(self, rng):
        """`values` and `values_t` are the same numbers, gate before up, with zeros in between."""
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


class TestSemantics:
    @EVERY_RECIPE
    def test_rows_that_no_group_owns(self, recipe, rng):
        sizes = np.array([30, 0, 50, 40], np.int32)
        one = case(rng, with_rows=False, sizes=sizes)
        dy = cotangent(one, rng)
        clean = one.value_and_gradients(dy, recipe=recipe)
        one.x[120:], one.weights[120:], dy[120:] = np.nan, np.inf, np.nan
        got = one.value_and_gradients(dy, recipe=recipe)
        for x, want in zip(got, clean, strict=True):
            np.testing.assert_array_equal(x, want)
            assert np.isfinite(x).all()
        assert not np.asarray(got[0])[120:].any() and not np.asarray(got[1])[120:].any()
        assert not np.asarray(got[2])[1].any() and not np.asarray(got[5])[120:].any()

    def test_a_token_with_nan_stays_alone(self, rng):
        one = case(rng)
        clean = one.value(recipe=jgg.Recipe())
        one.x[3, 5] = np.nan
        got = one.value(recipe=jgg.Recipe())
        mine = one.rows == 3
        assert np.isnan(got[mine]).all()
        np.testing.assert_array_equal(got[~mine], clean[~mine])

    def test_rows_out_of_range_are_zero(self, rng):
        one = case(rng)
        one.rows[[1, 7]] = -1, 80
        y = one.run(jgg.ragged_mlp, *one.factors, recipe=RECIPES["blockwise"])
        assert not np.asarray(y)[[1, 7]].any() and np.asarray(y)[2].any()

    def test_biases(self, rng):
        one = case(rng)
        dy = cotangent(one, rng)
        biases = tuple(jnp.asarray(0.5 * rng.standard_normal((4, n)), F32) for n in (136, 136, 160))

        def run(recipe, x, biases):
            y = partial(one.run, jgg.ragged_mlp, recipe=recipe)(x, *one.factors[1:], biases=biases)
            return jnp.sum(y * dy), y

        def all_of(recipe):
            gradients = jax.grad(run, (1, 2), has_aux=True)
            return jax.jit(partial(gradients, recipe))(jnp.asarray(one.x), biases)

        got, want = all_of(jgg.Recipe()), all_of(None)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert fp8_oracle.cosine_distance(x, y) < 4e-3

    def test_without_up(self, rng):
        one = case(rng)

        def loss(recipe, x, wi_0, wo):
            y = jgg.ragged_mlp(
                x, wi_0, None, wo, one.sizes, rows=one.rows, activation="relu2", recipe=recipe
            )
            return jnp.sum(jnp.sin(y))

        def all_of(recipe):
            gradients = jax.value_and_grad(loss, (1, 2, 3))
            return jax.jit(partial(gradients, recipe))(one.x, one.wi_0, one.wo)

        for recipe in (jgg.Recipe(), *OTHERS):
            for x, y in zip(
                jax.tree.leaves(all_of(recipe)[1]), jax.tree.leaves(all_of(None)[1]), strict=True
            ):
                assert fp8_oracle.cosine_distance(x, y) < 1e-2

    def test_gated_ragged_dot(self, rng):
        one = case(rng)
        recipe = RECIPES["blockwise, bf16 wgrad"]
        wi = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo, recipe).wi

        def hidden(x, wi_0, wi_1, **options):
            options |= dict(rows=one.rows, weights=one.weights)
            return jgg.gated_ragged_dot(x, wi_0, wi_1, one.sizes, **options)

        def all_of(**options):
            @jax.jit
            def run(*operands):
                y, vjp = jax.vjp(partial(hidden, **options), *operands)
                return y, *vjp(jnp.cos(y))

            return run(one.x, one.wi_0, one.wi_1)

        got, want = all_of(recipe=recipe), all_of()
        for x, y, same in zip(got, want, all_of(recipe=recipe, quantized=wi), strict=True):
            assert fp8_oracle.cosine_distance(x, y) < 4e-3
            np.testing.assert_array_equal(x, same)

    @EVERY_RECIPE
    @pytest.mark.parametrize("biases", [False, True])
    def test_hidden_of_rows_that_no_group_owns(self, recipe, biases, rng):
        one = case(rng, with_rows=False, sizes=np.array([30, 0, 50, 40], np.int32))
        b = tuple(jnp.asarray(rng.standard_normal((4, 136)), F32) for _ in range(2))
        dh = rng.standard_normal((len(one.x), 136)).astype(np.float32)

        def all_of():
            def hidden(x, wi_0, wi_1, weights, biases):
                options = dict(weights=weights, biases=biases, recipe=recipe)
                return jgg.gated_ragged_dot(x, wi_0, wi_1, one.sizes, **options)

            factors = one.x, one.wi_0, one.wi_1, one.weights, b if biases else None
            y, vjp = jax.vjp(hidden, *factors)
            return jax.tree.leaves((y, vjp(jnp.asarray(dh))))

        one.x[120:], one.weights[120:], dh[120:] = 0, 0, 0
        clean = all_of()
        one.x[120:], one.weights[120:], dh[120:] = np.nan, np.nan, np.nan
        for x, want in zip(all_of(), clean, strict=True):
            np.testing.assert_array_equal(x, want)

    @pytest.mark.parametrize("recipe", OTHERS)
    def test_products_of_rows_in_bf16(self, recipe, rng):
        one = case(rng)
        dy = cotangent(one, rng)
        for x, y in zip(
            one.value_and_gradients(dy, recipe=recipe), one.value_and_gradients(dy), strict=True
        ):
            assert 1e-6 < fp8_oracle.cosine_distance(x, y) < 4e-3

    def test_a_whole_layer_is_its_rows_added_up(self, rng):
        """`dropless_mlp` quantises what is combined before it is copied to rows."""
        one = case(rng, top_k=2)
        logits = jnp.asarray(rng.standard_normal((80, 4)), F32)
        recipe = RECIPES["blockwise, bf16 wgrad"]
        dy = jnp.asarray(rng.standard_normal((80, 160)), F32)
        routing = moe.route(logits, 2)
        order, inverse, sizes = moe.sort_by_expert(routing)
        factors = [jnp.asarray(x) for x in one.factors[:4]]

        def whole(x, weights, *matrices):
            return moe.dropless_mlp(x, routing._replace(weights=weights), *matrices, recipe=recipe)

        def parts(x, weights, *matrices):
            rows = dict(rows=order // 2, weights=weights.reshape(-1)[order])
            y = jgg.ragged_mlp(x, *matrices, sizes, recipe=recipe, **rows)
            return moe.combine(y, inverse, order=order)

        def all_of(function):
            y, vjp = jax.vjp(function, factors[0], routing.weights, *factors[1:])
            return y, *vjp(dy)

        for x, y in zip(
            jax.jit(all_of, static_argnums=0)(whole),
            jax.jit(all_of, static_argnums=0)(parts),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)

    def test_nothing_to_do(self, rng):
        for options in (dict(tokens=0), dict(sizes=[0, 0, 0, 0])):
            one = case(rng, **options)
            for x in one.value_and_gradients(cotangent(one, rng), recipe=jgg.Recipe()):
                assert not np.asarray(x).any()


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


def test_expert_parallel(rng):
    """Replicated tokens, sharded experts: the layer of the whole."""
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    devices = np.array(jax.devices("cpu"))
    one = case(rng, experts=len(devices), sizes=sizes_of.multinomial(rng, 160, len(devices)))
    recipe = RECIPES["blockwise, bf16 wgrad"]
    dy = jnp.asarray(cotangent(one, rng))

    def body(x, *matrices):
        first = jax.lax.axis_index("x") * matrices[0].shape[0]

        def loss(x, *matrices):
            y = jgg.ragged_mlp(
                x, *matrices, one.sizes, rows=one.rows, recipe=recipe, group_offset=first
            )
            return jnp.sum(jax.lax.psum(y, "x") * dy)

        return jax.grad(loss, range(4))(x, *matrices)

    mesh = Mesh(devices, ("x",))
    specs = dict(in_specs=(P(), *[P("x")] * 3), out_specs=(P(), *[P("x")] * 3))
    factors = [jnp.asarray(x) for x in one.factors[:4]]
    got = jax.jit(jax.shard_map(body, mesh=mesh, **specs))(*factors)
    one.weights = None
    for x, want in zip(got, one.value_and_gradients(dy, recipe=recipe)[1:], strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_rows_that_no_expert_owns_may_hold_anything(wgrad, rng):
    """Past the count, over several devices."""
    one = case(rng, tokens=40, embed=136, hidden=264)
    recipe = jgg.Recipe(wgrad=wgrad, dgrad=wgrad)
    matrices = dict(wi_0=one.wi_0, wi_1=one.wi_1, wo=one.wo)
    weights = ExpertWeights(**{name: jnp.asarray(w, BF16) for name, w in matrices.items()})
    sizes, m = rng.multinomial(30, np.full(len(one.wi_0), 1 / len(one.wi_0))), 44
    order = rng.permutation(40)
    inverse = np.full((40, 1), m)
    inverse[order[:30], 0] = np.arange(30)

    @jax.jit
    def run(x, order, count):
        def layer(x):
            rows = Rows(x, order, jnp.asarray(inverse), count)
            experts = Experts("a layer", weights, False, as_activation("silu"), None, None, recipe)
            groups = Groups(jnp.asarray(sizes, jnp.int32), jnp.array([0]))
            return experts.mlp(rows, jnp.ones(m), groups, combines=True)

        y, vjp = jax.vjp(layer, x)
        return y, *vjp(jnp.cos(y))

    x = jnp.asarray(one.x, BF16)
    of_rows = jnp.asarray([*order[:30], *rng.integers(0, 40, m - 30)])
    expected = run(x, of_rows, None)
    poisoned = x.at[order[30:]].set(jnp.nan)
    got = run(poisoned, of_rows.at[30:].set(int(order[35])), jnp.array([30]))
    for found, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(want))
