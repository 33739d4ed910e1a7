"""Layers over meshes with auto and explicit axes, and under `jax.vmap` over a mesh axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import moe
from jax_grouped_gemm._src.barrier import barrier
from tests.support import expert_parallel as ep
from tests.support.expert_parallel import D, E, F, T, operands, routing


def mesh_of(kinds=(), **axes) -> Mesh:
    shape = tuple(axes.values())
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(axes), axis_types=kinds or (AxisType.Auto,) * len(shape))


def check(rng, mesh, **options):
    """Asserts that a layer over the mesh has one device's values and gradients, bit for bit."""
    given = operands(rng)
    cotangent = jnp.asarray(rng.integers(-2, 3, (T, D)), jnp.float32)
    expected = ep.one_device_with_gradients()(cotangent, *given)
    with jax.set_mesh(mesh):
        layer = moe.expert_parallel(mesh, activation="relu", **options)
        given = [jax.device_put(a, NamedSharding(mesh, P())) for a in given]

        @jax.jit
        def run(ct, x, experts, *floats):
            def f(x, weights, *matrices):
                return layer(x, routing(experts, weights), *matrices)[0]

            y, vjp = jax.vjp(f, x, *floats)
            if AxisType.Explicit in mesh.axis_types:
                ct = jax.sharding.reshard(ct, jax.typeof(y).sharding)
            return y, *vjp(ct)

        got = run(cotangent, *given)
    ep.assert_equal(got, expected)


SHARED = {
    "tensor": (dict(data=2, expert=2, tensor=2), dict(tensor_axis="tensor")),
    "tokens along data": (dict(data=2, expert=2), dict(token_axes="data")),
    "tokens along a third": (dict(data=2, expert=2, other=2), dict(token_axes="other")),
    "fsdp and tensor": (
        dict(fsdp=2, expert=2, tensor=2),
        dict(fsdp_axis="fsdp", tensor_axis="tensor"),
    ),
}


@pytest.mark.parametrize(
    "name, options",
    [
        *((name, dict(chunks=2)) for name in SHARED),
        ("tokens along data", dict(save="rows", overlap=True)),
        ("tokens along a third", dict(chunks=2, combine="ppermute")),
        ("fsdp and tensor", dict(chunks=2, save="nothing")),
    ],
    ids=str,
)
def test_tokens_that_are_the_same_along_an_axis(name, options, rng):
    axes, of_mesh = SHARED[name]
    check(rng, mesh_of(**axes), expert_axis="expert", **of_mesh, **options)


def test_chunks_of_exchanged_rows_beside_a_tensor_axis(rng):
    mesh = mesh_of(expert=2, tensor=2)
    options = dict(tensor_axis="tensor", strategy="ragged_all_to_all", chunks=2)
    check(rng, mesh, expert_axis="expert", **options)


@pytest.mark.parametrize(
    "explicit, options",
    [
        ("data", dict()),
        ("data, expert", dict(token_axes=("expert", "data"), chunks=2)),
        ("data", dict(token_axes="data")),
        ("expert", dict(token_axes="data")),
        ("expert", dict(fsdp_axis="data")),
        ("data, expert", dict(tensor_axis="tensor")),
    ],
    ids=str,
)
def test_explicit_and_auto_axes(explicit, options, rng):
    names = ("data", "expert", "tensor")
    kinds = tuple(AxisType.Explicit if n in explicit else AxisType.Auto for n in names)
    check(rng, mesh_of(kinds, data=2, expert=2, tensor=2), expert_axis="expert", **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(strategy="ragged_all_to_all"),
        dict(strategy="ragged_all_to_all", chunks=3, buffer_factor=8.0),
        dict(strategy="all_gather", save="nothing"),
        dict(strategy="all_gather", save="rows", combine="ppermute"),
        dict(strategy="all_gather", overlap=True),
    ],
    ids=str,
)
def test_mapped_over_another_axis(options, rng):
    """`jax.vmap` maps tokens and routing over the mesh axis data, and leaves matrices unmapped."""
    mesh = mesh_of(data=2, expert=2)
    layer = moe.expert_parallel(
        mesh, expert_axis="expert", token_axes="expert", activation="relu", **options
    )
    sets = [operands(rng) for _ in range(4)]
    matrices = sets[0][3:]
    x, experts, weights = (np.stack(a) for a in list(zip(*sets, strict=True))[:3])
    cotangents = jnp.asarray(rng.integers(-2, 3, x.shape), jnp.float32)

    def of_one(x, experts, weights, *matrices):
        return layer(x, routing(experts, weights), *matrices)[0]

    def inside(ct, x, experts, *floats):
        y, vjp = jax.vjp(lambda x, *floats: of_one(x, experts, *floats), x, *floats)
        return y, *vjp(ct)

    in_axes = (0, 0, 0, 0, None, None, None)
    mapped = jax.jit(jax.vmap(inside, in_axes, spmd_axis_name="data"))
    inside = mapped(cotangents, x, experts, weights, *matrices)
    each = [
        ep.one_device_with_gradients()(cotangents[i], x[i], experts[i], weights[i], *matrices)
        for i in range(len(sets))
    ]
    stacked = [np.stack(a) for a in zip(*each, strict=True)]
    ep.assert_equal(inside, stacked)


@pytest.mark.parametrize("weights_are_mapped", [False, True])
def test_a_layer_of_one_device_mapped_over_an_axis_inside_shard_map(weights_are_mapped, rng):
    mesh = mesh_of(data=2, expert=4)
    x = jnp.asarray(rng.integers(-2, 3, (2, T, D)), jnp.float32)
    _, experts, weights, *matrices = operands(rng)
    if weights_are_mapped:
        experts, weights = (jnp.stack([a, a[::-1]]) for a in (experts, weights))

    @jax.jit
    def f(x, experts, weights, *matrices):
        def y(x, *matrices):
            return moe.dropless_mlp(x, routing(experts, weights), *matrices, activation="relu")

        return y(x, *matrices), *jax.grad(lambda *a: jnp.sum(y(*a)), (0, 1, 2, 3))(x, *matrices)

    rows, whole = P("expert"), P()
    in_specs = (rows, rows, rows, whole, whole, whole)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=(rows, rows, *[whole] * 3))
    of = 0 if weights_are_mapped else None
    spmd = jax.vmap(mapped, (0, of, of, None, None, None), spmd_axis_name="data")
    got = jax.jit(spmd)(x, experts, weights, *matrices)
    for i in range(2):
        choice = (experts[i], weights[i]) if weights_are_mapped else (experts, weights)
        for one, expected in zip(got, f(x[i], *choice, *matrices), strict=True):
            np.testing.assert_array_equal(one[i], expected)


def test_recomputed_hidden_layers_are_not_kept(rng):
    """Without `jax.vmap` over a mesh axis, a hidden layer saves only gate and up for gradients."""
    x = jnp.asarray(rng.standard_normal((T, F)), jnp.float32)
    _, vjp = jax.vjp(lambda g, u: moe.gated_activation(g, u, None), x, 2 * x)
    kept = [a for a in jax.tree.leaves(vjp) if a.shape == (T, F)]
    assert len(kept) == 2


def test_barrier_keeps_types_and_orders_derivatives(rng):
    mesh = mesh_of(data=2, expert=4)
    x, y = (jnp.asarray(rng.standard_normal((8, 4)), jnp.float32) for _ in range(2))

    def f(x, y):
        types = [jax.typeof(a).manual_axis_type.varying for a in (x, y)]
        x, (y, n) = barrier((x, (y, 3)))
        assert [jax.typeof(a).manual_axis_type.varying for a in (x, y)] == types
        return x**2, n * y**3

    specs = P("data"), P("expert")
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs))
    for one, expected in zip(mapped(x, y), (x**2, 3 * y**3), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)
    _, tangents = jax.jvp(mapped, (x, y), (y, x))
    for one, expected in zip(tangents, (2 * x * y, 9 * y**2 * x), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5)
    _, vjp = jax.vjp(mapped, x, y)
    for one, expected in zip(vjp((x, y)), (2 * x * x, 9 * y**2 * y), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5)
    text = (
        jax.jit(jax.value_and_grad(lambda x, y: jnp.sum(barrier((x * y, y))[0])))
        .lower(x, y)
        .as_text()
    )
    assert text.count("optimization_barrier") == 2
    assert E == len(barrier([x] * E))


def test_forward_mode(rng):
    """Forward mode has the Jacobian J of reverse mode, because ct . (J v) equals (J^T ct) . v."""
    mesh = mesh_of(expert=4)
    given = [jnp.asarray(a) for a in operands(rng)]
    x, experts, weights, *matrices = given
    layer = moe.expert_parallel(mesh, expert_axis="expert", strategy="ragged_all_to_all")

    def f(x, weights, *matrices):
        return layer(x, routing(experts, weights), *matrices)[0]

    floats = (x, weights, *matrices)
    tangents = [jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in floats]
    ct = jnp.asarray(rng.standard_normal(x.shape), x.dtype)

    @jax.jit
    def both(ct, floats, tangents):
        return jax.jvp(f, floats, tangents)[1], jax.vjp(f, *floats)[1](ct)

    y_dot, cotangents = both(ct, floats, tuple(tangents))
    forward = np.vdot(np.float64(ct), np.float64(y_dot))
    reverse = sum(
        np.vdot(np.float64(a), np.float64(b)) for a, b in zip(cotangents, tangents, strict=True)
    )
    assert forward == pytest.approx(reverse, rel=1e-4, abs=1e-3)
