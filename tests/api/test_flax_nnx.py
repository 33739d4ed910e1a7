"""The NNX layer: annotations, transforms, and equality with the Linen layer."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_grouped_gemm.flax as jgg_flax  # noqa: E402

D, F, E, K = 12, 20, 5, 2


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 7, D)), jnp.float32)


@pytest.fixture
def rngs(rng):
    return nnx.Rngs(int(rng.integers(2**31)))


def test_parameters(rngs):
    layer = jgg_flax.nnx.MoE(D, F, E, K, param_dtype=jnp.bfloat16, rngs=rngs)
    params = {
        ".".join(path): (value.shape, value.dtype)
        for path, value in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }
    assert params == {
        "gate.kernel": ((D, E), jnp.bfloat16),
        "wi_0": ((E, D, F), jnp.bfloat16),
        "wi_1": ((E, D, F), jnp.bfloat16),
        "wo": ((E, F, D), jnp.bfloat16),
    }


def test_logical_axes_map_to_a_mesh(rngs):
    layer = jgg_flax.nnx.MoE(D, F, E, K, rngs=rngs)
    with nn.logical_axis_rules([("exp", "x"), ("embed", None), ("mlp", "y")]):
        specs = nnx.get_partition_spec(nnx.state(layer))
    assert nnx.to_pure_dict(specs) == {
        "gate": {"kernel": P(None, None)},
        "wi_0": P("x", None, "y"),
        "wi_1": P("x", None, "y"),
        "wo": P("x", "y", None),
    }


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(renormalize=False, activation=nn.gelu),
        dict(dtype=jnp.bfloat16),
        dict(implementation=jax.lax.ragged_dot),
    ],
    ids=["default", "gelu", "bfloat16", "stock_product"],
)
def test_equals_linen(options, rngs, x):
    layer = jgg_flax.nnx.MoE(D, F, E, K, rngs=rngs, **options)
    params = nnx.to_pure_dict(nnx.state(layer))
    linen_layer = jgg_flax.linen.MoE(F, E, K, **options)
    expected, expected_losses = jax.jit(linen_layer.apply)({"params": params}, x)
    y, losses = nnx.jit(layer)(x)
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(losses, expected_losses)


def test_stack_of_rematerialised_layers(rngs, x):
    """Layers that vmap makes, and that scan and remat apply, have the gradients of a plain loop."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make_layers(rngs):
        return jgg_flax.nnx.MoE(D, F, E, K, rngs=rngs)

    layers = make_layers(rngs)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layers)))
    assert specs["wo"] == P("layers", "exp", "mlp", "embed")
    graph, state = nnx.split(layers)

    def looped(state, x):
        for index in range(2):
            layer = nnx.merge(graph, jax.tree.map(lambda a, index=index: a[index], state))
            x = x + layer(x)[0]
        return (x**2).mean()

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def residual_layers(x, layer):
        return x + layer(x)[0]

    def scanned(layers, x):
        return (residual_layers(x, layers) ** 2).mean()

    gradients = nnx.jit(nnx.grad(scanned))(layers, x)
    expected = jax.jit(jax.grad(looped))(state, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, expected)


def test_pickled(rngs, x):
    layer = jgg_flax.nnx.MoE(D, F, E, K, rngs=rngs)
    again = pickle.loads(pickle.dumps(layer))
    np.testing.assert_array_equal(again(x)[0], layer(x)[0])


@pytest.mark.parametrize("name", ["in_features", "hidden_features", "num_experts", "top_k"])
def test_sizes(name, rngs):
    sizes = dict(in_features=D, hidden_features=F, num_experts=E, top_k=K)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"MoE: {name} must be positive, got {size}"):
            jgg_flax.nnx.MoE(**sizes | {name: size}, rngs=rngs)
    with pytest.raises(TypeError, match=f"MoE: {name} must be an integer, got 1.5"):
        jgg_flax.nnx.MoE(**sizes | {name: 1.5}, rngs=rngs)


def test_router_multiplies_parts_of_bfloat16(rngs, x, rng):
    layer = jgg_flax.nnx.MoE(D, F, E, K, dtype=jnp.bfloat16, rngs=rngs)
    logits = jax.jit(layer.gate)
    assert "num_primitive_operations = 6" in logits.lower(x).as_text()
    exact = np.asarray(x, np.float64) @ np.asarray(layer.gate.kernel[...], np.float64)
    np.testing.assert_allclose(logits(x), exact, rtol=1e-5, atol=1e-6)
