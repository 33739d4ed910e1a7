"""Optimisers with Flax's interfaces, which write FP8 weights for layers that have a recipe."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("flax")
from flax import linen as nn
from flax import nnx

import jax_grouped_gemm as jgg
from jax_grouped_gemm import optim
from jax_grouped_gemm.flax import linen as of_linen
from jax_grouped_gemm.flax import nnx as of_nnx
from jax_grouped_gemm.flax._experts import from_dict
from jax_grouped_gemm.flax.nnx.layer import MATRICES
from tests.support import optimizer as oracle

D, F, E, K = 64, 40, 4, 2
RECIPE = jgg.Recipe()
LAYERS = "first", "second", "third"


class Model(nnx.Module):
    """Two layers in FP8, which may share their parameters, and one layer without a recipe.

    With `layers`, the model computes only these layers.
    """

    def __init__(self, rngs, recipe=RECIPE, shared=False, param_dtype=jnp.float32, layers=LAYERS):
        def layer(recipe):
            return of_nnx.MoE(
                D, F, E, K, dtype=jnp.bfloat16, recipe=recipe, param_dtype=param_dtype, rngs=rngs
            )

        self.first, self.second, self.third = layer(recipe), layer(recipe), layer(None)
        self.layers = layers
        if shared:
            for name in MATRICES:
                setattr(self.second, name, getattr(self.first, name))

    def __call__(self, x):
        for name in self.layers:
            x = x + getattr(self, name)(x)[0]
        return x


def loss(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def quantized(layer):
    arrays = jax.tree.map(
        lambda v: v.get_value(), layer.quantized, is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    return from_dict(arrays)


def wanted(layer):
    matrices = (getattr(layer, name)[...].astype(jnp.float32) for name in MATRICES)
    return jgg.quantize_mlp(*matrices, RECIPE)


def tokens(rng):
    return jnp.asarray(rng.standard_normal((24, D)), jnp.bfloat16)


@nnx.jit
def step(model, optimizer, x):
    value, gradients = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, gradients)
    return value


class TestNnx:
    @pytest.mark.parametrize("shared", [False, True])
    def test_trains_as_with_weights_quantised_apart(self, shared, rng):
        """Losses are, bit for bit, those of Optax with a call of `quantize` after each update."""
        layers = ("first", "second") if shared else ("first", "third")
        ours, theirs = (Model(nnx.Rngs(0), shared=shared, layers=layers) for _ in range(2))
        optimizer = of_nnx.Optimizer(ours, optim.quantized(optax.sgd(1e-3)))
        other = nnx.Optimizer(theirs, optax.sgd(1e-3), wrt=nnx.Param)
        of_nnx.quantize(theirs)
        for _ in range(3):
            x = tokens(rng)
            found = step(ours, optimizer, x)
            np.testing.assert_array_equal(found, step(theirs, other, x))
            assert np.isfinite(found)
            of_nnx.quantize(theirs)
            for one in (ours.first, ours.second):
                jax.tree.map(oracle.assert_same_bits, quantized(one), wanted(one))
        assert ours.third.quantized is None
        assert int(optimizer.step[...]) == 3
        one, other = (x.quantized["wo"]["values"] for x in (ours.first, ours.second))
        assert (one is other) == shared

    def test_state_has_no_quantised_weights(self):
        model = Model(nnx.Rngs(0))
        optimizer = of_nnx.Optimizer(model, optim.adamw(1e-3, mu_dtype=jnp.bfloat16))
        kinds = {x.dtype for x in jax.tree.leaves(nnx.state(optimizer))}
        assert kinds == {np.dtype(x) for x in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32)}
        with nnx.logical_axis_rules([("exp", "d"), ("embed", None), ("mlp", None)]):
            specs = nnx.get_partition_spec(nnx.state(optimizer))
        found = {tuple(x) for x in jax.tree.leaves(specs) if isinstance(x, jax.P) and x}
        assert ("d", None, None) in found

    def test_quantised_weights_have_logical_axes(self):
        """A mesh divides quantised weights as it divides the parameters, transposed ones too."""
        model = Model(nnx.Rngs(0))
        of_nnx.Optimizer(model, optim.adamw(1e-3))
        with nnx.logical_axis_rules([("exp", "d"), ("embed", "e"), ("mlp", None)]):
            specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, of_nnx.Quantized)))
        rows, transposed = jax.P("d", "e", None), jax.P("d", None, "e")
        assert specs["first"]["quantized"] == {
            "wi": dict(values=rows, scales=rows, values_t=transposed, scales_t=transposed),
            "wo": dict(values=transposed, scales=transposed, values_t=rows, scales_t=rows),
        }

    def test_parameters_in_16_bits(self, rng):
        model = Model(nnx.Rngs(0), param_dtype=jnp.bfloat16, layers=("first", "second"))
        optimizer = of_nnx.Optimizer(model, optim.adamw(1e-4))
        before = np.asarray(model.first.wo[...])
        for _ in range(2):
            step(model, optimizer, tokens(rng))
        assert model.first.wo[...].dtype == jnp.bfloat16
        assert np.any(np.asarray(model.first.wo[...]) != before)
        # The optimiser quantises its float32 weights, which differ from the model's 16-bit copies.
        for one in (model.first, model.second):
            leaves = jax.tree.leaves(quantized(one)), jax.tree.leaves(wanted(one))
            pairs = zip(*leaves, strict=True)
            assert any(np.any(np.asarray(a) != np.asarray(b)) for a, b in pairs)

    def test_gradients_in_16_bits(self, rng):
        """In the copy that `compute_model` returns, gradients of quantised layers have 16 bits."""
        model = Model(nnx.Rngs(0), shared=True)
        optimizer = of_nnx.Optimizer(model, optim.adamw(1e-3))
        shapes = nnx.eval_shape(nnx.grad(loss), optimizer.compute_model(model), tokens(rng))
        gradients = jax.tree.map(
            lambda x: jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype)), shapes
        )
        assert gradients["first"]["wo"][...].dtype == jnp.bfloat16
        assert gradients["third"]["wo"][...].dtype == np.float32
        assert model.first.wo[...].dtype == np.float32
        optimizer.update(model, gradients)
        for one in (model.first, model.second):
            jax.tree.map(oracle.assert_same_bits, quantized(one), wanted(one))

    def test_functions_of_states(self, rng):
        """A model that is merged with an optimiser's quantised weights computes with them."""
        model = Model(nnx.Rngs(0))
        of_nnx.quantize(model)
        x = tokens(rng)
        apply = nnx.jit(Model.__call__)
        want = apply(model, x)
        graph, params, _ = nnx.split(model, nnx.Param, of_nnx.Quantized)
        optimizer = optim.adamw(
            1e-3,
            select=lambda path, leaf: path[0] in ("first", "second") and path[-1] in MATRICES,
        )
        state = optimizer.init(params)
        merged = nnx.merge(graph, params, of_nnx.quantized_state(state.quantized))
        np.testing.assert_array_equal(apply(merged, x), want)

    def test_errors(self):
        model = Model(nnx.Rngs(0))
        with pytest.raises(TypeError, match=r"nnx.Optimizer takes Optax's"):
            of_nnx.Optimizer(model, optax.sgd(1e-3))
        with pytest.raises(ValueError, match="must quantise weights as that of the layers"):
            of_nnx.Optimizer(model, optim.adamw(1e-3, recipe=jgg.Recipe(power_of_two_scales=True)))
        with pytest.raises(ValueError, match="must be optimised"):
            of_nnx.Optimizer(model, optim.adamw(1e-3), wrt=nnx.BatchStat)
        model.second.wo = model.first.wo
        with pytest.raises(ValueError, match="share all or none"):
            of_nnx.Optimizer(model, optim.adamw(1e-3))


class Linen(nn.Module):
    """One layer in FP8, inside another module."""

    @nn.compact
    def __call__(self, x):
        layer = of_linen.MoE(F, E, K, dtype=jnp.bfloat16, recipe=RECIPE, name="layer")
        return nn.Dense(D)(x + layer(x)[0])


class TestLinen:
    def test_trains_as_with_weights_quantised_apart(self, rng):
        model = Linen()
        variables = jax.jit(model.init)(jax.random.key(0), tokens(rng))
        params = nn.meta.unbox(variables["params"])
        transformation = optax.sgd(1e-3)
        state = of_linen.TrainState.create(
            apply_fn=model.apply, params=params, tx=optim.quantized(transformation)
        )

        @jax.jit
        def ours(state, x):
            def loss(params):
                variables = state.variables | {"params": params}
                return jnp.mean(state.apply_fn(variables, x).astype(jnp.float32) ** 2)

            value, gradients = jax.value_and_grad(loss)(state.compute_params)
            return value, state.apply_gradients(grads=gradients)

        @jax.jit
        def theirs(params, inner, x):
            quantized = of_linen.quantize_params(params, RECIPE)

            def loss(params):
                variables = {"params": params, "quantized": quantized}
                return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)

            value, gradients = jax.value_and_grad(loss)(params)
            updates, inner = transformation.update(gradients, inner, params)
            return value, optax.apply_updates(params, updates), inner

        inner = transformation.init(params)
        for _ in range(3):
            x = tokens(rng)
            one, state = ours(state, x)
            other, params, inner = theirs(params, inner, x)
            np.testing.assert_array_equal(one, other)
            assert np.isfinite(one)
        assert int(state.step) == 3
        want = of_linen.quantize_params(state.params, RECIPE)
        jax.tree.map(oracle.assert_same_bits, state.variables["quantized"], want)


def test_layers_are_those_that_were_quantised(rng):
    """A step quantises the same layers as before, even under a mesh where `quantize` skips them."""
    layer = of_nnx.MoE(
        D, F, E, K, recipe=RECIPE, expert_axis="expert", fsdp_axis="fsdp", rngs=nnx.Rngs(0)
    )
    optimizer = of_nnx.Optimizer(layer, optim.adamw(1e-1, recipe=RECIPE))
    gradients = jax.tree.map(jnp.ones_like, nnx.state(layer, nnx.Param))
    mesh = jax.make_mesh((4, 2), ("fsdp", "expert"), (jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        optimizer.update(layer, gradients)
    for got, want in zip(
        jax.tree.leaves(quantized(layer)), jax.tree.leaves(wanted(layer)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
