"""Flax layers with a recipe, whose weights may be quantised once in each optimiser step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

import jax_grouped_gemm as jgg  # noqa: E402
import jax_grouped_gemm.flax as jgg_flax  # noqa: E402
from tests.api.test_fp8_ragged_dot import count_primitives  # noqa: E402

D, F, E, K, LAYERS = 128, 136, 4, 2, 3
RECIPE = jgg.Recipe.blockwise(wgrad="bf16")
OPTIONS = dict(param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, recipe=RECIPE)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 16, D)).astype(jnp.bfloat16))


def equal(one, other):
    one, other = (jax.tree.map(np.float32, nn.meta.unbox(tree)) for tree in (one, other))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def quantisations(function, *operands):
    """Counts a program's operations that quantise weights. An operation in a loop counts once."""
    counts = count_primitives(jax.make_jaxpr(function)(*operands).jaxpr)
    return counts["quantize_blocks"] + counts["quantize_joined"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y, losses = jgg_flax.linen.MoE(F, E, K, **OPTIONS)(x)
        return x + y, losses


class Net(nn.Module):
    """Layers under scan and remat."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0, "quantized": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers()(x, None)[0]


class TestLinen:
    def test_scan_and_remat(self, x, rng):
        net = Net()
        params = jax.jit(net.init)(jax.random.key(int(rng.integers(2**31))), x)["params"]
        quantized = jgg_flax.linen.quantize_params(params, RECIPE)

        def loss(params, quantized):
            y = net.apply({"params": params, "quantized": quantized}, x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        gradient = jax.grad(loss)
        assert quantisations(gradient, params, quantized) == 0
        assert quantisations(gradient, params, {}) == 4  # wi and wo, which remat quantises again
        equal(*jax.jit(lambda *a: (gradient(*a), gradient(a[0], {})))(params, quantized))

    def test_accumulation_quantises_once(self, x, rng):
        layer = jgg_flax.linen.MoE(F, E, K, **OPTIONS)
        params = jax.jit(layer.init)(jax.random.key(int(rng.integers(2**31))), x)["params"]

        def loss(params, quantized, x):
            y, _ = layer.apply({"params": params, "quantized": quantized}, x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        def step(params, batches):
            quantized = jgg_flax.linen.quantize_params(params, RECIPE)

            def add(total, x):
                gradient = jax.grad(loss)(params, quantized, x)
                return jax.tree.map(jnp.add, total, gradient), None

            return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]

        batches = jnp.stack([x, 2 * x])
        assert quantisations(step, params, batches) == 2
        gradient = jax.jit(jax.grad(loss))
        want = jax.tree.map(jnp.add, *(gradient(params, {}, batch) for batch in batches))
        equal(jax.jit(step)(params, batches), want)

    def test_only_layers_are_quantised(self, x, rng):
        params = nn.Dense(4).init(jax.random.key(0), x)["params"]
        assert jgg_flax.linen.quantize_params({"dense": params}, RECIPE) == {}


class TestNnx:
    def layer(self, rng, **options):
        return jgg_flax.nnx.MoE(
            D, F, E, K, rngs=nnx.Rngs(int(rng.integers(2**31))), **OPTIONS | options
        )

    def test_step(self, x, rng):
        """Quantising weights after each update gives the bits of quantising them in each call."""
        model = self.layer(rng)
        plain = nnx.clone(model)
        jgg_flax.nnx.quantize(model)

        def loss(model, x):
            return jnp.sum(jnp.sin(model(x)[0].astype(jnp.float32)))

        def update(model, x):
            y, _ = model(x)
            gradients = nnx.grad(loss)(model, x)
            for name in ("wi_0", "wi_1", "wo"):
                weights = getattr(model, name)
                weights[...] = weights[...] - 0.1 * getattr(gradients, name)[...]
            return y

        @nnx.jit
        def step(model, x):
            y = update(model, x)
            jgg_flax.nnx.quantize(model)
            return y

        plain_step = nnx.jit(update)
        for _ in range(3):
            equal(step(model, x), plain_step(plain, x))
        for name in ("wi_0", "wi_1", "wo"):
            equal(getattr(model, name)[...], getattr(plain, name)[...])

    def test_variables(self, x, rng):
        """Quantised weights are no parameters, and without a recipe there are no such weights."""
        model = self.layer(rng)
        assert not nnx.state(model, jgg_flax.nnx.Quantized)
        jgg_flax.nnx.quantize(model)
        found = nnx.to_pure_dict(nnx.state(model, jgg_flax.nnx.Quantized))["quantized"]
        want = jgg.quantize_mlp(*(w[...] for w in (model.wi_0, model.wi_1, model.wo)), RECIPE)
        equal(found, {name: getattr(want, name)._asdict() for name in want._fields})
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def run(params, x):
            return nnx.merge(graph, params, rest)(x)[0].astype(jnp.float32).sum()

        assert quantisations(jax.grad(run), params, x) == 0
        without = self.layer(rng, recipe=None)
        jgg_flax.nnx.quantize(without)
        assert without.quantized is None

    def test_restored_from_a_checkpoint(self, x, rng, tmp_path):
        """State can be restored from nested dictionaries, which Orbax returns without a target."""
        checkpoint = pytest.importorskip("orbax.checkpoint")
        model, other = self.layer(rng), self.layer(rng)
        jgg_flax.nnx.quantize(model)
        jgg_flax.nnx.quantize(other)
        saved = nnx.to_pure_dict(nnx.state(model))
        with checkpoint.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "model", saved)
            restored = checkpointer.restore(tmp_path / "model")
        state = nnx.state(other)
        nnx.replace_by_pure_dict(state, restored)
        nnx.update(other, state)
        equal(nnx.to_pure_dict(nnx.state(other)), saved)
        call = nnx.jit(lambda model, x: model(x)[0])
        equal(call(other, x), call(model, x))


def test_linen_collection_from_a_checkpoint(x, rng, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    layer = jgg_flax.linen.MoE(F, E, K, **OPTIONS)
    params = nn.unbox(jax.jit(layer.init)(jax.random.key(int(rng.integers(2**31))), x)["params"])
    variables = {"params": params, "quantized": jgg_flax.linen.quantize_params(params, RECIPE)}
    with checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", variables)
        restored = checkpointer.restore(tmp_path / "model")
    apply = jax.jit(layer.apply)
    equal(apply(restored, x)[0], apply(variables, x)[0])
