"""Flax layers over a mesh have the same parameters, results and gradients as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_grouped_gemm.flax as jgg_flax  # noqa: E402

D, F, E, K = 16, 8, 8, 2
RULES = [("exp", "expert"), ("embed", "fsdp"), ("mlp", "tensor")]
AXES = dict(expert_axis="expert", fsdp_axis="fsdp", tensor_axis="tensor")


@pytest.fixture
def mesh() -> Mesh:
    devices = np.array(jax.devices("cpu")).reshape(2, 2, 2)
    return Mesh(devices, ("fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((4, 6, D)), jnp.float32)


def assert_close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


@pytest.mark.parametrize("placed", [False, True])
def test_linen(placed, mesh, x):
    """Parameters may lie on one device or be sharded by their logical axes."""
    one = jgg_flax.linen.MoE(F, E, K)
    many = jgg_flax.linen.MoE(F, E, K, mesh=mesh, **AXES)
    variables = one.init(jax.random.key(0), x)
    assert jax.tree.structure(variables) == jax.tree.structure(
        jax.eval_shape(many.init, jax.random.key(0), x)
    )

    def loss(params, x, layer):
        y, auxiliary = layer.apply(params, x)
        return (y**2).mean() + auxiliary.load_balancing, y

    def gradients(params, x, layer):
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)(
            params, x, layer
        )

    params = nn.unbox(variables)
    expected = gradients(params, x, one)
    if placed:
        specs = nn.logical_to_mesh(nn.get_partition_spec(variables), RULES)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        params = jax.device_put(params, shardings)
        x = jax.device_put(x, NamedSharding(mesh, P(("fsdp", "expert"))))
    assert_close(gradients(params, x, many), expected)


def test_linen_sows_statistics(mesh, x):
    layer = jgg_flax.linen.MoE(F, E, K, mesh=mesh, **AXES)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    _, sown = jax.jit(lambda v, x: layer.apply(v, x, mutable="intermediates"))(
        {"params": variables["params"]}, x
    )
    (stats,) = sown["intermediates"]["expert_parallel"]
    assert stats.rows_per_device.sum() == x.shape[0] * x.shape[1] * K


def test_nnx(mesh, x):
    one = jgg_flax.nnx.MoE(D, F, E, K, rngs=nnx.Rngs(0))
    many = jgg_flax.nnx.MoE(D, F, E, K, mesh=mesh, **AXES, rngs=nnx.Rngs(0))

    def loss(layer, x):
        y, auxiliary = layer(x)
        return (y**2).mean() + auxiliary.router_z, y

    gradients = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (expected, y), (of_one, dx) = gradients(one, x)
    (got, y_many), (of_many, dx_many) = gradients(many, x)
    assert_close((got, y_many, dx_many), (expected, y, dx))
    assert_close(nnx.to_pure_dict(of_many), nnx.to_pure_dict(of_one))


def test_the_mesh_that_is_set(mesh, x):
    one = jgg_flax.nnx.MoE(D, F, E, K, rngs=nnx.Rngs(0))
    many = jgg_flax.nnx.MoE(D, F, E, K, expert_axis="expert", rngs=nnx.Rngs(0))
    with jax.set_mesh(Mesh(mesh.devices[0, 0], ("expert",), axis_types=(AxisType.Auto,))):
        got = nnx.jit(lambda layer, x: layer(x)[0])(many, x)
    assert_close(got, one(x)[0])


@pytest.mark.parametrize("option", ["mesh", "fsdp_axis", "tensor_axis"])
def test_options_of_a_mesh_need_an_expert_axis(option, mesh):
    with pytest.raises(ValueError, match="need an expert_axis"):
        jgg_flax.linen.MoE(F, E, K, **{option: mesh if option == "mesh" else "tensor"})


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_overlap_is_the_layers(library, mesh, x):
    """With `overlap=True`, Flax layers send tokens by ppermutes, even to eight devices."""
    mesh = Mesh(mesh.devices.reshape(8), ("expert",), axis_types=(AxisType.Auto,))
    x = jnp.tile(x, (2, 1, 1))
    options = dict(mesh=mesh, expert_axis="expert", strategy="all_gather", overlap=True)
    if library == "linen":
        layer = jgg_flax.linen.MoE(F, E, K, **options)

        def apply(x):
            return layer.init_with_output(jax.random.key(0), x)[0][0]
    else:
        layer = jgg_flax.nnx.MoE(D, F, E, K, rngs=nnx.Rngs(0), **options)

        def apply(x):
            return layer(x)[0]

    program = str(jax.make_jaxpr(jax.grad(lambda x: apply(x).sum()))(x))
    assert "ppermute[" in program and "all_to_all[" not in program
