"""`fp8_ragged_dot` of empty operands and under strict promotion, and what its gradients keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import group_sizes as sizes_of


@pytest.mark.parametrize("m, k, n", [(5, 0, 3), (5, 4, 0), (0, 4, 3), (5, 0, 0), (0, 0, 0)])
def test_dimensions_of_size_zero(m, k, n):
    """Results and gradients are zeros of the right shape."""
    lhs, rhs = jnp.ones((m, k)), jnp.ones((2, k, n))

    def product(lhs, rhs):
        return jgg.fp8_ragged_dot(lhs, rhs, jnp.array([m, 0]))

    @jax.jit
    def with_gradients(lhs, rhs):
        out, pullback = jax.vjp(product, lhs, rhs)
        return out, pullback(jnp.ones((m, n)))

    out, gradients = with_gradients(lhs, rhs)
    assert out.shape == (m, n) and not np.any(out)
    for gradient, operand in zip(gradients, (lhs, rhs), strict=True):
        assert gradient.shape == operand.shape and not np.any(gradient)


def test_rank_promotion_may_be_an_error(rng):
    lhs, rhs = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((40, 130), (4, 130, 24))
    )
    sizes = sizes_of.multinomial(rng, 37, 4)

    def loss(lhs, rhs):
        return jgg.fp8_ragged_dot(lhs, rhs, sizes).astype(jnp.float32).sum()

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.grad(loss, argnums=(0, 1))(lhs, rhs)
        jgg.quantize_ragged(lhs, sizes)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_rank_promotion_may_be_an_error_in_an_mlp(wgrad, rng):
    recipe = jgg.Recipe(wgrad=wgrad)
    x, wi_0, wi_1, wo = (
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16)
        for s in ((40, 136), (4, 136, 24), (4, 136, 24), (4, 24, 136))
    )
    sizes = sizes_of.multinomial(rng, 37, 4)

    def loss(*factors):
        return jgg.ragged_mlp(*factors, sizes, recipe=recipe).astype(jnp.float32).sum()

    with jax.numpy_rank_promotion("raise"):
        jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(x, wi_0, wi_1, wo)


@pytest.mark.parametrize("product", ["wgrad", "dgrad"])
def test_operands_of_gradients_in_bf16_are_kept_in_16_bits(product):
    recipe = jgg.Recipe(**{product: "bf16"})
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 128), (2, 128, 256)))

    def residuals(lhs, rhs):
        sizes = np.array([40, 24], np.int32)
        return jax.vjp(lambda *x: jgg.fp8_ragged_dot(*x, sizes, recipe=recipe), lhs, rhs)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, lhs, rhs))
    shape = lhs.shape if product == "wgrad" else rhs.shape
    assert [x.dtype for x in kept if x.shape == shape] == [jnp.bfloat16]
