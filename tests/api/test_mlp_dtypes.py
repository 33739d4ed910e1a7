"""All functions of MLPs promote the dtypes of operands by one rule, and refuse some dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support.dtypes import BF16, E4M3, F16, F32, F64

T, D, F, E = 6, 16, 24, 2
NAMES = "x", "wi_0", "wi_1", "wo"


def operands(rng, dtypes=(F32,) * 4):
    shapes = (T, D), (E, D, F), (E, D, F), (E, F, D)
    arrays = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [jnp.asarray(x.astype(dtype)) for x, dtype in zip(arrays, dtypes, strict=True)]


def routing(rng, top_k=1):
    return moe.route(jnp.asarray(rng.standard_normal((T, E)), F32), top_k)


def functions(rng, **options):
    """Returns the functions, by name, that compute [m, D] from x, wi_0, wi_1 and wo."""
    chosen, sizes = routing(rng), np.array([2, 4])

    def dropless(**more):
        return lambda x, *w: moe.dropless_mlp(x, chosen, *w, **more, **options)

    every = dict(
        ragged_mlp=lambda *factors: jgg.ragged_mlp(*factors, sizes, **options),
        dropless_mlp=dropless(),
        weights_on_input=dropless(apply_router_weight_on_input=True),
    )
    if not options:
        every["function"] = dropless(implementation=jax.lax.ragged_dot)
    return every


def result_and_gradients(function):
    """Returns a function that returns [m, D], and its pullback of the result to all operands."""

    def both(*factors):
        y, vjp = jax.vjp(function, *factors)
        return y, *vjp(y)

    return both


RECIPES = {"no recipe": {}} | {
    name: dict(recipe=recipe)
    for name, recipe in (("fp8", jgg.Recipe()), ("fp8 gradients", jgg.Recipe(forward="bf16")))
}
EVERY_RECIPE = pytest.mark.parametrize("options", RECIPES.values(), ids=RECIPES)


class TestPromotion:
    @EVERY_RECIPE
    @pytest.mark.parametrize("narrow, wide", [(BF16, F32), (BF16, F16), (F16, BF16)])
    @pytest.mark.parametrize("other", range(4), ids=NAMES)
    def test_result_and_gradients(self, options, narrow, wide, other, rng):
        dtypes = [wide if i == other else narrow for i in range(4)]
        factors = operands(rng, dtypes)
        for name, function in functions(rng, **options).items():
            y, *gradients = jax.eval_shape(result_and_gradients(function), *factors)
            assert y.dtype == F32, name
            assert [g.dtype for g in gradients] == dtypes, name

    @EVERY_RECIPE
    def test_programs_of_mixed_dtypes(self, options, rng):
        """Programs of mixed dtypes compile, and all results and gradients are finite."""
        factors = operands(rng, (BF16, F32, F16, BF16))
        every = functions(rng, **options)

        @jax.jit
        def run(*factors):
            return [result_and_gradients(function)(*factors) for function in every.values()]

        for name, (y, *gradients) in zip(every, run(*factors), strict=True):
            assert np.isfinite(y).all() and np.any(y), name
            for g, factor in zip(gradients, factors, strict=True):
                assert (g.shape, g.dtype) == (factor.shape, factor.dtype), name
                assert np.isfinite(np.float32(g)).all() and np.float32(g).any(), name

    @pytest.mark.parametrize("other", range(3), ids=NAMES[:3])
    def test_hidden(self, other, rng):
        *factors, _ = operands(rng, [F32 if i == other else BF16 for i in range(4)])
        assert jgg.gated_ragged_dot(*factors, np.array([2, 4])).dtype == F32

    def test_is_before_products(self, rng):
        """Operands are promoted before products, so hidden layers are not rounded to BF16."""
        factors = operands(rng, (BF16, BF16, BF16, F32))
        for name, function in functions(rng).items():
            if name != "weights_on_input":  # weights_on_input rounds rows of x to x's dtype
                exact = function(*(x.astype(F32) for x in factors))
                np.testing.assert_array_equal(function(*factors), exact, name)


def layers():
    """Returns the functions (x, routing, *matrices, **options) of a layer, by name."""

    def of_rows(x, routing, *matrices, **options):
        return jgg.ragged_mlp(x, *matrices, np.array([2, 4]), **options)

    def of_devices(x, routing, *matrices, **options):
        def layer(x, routing):
            return moe.expert_parallel_mlp(x, routing, *matrices, expert_axis="e", **options)[0]

        mesh = jax.make_mesh((1,), ("e",), (jax.sharding.AxisType.Auto,))
        split = jax.shard_map(layer, mesh=mesh, in_specs=P("e"), out_specs=P("e"))
        return jax.jit(split)(x, routing)

    return dict(ragged_mlp=of_rows, dropless_mlp=moe.dropless_mlp, expert_parallel_mlp=of_devices)


EVERY_LAYER = pytest.mark.parametrize("name, layer", layers().items(), ids=layers())


@EVERY_LAYER
class TestDtypesThatDoNotFit:
    @EVERY_RECIPE
    @pytest.mark.parametrize("other", range(4), ids=NAMES)
    def test_8_bits(self, name, layer, options, other, rng):
        dtypes = [E4M3 if i == other else BF16 for i in range(4)]
        x, *matrices = operands(rng, dtypes)
        message = f"{name}: {NAMES[other]} must have 16 bits at least, got dtype float8_e4m3fn; "
        with pytest.raises(TypeError, match=message):
            layer(x, routing(rng), *matrices, **options)

    @pytest.mark.parametrize("recipe", [jgg.Recipe(), jgg.Recipe(forward="bf16")])
    def test_64_bits_with_a_recipe(self, name, layer, recipe, rng):
        chosen = routing(rng)
        with jax.enable_x64(True):
            x, *matrices, wo = operands(rng, (F32, F32, F32, F64))
            with pytest.raises(TypeError, match=f"{name}: wo must be bfloat16, .* got float64"):
                layer(x, chosen, *matrices, wo, recipe=recipe)

    @pytest.mark.parametrize("other", range(3))
    def test_complex_biases(self, name, layer, other, rng):
        x, *matrices = operands(rng)
        biases = [jnp.ones((E, n)) for n in (F, F, D)]
        biases[other] = biases[other] + 1j
        rule = rf"{name}: biases\[{other}\] must be (real|floating).*, got dtype complex64"
        with pytest.raises(TypeError, match=rule):
            layer(x, routing(rng), *matrices, biases=tuple(biases))

    def test_shapes_of_biases(self, name, layer, rng):
        x, *matrices = operands(rng)
        with pytest.raises(TypeError, match=rf"{name}: biases\[0\] must have .*shape"):
            layer(x, routing(rng), *matrices, biases=(jnp.ones((E, F + 1)), None, None))
        with pytest.raises(TypeError, match=f"{name}: biases must be a t"):
            layer(x, routing(rng), *matrices, biases=jnp.ones(E))

    def test_complex_weights(self, name, layer, rng):
        if name == "ragged_mlp":
            pytest.skip("it takes no routing")
        chosen = routing(rng)
        chosen = chosen._replace(weights=chosen.weights + 1j)
        rule = f"{name}: routing.weights must be real .*, got dtype complex64"
        with pytest.raises(TypeError, match=rule):
            layer(operands(rng)[0], chosen, *operands(rng)[1:])

    def test_integer_matrices(self, name, layer, rng):
        x, wi_0, wi_1, wo = operands(rng)
        with pytest.raises(TypeError, match=f"{name}: wi_1 must be floating, got dtype int32"):
            layer(x, routing(rng), wi_0, wi_1.astype(jnp.int32), wo)


def test_complex_factors_of_a_real_gate():
    gate, weights = jnp.ones((T, F)), jnp.ones(T)
    with pytest.raises(TypeError, match="gated_activation: up must be real .*complex64"):
        moe.gated_activation(gate, gate + 1j, weights)
    with pytest.raises(TypeError, match="gated_activation: weights must be real .*complex64"):
        moe.gated_activation(gate, None, weights + 1j)


def test_complex_layers_have_complex_biases_and_weights(rng):
    x, wi_0, _, wo = operands(rng)
    chosen = routing(rng)
    chosen = chosen._replace(weights=chosen.weights * (1 + 2j))
    b0, bo = (jnp.asarray(rng.standard_normal((E, n)), F32) * (1 - 1j) for n in (F, D))
    y = moe.dropless_mlp(
        x + 1j, chosen, wi_0, None, wo, biases=(b0, None, bo), activation=lambda g: g
    )
    x, wi_0, wo, b0, bo, weights, expert = map(
        np.asarray, (x, wi_0, wo, b0, bo, chosen.weights, chosen.experts[:, 0])
    )
    hidden = np.einsum("td,tdf->tf", np.complex128(x + 1j), wi_0[expert]) + b0[expert]
    exact = np.einsum("tf,tfd->td", hidden, wo[expert]) + bo[expert]
    np.testing.assert_allclose(y, weights * exact, rtol=1e-4, atol=1e-4)
