"""Layers over all GPUs of this machine, at least two."""

import os
from functools import partial

# A shared host may not let every process use multicast memory.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_grouped_gemm as jgg  # noqa: E402
from jax_grouped_gemm import moe  # noqa: E402
from tests.support import expert_parallel as ep  # noqa: E402

SPLIT = P("expert")
E = 16
OPTIONS = [
    dict(),
    dict(overlap=True, max_sms=116),
    dict(overlap=False),
    dict(overlap=True, save="nothing"),
    dict(combine="all_to_all"),
    dict(save="rows"),
    dict(save="nothing"),
    dict(chunks=2),
    dict(buffer_factor=1.5),
    dict(strategy="ragged_all_to_all"),
    dict(strategy="ragged_all_to_all", chunks=2, save="nothing"),
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


@pytest.fixture
def mesh() -> Mesh:
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("there is only one GPU")
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    return Mesh(np.array(devices[: 1 << (len(devices).bit_length() - 1)]), ("expert",))


def layer(mesh, **options):
    def on_device(x, experts, weights, *matrices):
        return moe.expert_parallel_mlp(
            x,
            ep.routing(experts, weights, E),
            *matrices,
            expert_axis="expert",
            implementation="cuda",
            **options,
        )[0]

    return jax.shard_map(on_device, mesh=mesh, in_specs=(SPLIT,) * 6, out_specs=SPLIT)


def operands(mesh, rng, dtype, **sizes):
    given = ep.operands(rng, tokens=256, experts=E, top_k=4, **sizes)
    given = [x if i in (1, 2) else x.astype(dtype) for i, x in enumerate(given)]
    return given, jax.device_put(given, NamedSharding(mesh, SPLIT))


@every_option
def test_float32_is_exactly_that_of_one_gpu(mesh, options, rng):
    given, split = operands(mesh, rng, jnp.float32, embed=64, hidden=32)
    cotangent = jnp.asarray(rng.integers(-2, 3, given[0].shape), jnp.float32)
    # With default precision, products of many and of few rows of an expert round differently, and a
    # device has fewer experts than one GPU that has all of them.
    exact = dict(activation="relu", precision="highest")
    one = ep.one_device(E, implementation="cuda", **exact)
    expected = ep.with_gradients(one)(cotangent, *given)
    many = layer(mesh, **exact, **options)
    got = ep.with_gradients(many)(jax.device_put(cotangent, split[0].sharding), *split)
    ep.assert_equal([np.asarray(x) for x in got], [np.asarray(x) for x in expected])


@every_option
def test_fused_kernels_and_repeated_runs(mesh, options, rng):
    given, split = operands(mesh, rng, jnp.bfloat16, embed=256, hidden=128)
    cotangent = jnp.asarray(rng.standard_normal(given[0].shape), jnp.bfloat16)
    scale = jnp.asarray(0.05, jnp.bfloat16)
    given[3:], split[3:] = ([m * scale for m in ms] for ms in (given[3:], split[3:]))
    one = ep.one_device(E, implementation="cuda", activation="silu")
    expected = ep.with_gradients(one)(cotangent, *given)
    run = ep.with_gradients(layer(mesh, activation="silu", **options))
    split = [jax.device_put(cotangent, split[0].sharding), *split]
    got = [np.asarray(x) for x in run(*split)]
    for x, y in zip(got, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 2**-6 * np.linalg.norm(y)
    for _ in range(10):
        for x, y in zip(run(*split), got, strict=True):
            np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.parametrize("strategy", ["all_gather", "ragged_all_to_all"])
def test_fp8(mesh, strategy, rng):
    given, split = operands(mesh, rng, jnp.bfloat16, embed=256, hidden=128)
    cotangent = jnp.asarray(rng.standard_normal(given[0].shape), jnp.bfloat16)
    options = dict(activation="silu", recipe=jgg.Recipe())
    one = ep.one_device(E, implementation="cuda", **options)
    expected = ep.with_gradients(one)(cotangent, *given)
    many = layer(mesh, strategy=strategy, **options)
    got = ep.with_gradients(many)(jax.device_put(cotangent, split[0].sharding), *split)
    for x, y in zip(got, expected, strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 0.06 * np.linalg.norm(y)


@pytest.mark.parametrize("strategy", ["all_gather", "ragged_all_to_all"])
def test_two_hundred_training_steps(mesh, strategy, rng):
    """Three layers under scan learn random targets by heart."""
    given, split = operands(mesh, rng, jnp.bfloat16, embed=256, hidden=128)
    of_layer = layer(mesh, activation="silu", strategy=strategy)
    stacked = [jnp.stack([m * jnp.asarray(0.03, m.dtype)] * 3) for m in split[3:]]
    target = jax.device_put(
        jnp.asarray(rng.standard_normal(given[0].shape), jnp.float32), split[0].sharding
    )

    def loss(stacked, x, experts, weights):
        def body(x, matrices):
            return x + of_layer(x, experts, weights, *matrices), None

        y, _ = jax.lax.scan(body, x, stacked)
        return jnp.mean((y.astype(jnp.float32) - target) ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(stacked, *rest):
        value, gradients = jax.value_and_grad(loss)(stacked, *rest)
        rate = jnp.asarray(1e-3, jnp.bfloat16)
        moved = [m - rate * jnp.sign(g) for m, g in zip(stacked, gradients, strict=True)]
        return moved, value

    losses = []
    for _ in range(200):
        stacked, value = step(stacked, *split[:3])
        losses.append(value)
    losses = np.asarray(jax.device_get(losses))
    assert np.isfinite(losses).all() and losses[-1] < 0.8 * losses[0]


def test_a_process_for_each_gpu(mesh):
    ep.check_processes(mesh.size, "cuda", ["auto", "all_gather"])
