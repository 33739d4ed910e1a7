"""Tokens that travel in 8 bits: the layer of one device on tokens that are rounded like that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.api.test_expert_parallel import mesh_of, parallel
from tests.support import expert_parallel as ep
from tests.support.expert_parallel import T, operands

D = F = 256
ROWWISE = jgg.Recipe.rowwise(power_of_two_scales=True)
BLOCKWISE = jgg.Recipe.blockwise(power_of_two_scales=True)
OPTIONS = [
    dict(dispatch_recipe=BLOCKWISE),
    dict(dispatch_recipe=ROWWISE, combine="all_to_all"),
    dict(dispatch_recipe=BLOCKWISE, combine="psum_scatter", save="rows"),
    dict(dispatch_recipe=BLOCKWISE, combine="ppermute", save="nothing", chunks=2),
    dict(dispatch_recipe=ROWWISE, implementation=jax.lax.ragged_dot),
]


@pytest.mark.parametrize(
    "devices, options", [(1, OPTIONS[0]), (2, OPTIONS[0]), *((4, o) for o in OPTIONS)]
)
def test_numbers_of_8_bits_lose_nothing(devices, options, rng):
    """Result and gradients, bit by bit."""
    given = operands(rng, embed=D, hidden=8)
    cotangent = jnp.asarray(rng.integers(-2, 3, given[0].shape), jnp.float32)
    expected = ep.one_device_with_gradients()(cotangent, *given)
    got = ep.with_gradients(parallel(mesh_of(expert=devices), **options))(cotangent, *given)
    ep.assert_equal(got, expected)


@pytest.mark.parametrize("scaling", ["blockwise", "rowwise"])
@pytest.mark.parametrize("combine", ["auto", "all_to_all"])
def test_tokens_are_rounded_once(scaling, combine, rng):
    """Gradients of tokens are those of the rounded ones."""
    _, *others = operands(rng, embed=D)
    x = rng.standard_normal((T, D)) * np.exp(rng.standard_normal((T, D)))
    blocks = x.reshape(T, -1, 128 if scaling == "blockwise" else D).astype(np.float32)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(448)
    rounded = (blocks / scales).astype(jnp.float8_e4m3fn).astype(np.float32) * scales
    cotangent = jnp.asarray(rng.standard_normal((T, D)), jnp.float32)
    one = ep.with_gradients(ep.one_device(activation="silu"))
    expected = one(cotangent, jnp.asarray(rounded.reshape(T, D)), *others)
    options = dict(dispatch_recipe=jgg.Recipe(scaling=scaling), combine=combine)
    many = parallel(mesh_of(expert=2), activation="silu", **options)
    got = ep.with_gradients(many)(cotangent, jnp.asarray(x, jnp.float32), *others)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    unrounded = one(cotangent, jnp.asarray(x, jnp.float32), *others)
    assert np.abs(unrounded[0] - expected[0]).max() > 1e-3 * np.abs(expected[0]).max()


class TestWithProductsInFp8:
    def run(self, rng, recipe, dispatch_recipe, axes=2):
        given = [
            x if x.dtype == jnp.int32 else x.astype(jnp.bfloat16)
            for x in operands(rng, embed=D, hidden=F)
        ]
        given[0] = jnp.asarray(rng.standard_normal((T, D)), jnp.bfloat16)
        cotangent = jnp.asarray(rng.standard_normal((T, D)), jnp.bfloat16)
        options = dict(recipe=recipe, activation="silu")
        mesh = mesh_of(expert=axes)
        plain = parallel(mesh, **options)
        dispatched = parallel(mesh, **options, dispatch_recipe=dispatch_recipe)
        return (
            ep.with_gradients(plain)(cotangent, *given),
            ep.with_gradients(dispatched)(cotangent, *given),
        )

    @pytest.mark.parametrize("scaling", ["blockwise", "rowwise"])
    def test_products_take_tokens_as_they_arrive(self, scaling, rng):
        """They are what products would have quantised: all that depends on tokens in the forward
        pass's format is the same, bit by bit. Weight gradients have them rounded once more."""
        recipe = jgg.Recipe(scaling=scaling)
        plain, dispatched = self.run(rng, recipe, recipe)
        names = "y", "x", "weights", "wi_0", "wi_1", "wo"
        for name, a, b in zip(names, dispatched, plain, strict=True):
            if name in ("wi_0", "wi_1"):
                a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
                assert 0 < np.linalg.norm(a - b) < 0.06 * np.linalg.norm(b), name
            else:
                np.testing.assert_array_equal(a, b, err_msg=name)

    @pytest.mark.parametrize(
        "recipe",
        [jgg.Recipe(scaling="tensorwise"), jgg.Recipe(dgrad="bf16"), BLOCKWISE],
        ids=["tensorwise", "dgrad in bf16", "other scales"],
    )
    def test_other_formats_are_rounded_twice(self, recipe, rng):
        for a, b in zip(*self.run(rng, recipe, jgg.Recipe()), strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            # The gradient of gate cancels most. Draws differed by up to .153 of its norm.
            assert np.linalg.norm(a - b) < 0.2 * np.linalg.norm(b)


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (dict(dispatch_recipe="fp8"), TypeError, "recipe must be.*got 'fp8'"),
            (
                dict(dispatch_recipe=jgg.Recipe.tensorwise()),
                ValueError,
                "dispatch_recipe must scale each row.*got scaling='tensorwise'",
            ),
            (
                dict(dispatch_recipe=BLOCKWISE, strategy="ragged_all_to_all"),
                ValueError,
                "dispatch_recipe is for strategy='all_gather'",
            ),
        ],
    )
    def test_recipes(self, options, error, message, rng):
        with pytest.raises(error, match=message):
            jax.jit(parallel(mesh_of(expert=2), **options))(*operands(rng))
        with pytest.raises(error, match=message):
            moe.explain_expert_parallel(8, 8, 8, 8, 2, 4, **options)

    def test_tokens(self, rng):
        x, *others = operands(rng)
        with pytest.raises(TypeError, match="x must be bfloat16.*dispatch_recipe, got int32"):
            parallel(mesh_of(expert=2), dispatch_recipe=BLOCKWISE)(x.astype(jnp.int32), *others)
