"""Optimisers that write FP8 weights: steps equal Optax's, and FP8 bits equal `quantize_mlp`'s."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import optim
from tests.support import optimizer as oracle
from tests.support.optimizer_model import (
    assert_bits,
    close,
    copied,
    like,
    model,
    stepped,
)

SCHEDULE = optax.cosine_decay_schedule(1e-2, 7)
MASK = dict(layer=dict(wi_0=True, wi_1=False, wo=True), dense=False, bias=True)


class TestAdamW:
    @pytest.mark.parametrize(
        "options",
        [
            dict(learning_rate=1e-2),
            dict(learning_rate=SCHEDULE, weight_decay=0.1, mask=MASK),
            dict(learning_rate=1e-2, nesterov=True, eps_root=1e-6, b1=0.8, b2=0.95),
            dict(
                learning_rate=1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
            ),
        ],
        ids=["default", "schedule and mask", "nesterov", "mask of a function"],
    )
    def test_numbers_of_optax(self, options, rng):
        ours, theirs = optim.adamw(**options), optax.adamw(**options)
        params = model(rng)
        expected, inner = copied(params), theirs.init(params)
        state, step = ours.init(params), stepped(ours)
        update = jax.jit(theirs.update)
        for number in range(5):
            gradients = like(rng, expected)
            params, state = step(params, gradients, state)
            updates, inner = update(gradients, inner, expected)
            expected = optax.apply_updates(expected, updates)
            close(params, expected, number + 1)
            close(state.inner.mu, inner[0].mu, number + 1, rate=1)
            close(state.inner.nu, inner[0].nu, number + 1, rate=1)
            assert int(state.inner.count) == number + 1
            assert_bits(state, params)

    @pytest.mark.parametrize("nesterov", [False, True])
    def test_promotion_may_be_an_error(self, nesterov, rng):
        ours = optim.adamw(1e-2, nesterov=nesterov)
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            jax.eval_shape(lambda p: ours.step(p, p, ours.init(p)), model(rng))

    def test_moments_in_16_bits(self, rng):
        ours, theirs = (f(1e-2, mu_dtype=jnp.bfloat16) for f in (optim.adamw, optax.adamw))
        params = model(rng)
        state, inner = ours.init(params), theirs.init(params)
        gradients = like(rng, params)
        new, state = ours.step(params, gradients, state)
        updates, inner = theirs.update(gradients, inner, params)
        close(new, optax.apply_updates(params, updates))
        jax.tree.map(oracle.assert_same_bits, state.inner.mu, inner[0].mu)
        state = optim.adamw(1e-2, nu_dtype=jnp.bfloat16).init(params)
        assert state.inner.nu["layer"]["wo"].dtype == jnp.bfloat16

    def test_parameters_in_16_bits(self, rng):
        """The state has the float32 weights, and the parameters are 16-bit copies of them."""
        ours, theirs = optim.adamw(1e-3), optax.adamw(1e-3)
        params = model(rng, dtype=jnp.bfloat16)
        masters = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        state, inner, step = ours.init(params), theirs.init(masters), stepped(ours)
        for number in range(4):
            gradients = like(rng, params)
            params, state = step(params, gradients, state)
            wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            updates, inner = theirs.update(wide, inner, masters)
            masters = optax.apply_updates(masters, updates)
            close(state.master, masters, number + 1)
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.master)
            jax.tree.map(oracle.assert_same_bits, params, half)
            assert_bits(state, state.master)

    def test_clipping_and_factor(self, rng):
        ours = optim.adamw(1e-2, max_norm=0.5)
        theirs = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
        params = model(rng)
        for scale in (1e-4, 1.0):
            gradients = jax.tree.map(lambda g: g * scale, like(rng, params))  # noqa: B023
            new, _ = jax.jit(ours.step)(params, gradients, ours.init(params), factor=0.25)
            quarter = jax.tree.map(lambda g: g * 0.25, gradients)
            updates, _ = theirs.update(quarter, theirs.init(params), params)
            close(new, optax.apply_updates(params, updates))

    def test_skipped(self, rng):
        ours = optim.adamw(1e-2, skip_nonfinite=True)
        params = model(rng)
        state, step = ours.init(params), jax.jit(ours.step)
        before = params, state
        for value, place in ((np.nan, "bias"), (np.inf, "dense")):
            gradients = like(rng, params)
            gradients[place] = gradients[place].at[2].set(value)
            jax.tree.map(oracle.assert_same_bits, step(params, gradients, state), before)
        jax.tree.map(
            oracle.assert_same_bits, step(params, params, state, applies=jnp.array(False)), before
        )
        params, state = step(params, like(rng, params), state)
        assert int(state.inner.count) == 1 and np.isfinite(params["layer"]["wo"]).all()

    def test_traced_numbers(self, rng):
        """Hyperparameters may be arguments of a compiled function."""
        params = model(rng)
        gradients = like(rng, params)
        state = optim.adamw(0.0).init(params)

        @jax.jit
        def step(rate, b1, decay):
            optimizer = optim.adamw(rate, b1, weight_decay=decay)
            return optimizer.step(params, gradients, state)[0]

        theirs = optax.adamw(3e-3, 0.85, weight_decay=0.2)
        updates, _ = theirs.update(gradients, theirs.init(params), params)
        close(step(3e-3, 0.85, 0.2), optax.apply_updates(params, updates))

    def test_gradients_in_float16(self, rng):
        params = model(rng)
        ours = optim.adamw(1e-2)
        gradients = like(rng, params, jnp.float16)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        one, other = (ours.step(params, g, ours.init(params))[0] for g in (gradients, wide))
        jax.tree.map(oracle.assert_same_bits, one, other)


class TestQuantized:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
            lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
            lambda: optax.MultiSteps(optax.adamw(1e-2), 3),
            lambda: optim.muon(1e-2),
            lambda: optax.apply_if_finite(optax.sgd(1e-2, momentum=0.9), 3),
        ],
        ids=["lion", "inject_hyperparams", "MultiSteps", "muon", "apply_if_finite"],
    )
    def test_any_transformation(self, make, rng):
        transformation = make()
        ours = optim.quantized(transformation)
        params = model(rng)
        expected, inner = copied(params), transformation.init(params)
        state, step = ours.init(params), stepped(ours)
        update = jax.jit(transformation.update)
        for number in range(4):
            gradients = like(rng, expected)
            if number == 2:
                gradients["bias"] = gradients["bias"].at[0].set(jnp.nan)
                if not hasattr(inner, "notfinite_count"):
                    gradients["bias"] = jnp.zeros_like(gradients["bias"])
            params, state = step(params, gradients, state)
            updates, inner = update(gradients, inner, expected)
            expected = optax.apply_updates(expected, updates)
            close(params, expected, 4 * (number + 1))
            assert_bits(state, params)

    def test_skipped(self, rng):
        ours = optim.quantized(optax.adam(1e-2), skip_nonfinite=True)
        params = model(rng)
        state = ours.init(params)
        gradients = like(rng, params)
        gradients["bias"] = gradients["bias"].at[2].set(np.inf)
        got = jax.jit(ours.step)(params, gradients, state)
        jax.tree.map(oracle.assert_same_bits, got, (params, state))


class TestErrors:
    def test_recipe(self):
        with pytest.raises(ValueError, match="forward='fp8'"):
            optim.adamw(1e-3, recipe=jgg.Recipe(dgrad="bf16"))
        with pytest.raises(TypeError, match="recipe must be"):
            optim.adamw(1e-3, recipe="fp8")

    def test_dtypes_and_options(self):
        with pytest.raises(TypeError, match="mu_dtype must be float32 or bfloat16, got float16"):
            optim.adamw(1e-3, mu_dtype=jnp.float16)
        with pytest.raises(TypeError, match="nesterov must be True or False"):
            optim.adamw(1e-3, nesterov=1)
        with pytest.raises(TypeError, match="select must be callable"):
            optim.adamw(1e-3, select="wo")
        with pytest.raises(TypeError, match="must have init and update"):
            optim.quantized(1e-3)
        with pytest.raises(ValueError, match="implementation must be one of"):
            optim.quantized(optax.sgd(1.0), implementation="cpu")

    def test_leaves(self):
        everything = optim.adamw(1e-3, select=lambda path, leaf: True)
        with pytest.raises(TypeError, match=r"\[..., k, n\], got layer/bias of shape \(3,\)"):
            everything.init(dict(layer=dict(bias=jnp.ones(3))))
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16, got w of dtype"):
            everything.init(dict(w=jnp.ones((3, 4), jnp.float8_e4m3fn)))

    def test_gradients(self, rng):
        ours = optim.adamw(1e-3)
        params = model(rng)
        state = ours.init(params)
        with pytest.raises(TypeError, match=r"of the shape of its parameter, \(9,\), got float32"):
            ours.step(params, params | dict(bias=jnp.ones(8)), state)

    def test_state_without_quantised_weights(self, rng):
        ours = optim.adamw(1e-3)
        params = model(rng)
        state = ours.init(params)._replace(quantized=None)
        with pytest.raises(ValueError, match=r"no weights for layer; make them with state\._repl"):
            ours.step(params, params, state)


class TestLeaves:
    def test_single_leaves(self, rng):
        """Leaves that are not named like an MLP's matrices are quantised one by one."""
        params = [jnp.asarray(rng.standard_normal((2, 130, 60)), jnp.float32), jnp.ones(3)]
        ours = optim.adamw(1e-2, select=lambda path, leaf: leaf.ndim > 1)
        (new, _), state = jax.jit(ours.step)(params, params, ours.init(params))
        jax.tree.map(oracle.assert_same_bits, state.quantized[0], jgg.quantize_weights(new))
        alone = optim.adamw(1e-2, select=lambda path, leaf: True)
        new, state = alone.step(params[0], params[0], alone.init(params[0]))
        jax.tree.map(oracle.assert_same_bits, state.quantized, jgg.quantize_weights(new))

    def test_experts_without_a_gate(self, rng):
        experts = model(rng)["layer"]
        params = dict(a=dict(wi_0=experts["wi_0"], wo=experts["wo"]))
        ours = optim.adamw(1e-2)
        new, state = jax.jit(ours.step)(params, params, ours.init(params))
        want = jgg.quantize_mlp(new["a"]["wi_0"], None, new["a"]["wo"])
        jax.tree.map(oracle.assert_same_bits, state.quantized["a"], want)

    def test_other_recipes(self, rng):
        recipe = jgg.Recipe(forward_dtype=jnp.float8_e5m2, power_of_two_scales=True)
        ours = optim.adamw(1e-2, recipe=recipe)
        params = model(rng)
        new, state = ours.step(params, params, ours.init(params))
        want = jgg.quantize_mlp(*new["layer"].values(), recipe)
        jax.tree.map(oracle.assert_same_bits, state.quantized["layer"], want)


def test_checkpoints_without_the_quantised_weights(rng, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    ours = optim.adamw(1e-2)
    params = model(rng)
    params, state = jax.jit(ours.step)(params, like(rng, params), ours.init(params))
    saved = params, state._replace(quantized=None)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored, kept = checkpointer.restore(tmp_path / "state", saved)
    kept = kept._replace(quantized=ours.quantize(restored, kept))
    jax.tree.map(oracle.assert_same_bits, (restored, kept), (params, state))
