"""Batch invariance of layers over several devices and of Flax layers, as far as a CPU shows it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support.expert_parallel import routing

T, D, F, E, K = 32, 16, 16, 8, 4
EXCHANGE = "ragged_all_to_all"


def mesh_of(devices, *others) -> Mesh:
    names = ("expert", *others)
    shape = (devices, *(2 for _ in others))
    found = np.array(jax.devices("cpu")[: int(np.prod(shape))]).reshape(shape)
    return Mesh(found, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.fixture
def operands(rng):
    """Matrices have one power of two in each row and column, so that products are exact. Rows
    have many magnitudes, so that the bits of a sum show in which order rows are added up."""

    def values(*shape):
        x = rng.standard_normal(shape) * np.exp2(4 * rng.standard_normal(shape))
        return jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)

    def matrices():
        places = np.stack([rng.permutation(np.eye(D)) for _ in range(E)])
        return jnp.asarray(places * np.exp2(rng.integers(-9, 9, places.shape)), jnp.float32)

    experts = np.argsort(rng.standard_normal((T, E)), axis=1)[:, :K].astype(np.int32)
    return values(T, D), jnp.asarray(experts), values(T, K), *(matrices() for _ in range(3))


def over(devices, **options):
    """Returns a function that computes y and dx of a layer over `devices` devices."""
    options = dict(activation="relu") | options
    run = moe.expert_parallel(mesh_of(devices), expert_axis="expert", **options)

    @jax.jit
    def layer(x, experts, weights, *matrices):
        def of(x):
            return run(x, routing(experts, weights, E), *matrices)[0]

        y, vjp = jax.vjp(of, x)
        return y, *vjp(x)

    return layer


def one_by_one(x, experts, weights, *matrices):
    """Returns y. A separate call computes each of the K choices, and they are added in order."""
    y = jnp.zeros_like(x)
    for choice in range(K):
        of_choice = routing(experts[:, choice : choice + 1], weights[:, choice : choice + 1], E)
        y += moe.dropless_mlp(x, of_choice, *matrices, activation="relu")
    return y


def bits(arrays):
    return [np.asarray(x).view(np.uint32) for x in arrays]


def test_over_any_number_of_devices(operands):
    expected = bits(over(1, batch_invariant=True)(*operands))
    np.testing.assert_array_equal(expected[0], *bits([jax.jit(one_by_one)(*operands)]))
    for devices in (2, 4, 8):
        got = bits(over(devices, batch_invariant=True)(*operands))
        for name, one, other in zip(("y", "dx"), got, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{name} on {devices} devices")
    # Without batch invariance, each device first adds up the rows of its own experts.
    (y, _), (other, _) = bits(over(4, strategy="all_gather")(*operands)), expected
    assert (y != other).any()


def test_rows_travel(operands):
    for options in ({}, dict(strategy=EXCHANGE), dict(strategy=EXCHANGE, chunks=2)):
        program = str(jax.make_jaxpr(over(4, batch_invariant=True, **options))(*operands))
        assert "exchange_rows" in program and "reduce_scatter" not in program
    with jgg.batch_invariant():
        assert "exchange_rows" in str(jax.make_jaxpr(over(4))(*operands))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(strategy="all_gather"), "strategy must be 'auto' or 'ragged_all_to_all'"),
        (dict(buffer_factor=1.5), "buffer_factor must be None with batch_invariant.*1.5"),
        (dict(combine="all_to_all"), "combine must be 'auto' with batch_invariant"),
        (dict(implementation="xla"), "expert_parallel_mlp: implementation must be None or 'cuda'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_refused(options, message, operands):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(over(2, batch_invariant=True, **options), *operands)


def test_hidden_features_over_devices_are_refused(operands):
    axes = dict(expert_axis="expert", tensor_axis="tensor")
    with pytest.raises(ValueError, match="tensor_axis must be None with batch_invariant"):
        moe.expert_parallel(mesh_of(2, "tensor"), **axes, batch_invariant=True)
    run = moe.expert_parallel(mesh_of(2, "tensor"), **axes)
    x, experts, weights, *matrices = operands
    with (
        jgg.batch_invariant(),
        pytest.raises(ValueError, match="tensor_axis must be None with batch_invariant"),
    ):
        jax.eval_shape(run, x, routing(experts, weights, E), *matrices)


def test_tokens_that_are_the_same_everywhere_are_refused(operands):
    options = dict(expert_axis="expert", token_axes="data", batch_invariant=True)
    run = moe.expert_parallel(mesh_of(2, "data"), **options)
    x, experts, weights, *matrices = operands
    with pytest.raises(ValueError, match="rows that travel.*tokens must differ along expert_axis"):
        jax.eval_shape(run, x, routing(experts, weights, E), *matrices)


def test_explain():
    explain = functools.partial(moe.explain_expert_parallel, 4096, 2048, 768, 128, 8, 4)
    assert explain().chosen.strategy == "all_gather"
    found = explain(batch_invariant=True)
    assert found.chosen.strategy == EXCHANGE and not found.others
    assert "each row travels alone" in str(found) and "travels alone" not in str(explain())
    with pytest.raises(ValueError, match="tensor_devices must be 1 with batch_invariant, got 2"):
        explain(batch_invariant=True, tensor_devices=2)


def products_of(plans):
    """Returns the plans of products, without the plan that says why the layer is not fused."""
    return [plan for plan in plans if plan.problem.op != "expert_mlp"]


class TestFlax:
    @pytest.fixture(autouse=True)
    def flax(self):
        pytest.importorskip("flax", reason="Flax is not installed")

    def layers(self, **options):
        """Returns the NNX layer and the Linen layer, as functions of x."""
        from flax import nnx

        import jax_grouped_gemm.flax as jgg_flax

        of_nnx = jgg_flax.nnx.MoE(D, F, E, K, rngs=nnx.Rngs(0), **options)
        of_linen = jgg_flax.linen.MoE(F, E, K, **options)
        variables = jgg_flax.linen.MoE(F, E, K).init(jax.random.key(0), jnp.zeros((1, D)))
        return of_nnx, functools.partial(of_linen.apply, variables)

    def test_pass_it_on(self):
        x = jax.ShapeDtypeStruct((T, D), jnp.float32)
        for layer in self.layers(batch_invariant=True):
            plans = jgg.explain(layer, x).plans
            # The first plan is that of the router's product.
            assert plans[0].problem.num_groups == 1 and len(plans) > 2
            assert all("batch invariant" in str(plan) for plan in products_of(plans))
        for layer in self.layers():
            expected = jgg.explain(layer, x).plans
            assert not any("batch invariant" in str(plan) for plan in expected)
            with jgg.batch_invariant():
                plans = jgg.explain(layer, x).plans
            assert plans[0].problem.num_groups == 1 and len(plans) == len(expected) + 1
            assert all("batch invariant" in str(plan) for plan in products_of(plans))

    def test_results_are_those_without(self, rng):
        x = jnp.asarray(rng.standard_normal((2, T, D)), jnp.float32)
        layers = zip(self.layers(), self.layers(batch_invariant=True), strict=True)
        for one, other in layers:
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), one(x), other(x))

    def test_errors(self):
        with pytest.raises(TypeError, match="MoE: batch_invariant must be True or False"):
            self.layers(batch_invariant=1)
        with pytest.raises(ValueError, match="MoE: implementation must be None or 'cuda'"):
            self.layers(batch_invariant=True, implementation="xla")
