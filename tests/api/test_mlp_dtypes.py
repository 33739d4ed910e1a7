"""The dtypes of an MLP's operands, and of its result: all functions promote by one rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support.dtypes import BF16, F16, F32

T, D, F, E = 6, 16, 24, 2
NAMES = "x", "wi_0", "wi_1", "wo"


def operands(rng, dtypes=(F32,) * 4):
    shapes = (T, D), (E, D, F), (E, D, F), (E, F, D)
    arrays = (jnp.asarray(rng.standard_normal(shape), F32) for shape in shapes)
    return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


def routing(rng, top_k=1):
    return moe.route(jnp.asarray(rng.standard_normal((T, E)), F32), top_k)


def functions(rng, **options):
    """The functions of x, wi_0, wi_1 and wo that return [m, D]."""
    chosen, sizes = routing(rng), np.array([2, 4])

    def dropless(**more):
        return lambda x, *w: moe.dropless_mlp(x, chosen, *w, **more, **options)

    every = dict(
        ragged_mlp=lambda *factors: jgg.ragged_mlp(*factors, sizes, **options),
        dropless_mlp=dropless(),
        weights_on_input=dropless(apply_router_weight_on_input=True),
    )
    if not options:
        every["function"] = dropless(implementation=jax.lax.ragged_dot)
    return every


RECIPES = {"no recipe": {}} | {
    name: dict(recipe=recipe)
    for name, recipe in (("fp8", jgg.Recipe()), ("fp8 gradients", jgg.Recipe(forward="bf16")))
}
EVERY_RECIPE = pytest.mark.parametrize("options", RECIPES.values(), ids=RECIPES)


class TestPromotion:
    @EVERY_RECIPE
    @pytest.mark.parametrize("narrow, wide", [(BF16, F32), (BF16, F16), (F16, BF16)])
    @pytest.mark.parametrize("other", range(4), ids=NAMES)
    def test_result_and_gradients(self, options, narrow, wide, other, rng):
        dtypes = [wide if i == other else narrow for i in range(4)]
        factors = operands(rng, dtypes)
        for name, function in functions(rng, **options).items():
            y, vjp = jax.vjp(function, *factors)
            assert y.dtype == F32, name
            assert [g.dtype for g in vjp(y)] == dtypes, name

    @pytest.mark.parametrize("other", range(3), ids=NAMES[:3])
    def test_hidden(self, other, rng):
        *factors, _ = operands(rng, [F32 if i == other else BF16 for i in range(4)])
        assert jgg.gated_ragged_dot(*factors, np.array([2, 4])).dtype == F32

    def test_is_before_products(self, rng):
        """Hidden layers are not rounded to the narrower dtype."""
        factors = operands(rng, (BF16, BF16, BF16, F32))
        for name, function in functions(rng).items():
            if name != "weights_on_input":  # which rounds the rows of x to the dtype of x
                exact = function(*(x.astype(F32) for x in factors))
                np.testing.assert_array_equal(function(*factors), exact, name)
