"""MLPs of experts with a recipe: rows that no expert owns, biases, parts of layers, devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import as_activation
from jax_grouped_gemm._src.mlp.experts import Experts
from jax_grouped_gemm._src.mlp.operands import ExpertWeights, Groups, Rows
from tests.support import fp8_oracle
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import BF16, F32
from tests.support.fp8_mlp import EVERY_RECIPE, OTHERS, RECIPES, case, cotangent


@EVERY_RECIPE
def test_rows_that_no_group_owns(recipe, rng):
    sizes = np.array([30, 0, 50, 40], np.int32)
    one = case(rng, with_rows=False, sizes=sizes)
    dy = cotangent(one, rng)
    clean = one.value_and_gradients(dy, recipe=recipe)
    one.x[120:], one.weights[120:], dy[120:] = np.nan, np.inf, np.nan
    got = one.value_and_gradients(dy, recipe=recipe)
    for x, want in zip(got, clean, strict=True):
        np.testing.assert_array_equal(x, want)
        assert np.isfinite(x).all()
    assert not np.asarray(got[0])[120:].any() and not np.asarray(got[1])[120:].any()
    assert not np.asarray(got[2])[1].any() and not np.asarray(got[5])[120:].any()


def test_a_token_with_nan_stays_alone(rng):
    one = case(rng)
    clean = one.value(recipe=jgg.Recipe())
    one.x[3, 5] = np.nan
    got = one.value(recipe=jgg.Recipe())
    mine = one.rows == 3
    assert np.isnan(got[mine]).all()
    np.testing.assert_array_equal(got[~mine], clean[~mine])


def test_rows_out_of_range_are_zero(rng):
    one = case(rng)
    one.rows[[1, 7]] = -1, 80
    y = one.run(jgg.ragged_mlp, *one.factors, recipe=RECIPES["blockwise"])
    assert not np.asarray(y)[[1, 7]].any() and np.asarray(y)[2].any()


def test_biases(rng):
    one = case(rng)
    dy = cotangent(one, rng)
    biases = tuple(jnp.asarray(0.5 * rng.standard_normal((4, n)), F32) for n in (136, 136, 160))

    def run(recipe, biases, dy, *factors):
        y = one.run(jgg.ragged_mlp, *factors, biases=biases, recipe=recipe)
        return jnp.sum(y * dy), y

    def all_of(recipe):
        gradients = jax.grad(partial(run, recipe), (0, 2), has_aux=True)
        return jax.jit(gradients)(biases, dy, *one.factors)

    got, want = all_of(jgg.Recipe()), all_of(None)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert fp8_oracle.cosine_distance(x, y) < 4e-3


def test_without_up(rng):
    one = case(rng)

    def loss(recipe, x, wi_0, wo):
        y = jgg.ragged_mlp(
            x, wi_0, None, wo, one.sizes, rows=one.rows, activation="relu2", recipe=recipe
        )
        return jnp.sum(jnp.sin(y))

    def all_of(recipe):
        gradients = jax.value_and_grad(loss, (1, 2, 3))
        return jax.jit(partial(gradients, recipe))(one.x, one.wi_0, one.wo)

    wanted = all_of(None)[1]
    for recipe in (jgg.Recipe(), *OTHERS):
        for x, y in zip(all_of(recipe)[1], wanted, strict=True):
            assert fp8_oracle.cosine_distance(x, y) < 1e-2


def test_gated_ragged_dot(rng):
    one = case(rng)
    recipe = RECIPES["blockwise, bf16 wgrad"]
    wi = jgg.quantize_mlp(one.wi_0, one.wi_1, one.wo, recipe).wi

    def hidden(x, wi_0, wi_1, **options):
        options |= dict(rows=one.rows, weights=one.weights)
        return jgg.gated_ragged_dot(x, wi_0, wi_1, one.sizes, **options)

    def all_of(**options):
        @jax.jit
        def run(*operands):
            y, vjp = jax.vjp(partial(hidden, **options), *operands)
            return y, *vjp(jnp.cos(y))

        return run(one.x, one.wi_0, one.wi_1)

    got, want = all_of(recipe=recipe), all_of()
    for x, y, same in zip(got, want, all_of(recipe=recipe, quantized=wi), strict=True):
        assert fp8_oracle.cosine_distance(x, y) < 4e-3
        np.testing.assert_array_equal(x, same)


@EVERY_RECIPE
@pytest.mark.parametrize("biases", [False, True])
def test_hidden_of_rows_that_no_group_owns(recipe, biases, rng):
    one = case(rng, with_rows=False, sizes=np.array([30, 0, 50, 40], np.int32))
    b = tuple(jnp.asarray(rng.standard_normal((4, 136)), F32) for _ in range(2))
    dh = rng.standard_normal((len(one.x), 136)).astype(np.float32)

    def all_of():
        def hidden(x, wi_0, wi_1, weights, biases):
            options = dict(weights=weights, biases=biases, recipe=recipe)
            return jgg.gated_ragged_dot(x, wi_0, wi_1, one.sizes, **options)

        factors = one.x, one.wi_0, one.wi_1, one.weights, b if biases else None
        y, vjp = jax.vjp(hidden, *factors)
        return jax.tree.leaves((y, vjp(jnp.asarray(dh))))

    one.x[120:], one.weights[120:], dh[120:] = 0, 0, 0
    clean = all_of()
    one.x[120:], one.weights[120:], dh[120:] = np.nan, np.nan, np.nan
    for x, want in zip(all_of(), clean, strict=True):
        np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("recipe", OTHERS)
def test_products_of_rows_in_bf16(recipe, rng):
    one = case(rng)
    dy = cotangent(one, rng)
    for x, y in zip(
        one.value_and_gradients(dy, recipe=recipe), one.value_and_gradients(dy), strict=True
    ):
        assert 1e-6 < fp8_oracle.cosine_distance(x, y) < 4e-3


def test_a_whole_layer_is_its_rows_added_up(rng):
    """`dropless_mlp` equals `ragged_mlp` and `combine`, but quantises dy before copying it."""
    one = case(rng, top_k=2)
    logits = rng.standard_normal((80, 4), np.float32)
    recipe = RECIPES["blockwise, bf16 wgrad"]
    dy = rng.standard_normal((80, 160), np.float32)
    x, *matrices = one.factors[:4]

    def whole(routing, x, weights, *matrices):
        return moe.dropless_mlp(x, routing._replace(weights=weights), *matrices, recipe=recipe)

    def parts(routing, x, weights, *matrices):
        order, inverse, sizes = moe.sort_by_expert(routing)
        rows = dict(rows=order // 2, weights=weights.reshape(-1)[order])
        y = jgg.ragged_mlp(x, *matrices, sizes, recipe=recipe, **rows)
        return moe.combine(y, inverse, order=order)

    def all_of(function, logits, dy, x, *matrices):
        routing = moe.route(logits, 2)
        y, vjp = jax.vjp(partial(function, routing), x, routing.weights, *matrices)
        return y, *vjp(dy)

    got, want = (jax.jit(partial(all_of, f))(logits, dy, x, *matrices) for f in (whole, parts))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_nothing_to_do(rng):
    for options in (dict(tokens=0), dict(sizes=[0, 0, 0, 0])):
        one = case(rng, **options)
        for x in one.value_and_gradients(cotangent(one, rng), recipe=jgg.Recipe()):
            assert not np.asarray(x).any()


def test_expert_parallel(rng):
    """With replicated tokens and sharded experts, gradients are those of one device."""
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    devices = np.array(jax.devices("cpu"))
    one = case(rng, experts=len(devices), sizes=sizes_of.multinomial(rng, 160, len(devices)))
    recipe = RECIPES["blockwise, bf16 wgrad"]
    dy = jnp.asarray(cotangent(one, rng))

    def body(x, *matrices):
        first = jax.lax.axis_index("x") * matrices[0].shape[0]

        def loss(x, *matrices):
            y = jgg.ragged_mlp(
                x, *matrices, one.sizes, rows=one.rows, recipe=recipe, group_offset=first
            )
            return jnp.sum(jax.lax.psum(y, "x") * dy)

        return jax.grad(loss, range(4))(x, *matrices)

    mesh = Mesh(devices, ("x",))
    specs = dict(in_specs=(P(), *[P("x")] * 3), out_specs=(P(), *[P("x")] * 3))
    factors = [jnp.asarray(x) for x in one.factors[:4]]
    got = jax.jit(jax.shard_map(body, mesh=mesh, **specs))(*factors)
    one.weights = None
    for x, want in zip(got, one.value_and_gradients(dy, recipe=recipe)[1:], strict=True):
        np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
def test_rows_that_no_expert_owns_may_hold_anything(wgrad, rng):
    """Rows past `count`, as in layers over several devices, may hold NaN."""
    one = case(rng, tokens=40, embed=136, hidden=264)
    recipe = jgg.Recipe(wgrad=wgrad, dgrad=wgrad)
    matrices = dict(wi_0=one.wi_0, wi_1=one.wi_1, wo=one.wo)
    weights = ExpertWeights(**{name: w.astype(BF16) for name, w in matrices.items()})
    sizes, m = rng.multinomial(30, np.full(len(one.wi_0), 1 / len(one.wi_0))), 44
    order = rng.permutation(40)
    inverse = np.full((40, 1), m)
    inverse[order[:30], 0] = np.arange(30)

    @jax.jit
    def run(weights, sizes, inverse, x, order, count):
        def layer(x):
            rows = Rows(x, order, inverse, count)
            experts = Experts("a layer", weights, False, as_activation("silu"), None, None, recipe)
            groups = Groups(sizes.astype(jnp.int32), jnp.array([0]))
            return experts.mlp(rows, jnp.ones(m), groups, combines=True)

        y, vjp = jax.vjp(layer, x)
        return y, *vjp(jnp.cos(y))

    x = one.x.astype(BF16)
    of_rows = np.array([*order[:30], *rng.integers(0, 40, m - 30)])
    expected = run(weights, sizes, inverse, x, of_rows, None)
    # Copy before writing, because JAX may still be reading the first operands.
    x, of_rows = x.copy(), of_rows.copy()
    x[order[30:]], of_rows[30:] = np.nan, order[35]
    got = run(weights, sizes, inverse, x, of_rows, np.array([30]))
    for found, want in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(want))
