"""The Linen layer: parameters, precision policy, and agreement with the functional layer."""

import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen as nn  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jax_grouped_gemm import moe  # noqa: E402
from jax_grouped_gemm.flax.linen import MoE  # noqa: E402

D, F, E, K = 12, 20, 5, 2


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 7, D)), jnp.float32)


@pytest.fixture
def key(rng):
    return jax.random.key(rng.integers(2**31))


def initialize(layer, key, x):
    return nn.unbox(jax.jit(layer.init)(key, x))


def test_parameters(key, x):
    boxed = jax.eval_shape(MoE(F, E, K).init, key, x)
    assert nn.get_partition_spec(boxed) == {
        "params": {
            "gate": {"kernel": P("embed", None)},
            "wi_0": P("exp", "embed", "mlp"),
            "wi_1": P("exp", "embed", "mlp"),
            "wo": P("exp", "mlp", "embed"),
        }
    }
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), nn.unbox(boxed)["params"])
    assert shapes == {
        "gate": {"kernel": ((D, E), jnp.float32)},
        "wi_0": ((E, D, F), jnp.float32),
        "wi_1": ((E, D, F), jnp.float32),
        "wo": ((E, F, D), jnp.float32),
    }


def test_initializers_with_axes_of_their_own(key, x):
    """Axes that an initialiser names replace the layer's axes, and initial values stay the same."""
    plain = MoE(F, E, K)
    layer = MoE(
        F,
        E,
        K,
        kernel_init=nn.with_partitioning(plain.kernel_init, (None, "x", "y")),
        gate_init=nn.with_logical_partitioning(plain.gate_init, ("rows", None)),
    )
    boxed = jax.jit(layer.init)(key, x)
    specs = nn.get_partition_spec(boxed)["params"]
    assert specs["wi_0"] == specs["wi_1"] == specs["wo"] == P(None, "x", "y")
    assert specs["gate"]["kernel"] == P("rows", None)
    expected = initialize(plain, key, x)
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(boxed), expected)
    assert layer.apply(boxed, x)[0].shape == x.shape


def test_initial_scale_is_that_of_one_expert(key):
    """The fan-in of an expert's matrix does not count the other experts."""
    params = initialize(MoE(128, 8, K), key, jnp.zeros((1, 64)))["params"]
    np.testing.assert_allclose(jnp.std(params["wi_0"]), 64**-0.5, rtol=0.05)
    np.testing.assert_allclose(jnp.std(params["wo"]), 128**-0.5, rtol=0.05)


def test_is_the_functional_layer(key, x):
    layer = MoE(F, E, K, renormalize=False, activation=nn.gelu)
    variables = initialize(layer, key, x)

    @jax.jit
    def functional(params):
        logits = jnp.dot(x, params["gate"]["kernel"], precision="highest")
        routing = moe.route(logits, K, renormalize=False)
        experts = params["wi_0"], params["wi_1"], params["wo"]
        y = moe.dropless_mlp(x, routing, *experts, activation=nn.gelu)
        return y, moe.auxiliary_losses(routing)

    y, losses = jax.jit(layer.apply)(variables, x)
    expected, expected_losses = functional(variables["params"])
    np.testing.assert_allclose(y, expected, atol=1e-6)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)


def test_router_stays_in_float32(key, x):
    """Half-precision experts get the same tokens as float32 ones."""
    params = initialize(MoE(F, E, K), key, x)
    y, losses = jax.jit(MoE(F, E, K).apply)(params, x)
    half, half_losses = jax.jit(MoE(F, E, K, dtype=jnp.bfloat16).apply)(params, x)
    assert half.dtype == jnp.bfloat16
    assert half_losses.load_balancing.dtype == jnp.float32
    np.testing.assert_array_equal(half_losses, losses)
    assert np.linalg.norm(half - y) < 0.02 * np.linalg.norm(y)


def test_dtype_defaults_to_promotion(key, x):
    layer = MoE(F, E, K, param_dtype=jnp.bfloat16)
    params = initialize(layer, key, x)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    for dtype in (jnp.bfloat16, jnp.float32):
        assert jax.eval_shape(layer.apply, params, x.astype(dtype))[0].dtype == dtype


def test_every_parameter_gets_a_gradient(key, x):
    layer = MoE(F, E, K)

    def loss(params):
        y, losses = layer.apply(params, x)
        return (y**2).mean() + losses.load_balancing + losses.router_z

    gradients = jax.jit(jax.grad(loss))(initialize(layer, key, x))
    for gradient in jax.tree.leaves(gradients):
        assert np.isfinite(gradient).all() and (gradient != 0).any()


def test_implementation_is_passed_on(key, x):
    layer = MoE(F, E, K, implementation="cuda")
    with pytest.raises(NotImplementedError, match="implementation='cuda' is impossible"):
        layer.init(key, x)


def test_missing_flax_names_the_extra(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "flax" or name.startswith("jax_grouped_gemm.flax"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-grouped-gemm\[flax\]'"):
        import jax_grouped_gemm.flax.linen  # noqa: F401


def test_pickled(key, x):
    layer = MoE(F, E, K)
    again = pickle.loads(pickle.dumps(layer))
    assert again == layer
    variables = initialize(layer, key, x)
    np.testing.assert_array_equal(again.apply(variables, x)[0], layer.apply(variables, x)[0])


@pytest.mark.parametrize("name", ["hidden_features", "num_experts", "top_k"])
def test_sizes(name, key, x):
    sizes = dict(hidden_features=F, num_experts=E, top_k=K)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"MoE: {name} must be positive, got {size}"):
            MoE(**sizes | {name: size}).init(key, x)
    with pytest.raises(TypeError, match=f"MoE: {name} must be an integer, got 1.5"):
        MoE(**sizes | {name: 1.5}).init(key, x)
    with pytest.raises(ValueError, match=r"MoE: x must have features, got \(2, 7, 0\)"):
        MoE(**sizes).init(key, x[..., :0])
