"""Results that stay sharded over two GPUs equal those of one GPU. Each GPU runs our kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

M, K, N, G = 1024, 256, 384, 8
KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def mesh(request):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    return Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(request.param,))


def check(mesh, f, operands, specs, tolerance):
    """Checks that `f` gives the same for split operands as on one GPU, and that it runs kernels."""
    expected = jax.jit(f)(*operands)
    split = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        program = jax.jit(f).lower(*split).compile()
        got = program(*split)
    assert "jax_grouped_gemm." in program.as_text()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = np.float64(one), np.float64(other)
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other)


@pytest.mark.parametrize(
    "specs",
    [(P("d"), P()), (P(), P(None, None, "d")), (P(None, "d"), P(None, "d")), (P(), P("d"))],
    ids=["rows", "columns", "k", "experts"],
)
def test_ragged_dot(mesh, specs, rng):
    cuts = np.sort(rng.integers(0, M, G))
    sizes = jnp.asarray(np.diff(cuts, prepend=0), jnp.int32)

    def f(lhs, rhs):
        def loss(lhs, rhs):
            y = jgg.ragged_dot(lhs, rhs, sizes, implementation="cuda")
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1))(lhs, rhs)

    lhs = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((G, K, N)) / K**0.5, jnp.bfloat16)
    check(mesh, f, (lhs, rhs), specs, 2e-2)


@pytest.mark.parametrize("weights", [P(), P(None, "d")], ids=["whole", "fsdp"])
def test_layer(mesh, weights, rng):
    def f(x, logits, *matrices):
        def loss(x, *matrices):
            routing = moe.route(logits, 2)
            y = moe.dropless_mlp(x, routing, *matrices, implementation="cuda")
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1, 2, 3))(x, *matrices)

    x = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
    logits = jnp.asarray(rng.standard_normal((M, G)), jnp.float32)
    wi_0, wi_1 = (jnp.asarray(rng.standard_normal((G, K, N)) / 16, jnp.bfloat16) for _ in "01")
    wo = jnp.asarray(rng.standard_normal((G, N, K)) / 16, jnp.bfloat16)
    specs = (P("d"), P("d"), weights, weights, weights)
    check(mesh, f, (x, logits, wi_0, wi_1, wo), specs, 2e-2)


def test_stacks(mesh, rng):
    def f(a):
        (orthogonal,) = jgg.optim.orthogonalize([a], dtype=jnp.float32)
        return jgg.grouped_syrk(a, implementation="cuda"), orthogonal

    a = jnp.asarray(rng.standard_normal((4, 128, 256)), jnp.float32)
    # By default XLA rounds some operands to TF32, in other products for two matrices than for four.
    with jax.default_matmul_precision("highest"):
        check(mesh, f, (a,), (P("d"),), 1e-3)
