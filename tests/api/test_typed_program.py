"""A user's program, which mypy checks (see pyproject.toml) and pytest runs.

Each `type: ignore` marks an error that mypy must find: mypy reports such comments if unused.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm.flax import linen as jgg_linen
from jax_grouped_gemm.flax import nnx as jgg_nnx

STACK = jnp.ones((2, 3, 4))
MATRICES: list[jax.Array | np.ndarray] = [jnp.ones((3, 4)), np.ones((5, 4), np.float32)]
SIZES = np.array([2, 1], np.int32)


def test_stacks_give_arrays() -> None:
    assert_type(jgg.grouped_syrk(STACK), jax.Array)
    assert jgg.grouped_syrk(STACK).sum() == 2 * 4 * (3 + 2 + 1)
    assert_type(jgg.grouped_syr2k(STACK, np.ones((2, 3, 4), np.float32), beta=0.0), jax.Array)
    product = jgg.grouped_gemm(STACK, STACK, transpose_rhs=True, alpha=2.0)
    assert_type(product, jax.Array)
    assert product.shape == (2, 3, 3)


def test_lists_give_lists() -> None:
    products = jgg.grouped_gemm(MATRICES, MATRICES, transpose_rhs=[True, True])
    assert_type(products, list[jax.Array])
    assert_type(products[0], jax.Array)
    updates = jgg.grouped_her2k(MATRICES, MATRICES, products, beta=0.5, uplo="upper")
    assert_type(updates, list[jax.Array])
    assert [x.shape for x in updates] == [(3, 3), (5, 5)]


def test_either_may_be_passed_on() -> None:
    def gram(x: jax.Array | list[jax.Array]) -> jax.Array | list[jax.Array]:
        return jgg.grouped_herk(x)

    assert len(gram(STACK)) == len(gram([STACK, STACK])) == 2


def test_ragged_products() -> None:
    x, w = jnp.ones((3, 4)), jnp.ones((2, 4, 5))
    y = jgg.ragged_dot(x, w, SIZES, preferred_element_type=jnp.float32, implementation="xla")
    assert_type(y, jax.Array)
    z = jgg.fp8_ragged_dot(x, w, SIZES, recipe=jgg.Recipe(wgrad="bf16"))
    gradient = jax.grad(lambda w: jgg.ragged_dot(x, w, SIZES).sum())(w)
    total = jgg.ragged_dot_accumulate(gradient, x, y, SIZES)
    assert (y.shape, z.shape, total.shape) == ((3, 5), (3, 5), (2, 4, 5))
    for plan in jgg.explain(jgg.ragged_dot, x, w, SIZES).plans:
        assert_type(plan.kernel.name == "xla", bool)


def test_moe() -> None:
    x, w = jnp.ones((7, 4)), jnp.ones((2, 4, 5))
    routing = moe.route(jnp.zeros((7, 2)), top_k=1, renormalize=True)
    assert_type(routing.weights, jax.Array)
    y = moe.dropless_mlp(x, routing, w, w, w.mT, implementation=jax.lax.ragged_dot)
    assert_type(y + moe.auxiliary_losses(routing).router_z, jax.Array)
    hidden = moe.gated_activation(y, y, weights=jnp.ones(7))
    assert_type(hidden, jax.Array)
    assert hidden.shape == y.shape == x.shape


def test_layers() -> None:
    x = jnp.ones((2, 7, 4))
    layer = jgg_nnx.MoE(4, 5, num_experts=3, top_k=2, implementation="xla", rngs=nnx.Rngs(0))
    y, losses = layer(x)
    assert_type(losses, moe.AuxiliaryLosses)
    other = jgg_linen.MoE(hidden_features=5, num_experts=3, top_k=2)
    z, _ = other.apply(other.init(jax.random.key(0), x), x)
    assert y.shape == z.shape == x.shape


def test_what_the_checker_finds() -> None:
    x, w = jnp.ones((3, 4)), jnp.ones((2, 4, 5))
    with pytest.raises(ValueError, match="implementation"):
        jgg.ragged_dot(x, w, SIZES, implementation="gpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="uplo"):
        jgg.grouped_syrk(STACK, uplo="left")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="scheduler"):
        jgg.grouped_gemm(MATRICES, MATRICES, scheduler="host")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="lower"):
        jgg.grouped_syrk(STACK, lower=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="rhs"):
        jgg.grouped_gemm(MATRICES, STACK)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="forward"):
        jgg.Recipe(forward="fp4")  # type: ignore[arg-type]
