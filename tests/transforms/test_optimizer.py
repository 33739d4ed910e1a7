"""Optimisers that write FP8 weights under JAX's transformations, in training and over devices."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe, optim
from tests.support.optimizer_model import (
    RECIPE,
    D,
    E,
    F,
    assert_bits,
    close,
    like,
    model,
    quantized_of,
)
from tests.support.partition import EIGHT, KINDS, collectives, entered, mesh_of


class TestTransformations:
    def test_scan_over_steps(self, rng):
        ours = optim.adamw(1e-2)
        params = model(rng)
        every = [like(rng, params) for _ in range(3)]
        stacked = jax.tree.map(lambda *x: np.stack(x), *every)

        def body(carry, gradients):
            return ours.step(carry[0], gradients, carry[1]), None

        got, _ = jax.jit(lambda *x: jax.lax.scan(body, x, stacked))(params, ours.init(params))
        step, want = jax.jit(ours.step), (params, ours.init(params))
        for gradients in every:
            want = step(want[0], gradients, want[1])
        close(got[0], want[0], 3)
        assert_bits(got[1], got[0])

    def test_stacked_layers(self, rng):
        """Parameters may have the shape [layers, experts, ...], which `nn.scan` gives them."""
        ours = optim.adamw(1e-2)
        params = model(rng, leading=(2, E))
        gradients = like(rng, params)
        new, state = jax.jit(ours.step)(params, gradients, ours.init(params))
        assert state.quantized["layer"].wo.values.shape == (2, E, F, D)
        assert_bits(state, new)

    def test_explain_lists_the_updates(self, rng):
        """`explain` lists one update for each matrix, by the kernel."""
        params = model(rng)
        gradients = like(rng, params)
        for ours, op in (
            (optim.adamw(1e-2), "adamw_quantized"),
            (optim.quantized(optax.sgd(1e-2)), "apply_and_quantize"),
        ):
            plans = jgg.explain(ours.step, params, gradients, ours.init(params)).plans
            assert [plan.problem.op for plan in plans] == [op] * 3
            assert all(plan.kernel.name == op and not plan.reason for plan in plans)
            shapes = {tuple(plan.problem.shape) for plan in plans}
            assert shapes == {(E, D, F), (E, F, D)}

    @pytest.mark.parametrize("in_axes", [(0, 0, None), (None, 0, 0)])
    def test_vmap(self, in_axes, rng):
        """Maps over parameters and gradients, or over gradients and learning rates."""
        params = model(rng)
        state = optim.adamw(0.0).init(params)
        rates = np.array([1e-3, 1e-2], np.float32)
        gradients = jax.tree.map(lambda *x: np.stack(x), like(rng, params), like(rng, params))
        both = jax.tree.map(lambda x: np.stack([x, 2 * np.asarray(x)]), params)

        def step(params, gradients, rate):
            return optim.adamw(rate).step(params, gradients, state)

        given = both if in_axes[0] == 0 else params
        rate = rates if in_axes[2] == 0 else rates[0]
        got = jax.jit(jax.vmap(step, in_axes))(given, gradients, rate)
        for i in range(2):
            of_run = [
                jax.tree.map(lambda x: x[i], x) if axis == 0 else x  # noqa: B023
                for x, axis in zip((given, gradients, rate), in_axes, strict=True)
            ]
            mine = jax.tree.map(lambda x: np.asarray(x)[i], got)  # noqa: B023
            close(mine[0], jax.jit(step)(*of_run)[0])
            assert_bits(mine[1], mine[0])

    def test_exported_for_a_gpu(self, rng, extension):
        """A step exports with `EXPORT_DISABLED_CHECKS`, which allows its custom calls."""
        ours = optim.adamw(1e-2)
        params = model(rng)
        state = ours.init(params)
        checks = jgg.EXPORT_DISABLED_CHECKS
        exported = jax.export.export(
            jax.jit(ours.step), platforms=["cuda"], disabled_checks=checks
        )(params, params, state)
        assert exported.mlir_module().count("jax_grouped_gemm.adamw_quantized.v1") == 3
        _, new_state = jax.tree.unflatten(exported.out_tree, exported.out_avals)
        assert new_state.quantized["layer"].wo.values.dtype == jnp.float8_e4m3fn

    def test_has_no_derivative(self, rng):
        ours = optim.adamw(1e-2)
        params = model(rng)
        state = ours.init(params)
        with pytest.raises(NotImplementedError, match="adamw_quantized has no derivative"):
            jax.grad(lambda p: ours.step(p, p, state)[0]["layer"]["wo"].sum())(params)

    def test_average_of_the_weights(self, rng):
        """An EMA averages the parameters, and `quantize` makes its FP8 weights when needed."""
        ours = optim.adamw(1e-2)
        params = model(rng)
        state, average, step = ours.init(params), params, jax.jit(ours.step)
        for _ in range(2):
            params, state = step(params, like(rng, params), state)
            average = optax.incremental_update(params, average, 0.1)
        assert_bits(state._replace(quantized=ours.quantize(average)), average)
        assert_bits(state, params)


def tokens(rng):
    x = jnp.asarray(rng.standard_normal((40, D)), jnp.bfloat16)
    return x, moe.route(jnp.asarray(rng.standard_normal((40, E)), jnp.float32), 2)


def loss_of(params, quantized, x, routing, remat=False):
    def layer(x, experts):
        half = (experts[name].astype(jnp.bfloat16) for name in ("wi_0", "wi_1", "wo"))
        return moe.dropless_mlp(x, routing, *half, recipe=RECIPE, quantized=quantized)

    layer = jax.checkpoint(layer) if remat else layer
    return jnp.mean(layer(x, params["layer"]).astype(jnp.float32) ** 2)


class TestTraining:
    @pytest.mark.parametrize("remat", [False, True])
    def test_losses_are_those_of_weights_quantised_apart(self, remat, rng):
        """Losses of two microbatches a step have the bits of weights quantised before each step."""
        ours = optim.adamw(1e-2)
        params = model(rng)
        batches = jax.tree.map(lambda *x: np.stack(x), *(tokens(rng) for _ in range(2)))

        @partial(jax.jit, static_argnums=2)
        def step(params, state, apart):
            quantized = quantized_of(params) if apart else state.quantized["layer"]
            loss_and_gradients = jax.value_and_grad(partial(loss_of, remat=remat))
            computed = ours.compute_params(params)

            def add(total, batch):
                loss, gradients = loss_and_gradients(computed, quantized, *batch)
                return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradients), loss

            total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
            params, state = ours.step(params, total, state, factor=0.5)
            return params, state, losses

        runs = {}
        for apart in (False, True):
            p, state, losses = params, ours.init(params), []
            for _ in range(3):
                p, state, loss = step(p, state, apart)
                losses.append(np.asarray(loss))
            runs[apart] = np.stack(losses)
        np.testing.assert_array_equal(runs[False], runs[True])
        assert runs[False][-1].mean() < runs[False][0].mean()

    def test_gradients_in_16_bits(self, rng):
        ours = optim.adamw(1e-2)
        params = model(rng)
        state = ours.init(params)
        x, routing = tokens(rng)
        gradients = jax.eval_shape(
            jax.grad(loss_of), ours.compute_params(params), state.quantized["layer"], x, routing
        )
        assert {g.dtype for g in gradients["layer"].values()} == {np.dtype(jnp.bfloat16)}
        assert gradients["dense"].dtype == np.float32


SPLITS = {
    "experts": ((8,), D, F, dict(wi=("d",), wo=("d",))),
    "experts of layers": ((2, 8), 128, 128, dict(wi=(None, "d"), wo=(None, "d"))),
    "fsdp": ((E,), 1024, 128, dict(wi=(None, "d"), wo=(None, None, "d"))),
}


OURS = optim.adamw(1e-2)
step_on_one_device = jax.jit(
    lambda params, gradients: OURS.step(params, gradients, OURS.init(params))
)


class TestSharded:
    @pytest.mark.parametrize(
        "split, kind",
        [("experts", KINDS[0]), *((s, k) for s in list(SPLITS)[1:] for k in KINDS)],
        ids=str,
    )
    def test_what_is_split_stays_split(self, split, kind, rng):
        """Nothing travels, and every array of the state is split like its parameter."""
        leading, d, f, specs = SPLITS[split]
        whole = model(rng, leading, d, f)
        gradients = like(rng, whole)
        want, _ = step_on_one_device(whole, gradients)
        mesh = mesh_of(EIGHT, kind)

        def put(tree):
            def of(path, x):
                name = str(path[-1].key)[:2]
                spec = jax.sharding.PartitionSpec(*specs.get(name, ()))
                return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

            return jax.tree_util.tree_map_with_path(of, tree)

        with entered(mesh):
            params, gradients = put(whole), put(gradients)
            init = jax.jit(OURS.init).lower(params).compile()
            state = init(params)
            step = jax.jit(OURS.step).lower(params, gradients, state).compile()
            assert collectives(init) == collectives(step) == []
            params, state = step(params, gradients, state)
        split_leaves = params["layer"], state.inner.mu["layer"], state.quantized
        for x in jax.tree.leaves(split_leaves):
            assert x.addressable_shards[0].data.size * 8 == x.size, (x.shape, x.sharding)
        close(jax.tree.map(np.asarray, params), want)
        masters, fetched = jax.tree.map(np.asarray, (params, state.quantized))
        assert_bits(state._replace(quantized=fetched), masters)

    def test_parts_of_blocks_are_gathered(self, rng):
        """A split that cuts blocks gives right results, and `explain` says what is gathered."""
        params = model(rng, d=256, f=128)
        gradients = like(rng, params)
        want, _ = step_on_one_device(params, gradients)
        mesh = mesh_of(EIGHT)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
        params["layer"]["wi_0"] = jax.device_put(params["layer"]["wi_0"], rows)
        state = OURS.init(params)
        got, state = jax.jit(OURS.step)(params, gradients, state)
        close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want))
        transfers = jgg.explain(OURS.step, params, gradients, state).transfers
        assert any("whole blocks of 128 x 128" in str(t) for t in transfers)
