"""`moe.expert_parallel` on global arrays under jit has one device's results, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import moe
from tests.support import expert_parallel as ep
from tests.support.expert_parallel import D, E, K, T, operands, routing


def mesh_of(kind=AxisType.Auto, **axes) -> Mesh:
    shape = tuple(axes.values())
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(axes), axis_types=(kind,) * len(shape))


def whole(mesh, **options):
    """Returns (x, experts, weights, *matrices) -> y, a function of global arrays."""
    layer = moe.expert_parallel(mesh, **dict(expert_axis="expert", activation="relu") | options)

    def run(x, experts, weights, *matrices):
        return layer(x, routing(experts, weights), *matrices)[0]

    return run


MESHES = {
    "expert": (dict(expert=4), dict()),
    "data, expert": (dict(data=2, expert=4), dict()),
    "fsdp": (dict(fsdp=2, expert=4), dict(fsdp_axis="fsdp")),
    "tensor": (dict(expert=2, tensor=4), dict(tensor_axis="tensor")),
    "tokens along tensor": (
        dict(expert=2, tensor=4),
        dict(tensor_axis="tensor", token_axes=("expert", "tensor")),
    ),
    "fsdp and tensor": (
        dict(fsdp=2, expert=2, tensor=2),
        dict(fsdp_axis="fsdp", tensor_axis="tensor"),
    ),
    "experts along two": (dict(a=2, b=4), dict(expert_axis=("a", "b"))),
}


# For explicit axes, "fsdp and tensor" also covers "expert", "fsdp" and "tensor".
EXPLICIT = "data, expert", "tokens along tensor", "fsdp and tensor", "experts along two"


@pytest.mark.parametrize(
    "name, kind",
    [
        *((name, AxisType.Auto) for name in MESHES),
        *((name, AxisType.Explicit) for name in EXPLICIT),
    ],
    ids=str,
)
def test_is_the_layer_of_one_device(name, kind, rng):
    axes, options = MESHES[name]
    mesh, given = mesh_of(kind, **axes), operands(rng)
    cotangent = jnp.asarray(rng.integers(-2, 3, (T, D)), jnp.float32)
    expected = ep.one_device_with_gradients()(cotangent, *given)
    with jax.set_mesh(mesh):
        everywhere = NamedSharding(mesh, P())
        split = NamedSharding(mesh, P(options.get("expert_axis", "expert")))
        given = [jax.device_put(a, everywhere) for a in given]
        # The layer moves matrices that have another sharding than it needs.
        given[3:] = [jax.device_put(m, split) for m in given[3:]]

        @jax.jit
        def run(x, experts, *floats):
            layer = whole(mesh, **options)
            y, vjp = jax.vjp(lambda x, *floats: layer(x, experts, *floats), x, *floats)
            ct = cotangent
            if kind == AxisType.Explicit:
                ct = jax.sharding.reshard(ct, jax.typeof(y).sharding)
            return y, *vjp(ct)

        got = run(*given)
    ep.assert_equal(got, expected)


def test_leading_dimensions_and_the_mesh_that_is_set(rng):
    x, experts, weights, *matrices = operands(rng)
    expected = ep.layer_of_one_device(x, experts, weights, *matrices)
    with jax.set_mesh(mesh_of(expert=4)):
        shape = (8, T // 8)
        got = jax.jit(whole(None))(
            x.reshape(*shape, D),
            experts.reshape(*shape, K),
            weights.reshape(*shape, K),
            *matrices,
        )
    np.testing.assert_array_equal(got.reshape(T, D), expected)


def test_biases_and_no_gate(rng):
    x, experts, weights, wi_0, _, wo = operands(rng)
    b0, bo = (jnp.asarray(rng.integers(-2, 3, (E, n)), jnp.float32) for n in (wi_0.shape[2], D))
    options = dict(activation="relu")
    chosen, biases = routing(experts, weights), (b0, None, bo)
    layer = functools.partial(moe.dropless_mlp, biases=biases, **options)
    expected = jax.jit(layer)(x, chosen, wi_0, None, wo)
    mesh = mesh_of(fsdp=2, expert=2, tensor=2)
    layer = moe.expert_parallel(
        mesh, expert_axis="expert", tensor_axis="tensor", fsdp_axis="fsdp", **options
    )
    got, stats = jax.jit(layer)(x, chosen, wi_0, None, wo, biases)
    np.testing.assert_array_equal(got, expected)
    rows = np.bincount(np.asarray(experts).reshape(-1) // (E // 2), minlength=2)
    np.testing.assert_array_equal(stats.rows_per_device, rows)
    assert stats.overflow == 0 and stats.max_over_mean >= 1


@functools.cache
def mapped_on_one_device(axes):
    return jax.jit(jax.vmap(ep.one_device(), axes))


@pytest.mark.parametrize("strategy", ["all_gather", "ragged_all_to_all"])
@pytest.mark.parametrize("mapped", [0, 3, 5], ids=["x", "wi_0", "wo"])
def test_vmap_of_one_operand(mapped, strategy, rng):
    """`jax.vmap` may map one operand alone. Second derivatives by `jacrev` nest two such maps."""
    given = list(operands(rng))
    axes = [0 if i == mapped else None for i in range(len(given))]
    given[mapped] = np.stack([given[mapped], 2 * given[mapped]])
    layer = jax.vmap(whole(mesh_of(expert=4), strategy=strategy), axes)

    @jax.jit
    def run(*given):
        nested = [a[None] if i == mapped else a for i, a in enumerate(given)]
        return layer(*given), jax.vmap(layer, axes)(*nested)[0]

    expected = mapped_on_one_device(tuple(axes))(*given)
    for got in run(*given):
        np.testing.assert_array_equal(got, expected)


def test_ranks_are_not_promoted(rng):
    given = operands(rng)
    for strategy in ("all_gather", "ragged_all_to_all"):
        with jax.numpy_rank_promotion("raise"):
            jax.jit(whole(mesh_of(expert=4), strategy=strategy)).lower(*given)


def test_losses_of_logits_along_explicit_axes(rng):
    mesh = mesh_of(AxisType.Explicit, data=2, expert=4)
    logits = jnp.asarray(rng.standard_normal((4, 8, E)), jnp.float32)
    losses = jax.jit(lambda logits: moe.auxiliary_losses(moe.route(logits, K)))
    expected = losses(logits)
    with jax.set_mesh(mesh):
        got = losses(jax.device_put(logits, NamedSharding(mesh, P("data", "expert"))))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


class TestMistakes:
    def test_meshes_and_axes(self):
        mesh = mesh_of(data=2, expert=4)
        with pytest.raises(ValueError, match="give a mesh, or set one"):
            moe.expert_parallel(expert_axis="expert")
        with pytest.raises(TypeError, match="mesh must be a jax.sharding.Mesh, got 'expert'"):
            moe.expert_parallel("expert", expert_axis="expert")
        with pytest.raises(ValueError, match=r"fsdp_axis 'x' is no axis of the mesh \('data'"):
            moe.expert_parallel(mesh, expert_axis="expert", fsdp_axis="x")
        with pytest.raises(ValueError, match="two meanings"):
            moe.expert_parallel(mesh, expert_axis="expert", tensor_axis="expert")
        with pytest.raises(ValueError, match="expert_axis must name a mesh axis, got None"):
            moe.expert_parallel(mesh, expert_axis=None)
        with pytest.raises(ValueError, match="token_axes names a mesh axis twice"):
            moe.expert_parallel(mesh, expert_axis="expert", token_axes=("data", "data"))
        with pytest.raises(ValueError, match=r"fsdp_axis .* token_axes .* lack data"):
            moe.expert_parallel(mesh, expert_axis="expert", fsdp_axis="data", token_axes="expert")

    def test_operands(self, rng):
        x, experts, weights, *matrices = operands(rng)
        layer, chosen = (
            moe.expert_parallel(mesh_of(expert=4), expert_axis="expert"),
            routing(experts, weights),
        )
        for name, given in (
            ("x", ([[1.0]], chosen, *matrices)),
            ("wi_0", (x, chosen, None, *matrices[1:])),
            ("wo", (x, chosen, *matrices[:2], None)),
            ("experts", (x, chosen._replace(experts=None), *matrices)),
        ):
            with pytest.raises(TypeError, match=f"{name} must be a JAX or NumPy array"):
                layer(*given)
        with pytest.raises(TypeError, match="biases must be a triple"):
            layer(x, chosen, *matrices, (None, None))
        with pytest.raises(TypeError, match="wi_0 must have 3 dimensions"):
            layer(x, chosen, matrices[0][0], *matrices[1:])
        for factor in (float("inf"), 10**400, float("nan"), True):
            with pytest.raises(ValueError, match="buffer_factor must be None or a positive number"):
                moe.expert_parallel(mesh_of(expert=4), expert_axis="expert", buffer_factor=factor)(
                    x, chosen, *matrices
                )

    def test_dimensions(self, rng):
        x, experts, weights, *matrices = operands(rng)
        layer = whole(mesh_of(data=2, expert=4))
        with pytest.raises(ValueError, match=r"dimension 0 of x \(23, 16\).* 8 devices along data"):
            layer(x[1:], experts[1:], weights[1:], *matrices)
        with pytest.raises(ValueError, match="dimension 0 of wi_0 .* 4 devices along expert"):
            layer(x, experts, weights, *(m[:6] for m in matrices))
        with pytest.raises(TypeError, match="routing must be a moe.Routing"):
            moe.expert_parallel(mesh_of(expert=4), expert_axis="expert")(x, experts, *matrices)


@pytest.mark.parametrize(
    "options_of", [moe.expert_parallel_compiler_options, moe.data_parallel_compiler_options]
)
def test_compiler_options_are_for_gpus(options_of):
    """For CPUs the options are empty, and `jax.jit` accepts them."""
    for devices in (None, mesh_of(expert=2), jax.devices("cpu")):
        options = options_of(devices)
        assert options == {}
        assert jax.jit(jnp.sin, compiler_options=options)(0.0) == 0
