"""Optimisers that write FP8 weights: Optax's numbers, `quantize_mlp`'s bits, transformations."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe, optim
from tests.support import optimizer as oracle
from tests.support.partition import EIGHT, KINDS, collectives, entered, mesh_of

E, D, F = 3, 136, 72
RECIPE = jgg.Recipe()


def model(rng, leading=(E,), d=D, f=F, dtype=np.float32):
    """Experts, and parameters that are no experts."""

    def matrix(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    experts = dict(
        wi_0=matrix(*leading, d, f), wi_1=matrix(*leading, d, f), wo=matrix(*leading, f, d)
    )
    return dict(layer=experts, dense=matrix(5, 7), bias=matrix(9))


def like(rng, params, dtype=None):
    return jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), dtype or x.dtype), params
    )


def quantized_of(params):
    return jgg.quantize_mlp(*(params["layer"][name] for name in ("wi_0", "wi_1", "wo")), RECIPE)


def assert_bits(state, masters):
    """The FP8 weights of a state are those of the float32 weights."""
    jax.tree.map(oracle.assert_same_bits, state.quantized["layer"], quantized_of(masters))


def close(got, want, steps=1, rate=1e-2):
    """Each step rounds the weights, and a change of about the learning rate, to float32."""

    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = steps * oracle.HALF_ULP * (4 * np.abs(b) + 64 * rate)
        assert np.all(np.abs(a - b) <= bound), (np.abs(a - b) / bound).max()

    jax.tree.map(check, got, want)


def stepped(optimizer):
    """One step, in place: jit without a copy of what is donated."""
    return jax.jit(optimizer.step, donate_argnums=(0, 2))


def copied(tree):
    return jax.tree.map(jnp.copy, tree)


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
        """Float32 weights are in the state, and the parameters their copies."""
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


class TestTransformations:
    def test_scan_over_steps(self, rng):
        ours = optim.adamw(1e-2)
        params = model(rng)
        every = [like(rng, params) for _ in range(3)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *every)

        def body(carry, gradients):
            return ours.step(carry[0], gradients, carry[1]), None

        got, _ = jax.jit(lambda *x: jax.lax.scan(body, x, stacked))(params, ours.init(params))
        step, want = jax.jit(ours.step), (params, ours.init(params))
        for gradients in every:
            want = step(want[0], gradients, want[1])
        close(got[0], want[0], 3)
        assert_bits(got[1], got[0])

    def test_stacked_layers(self, rng):
        """Parameters [layers, experts, ...], as under `nn.scan`."""
        ours = optim.adamw(1e-2)
        params = model(rng, leading=(2, E))
        gradients = like(rng, params)
        new, state = jax.jit(ours.step)(params, gradients, ours.init(params))
        assert state.quantized["layer"].wo.values.shape == (2, E, F, D)
        assert_bits(state, new)

    @pytest.mark.parametrize("in_axes", [(0, 0, None), (None, 0, 0)])
    def test_vmap(self, in_axes, rng):
        """Over runs with gradients of their own, and over learning rates."""
        params = model(rng)
        state = optim.adamw(0.0).init(params)
        rates = jnp.array([1e-3, 1e-2])
        gradients = jax.tree.map(lambda *x: jnp.stack(x), like(rng, params), like(rng, params))
        both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)

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
            mine = jax.tree.map(lambda x: x[i], got)  # noqa: B023
            close(mine[0], jax.jit(step)(*of_run)[0])
            assert_bits(mine[1], mine[0])

    def test_exported_for_a_gpu(self, rng):
        """The calls are among those that `EXPORT_DISABLED_CHECKS` allows."""
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
        """An EMA is of the parameters, and its FP8 weights are made when they are wanted."""
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
        """Bit for bit, with microbatches that are added up, one after the other."""
        ours = optim.adamw(1e-2)
        params = model(rng)
        batches = [tokens(rng) for _ in range(2)]

        @partial(jax.jit, static_argnums=2)
        def step(params, state, apart):
            quantized = quantized_of(params) if apart else state.quantized["layer"]
            losses, total = [], jax.tree.map(jnp.zeros_like, params)
            for batch in batches:
                of = partial(loss_of, quantized=quantized, remat=remat)
                loss, gradients = jax.value_and_grad(
                    lambda p, of=of, batch=batch: of(p, x=batch[0], routing=batch[1])
                )(ours.compute_params(params))
                losses.append(loss)
                total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradients)
            params, state = ours.step(params, total, state, factor=0.5)
            return params, state, jnp.stack(losses)

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
        gradients = jax.grad(loss_of)(
            ours.compute_params(params), state.quantized["layer"], x, routing
        )
        assert {g.dtype for g in gradients["layer"].values()} == {np.dtype(jnp.bfloat16)}
        assert gradients["dense"].dtype == np.float32


SPLITS = {
    "experts": ((8,), D, F, dict(wi=("d",), wo=("d",))),
    "experts of layers": ((2, 8), 128, 128, dict(wi=(None, "d"), wo=(None, "d"))),
    "fsdp": ((E,), 1024, 128, dict(wi=(None, "d"), wo=(None, None, "d"))),
}


class TestSharded:
    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize("split", SPLITS)
    def test_what_is_split_stays_split(self, split, kind, rng):
        """Nothing travels, and every array of the state is split as its parameter is."""
        leading, d, f, specs = SPLITS[split]
        ours = optim.adamw(1e-2)
        whole = model(rng, leading, d, f)
        gradients = like(rng, whole)
        want, _ = ours.step(whole, gradients, ours.init(whole))
        mesh = mesh_of(EIGHT, kind)

        def put(tree):
            def of(path, x):
                name = str(path[-1].key)[:2]
                spec = jax.sharding.PartitionSpec(*specs.get(name, ()))
                return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

            return jax.tree_util.tree_map_with_path(of, tree)

        with entered(mesh):
            params, gradients = put(whole), put(gradients)
            init, step = jax.jit(ours.init), jax.jit(ours.step)
            assert collectives(init.lower(params).compile()) == []
            state = init(params)
            assert collectives(step.lower(params, gradients, state).compile()) == []
            params, state = step(params, gradients, state)
        split_leaves = params["layer"], state.inner.mu["layer"], state.quantized
        for x in jax.tree.leaves(split_leaves):
            assert x.addressable_shards[0].data.size * 8 == x.size, (x.shape, x.sharding)
        close(jax.tree.map(np.asarray, params), want)
        masters = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)
        fetched = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), state.quantized)
        assert_bits(state._replace(quantized=fetched), masters)

    def test_parts_of_blocks_are_gathered(self, rng):
        """Right, and `explain` says so."""
        ours = optim.adamw(1e-2)
        params = model(rng, d=256, f=128)
        gradients = like(rng, params)
        want, _ = ours.step(params, gradients, ours.init(params))
        mesh = mesh_of(EIGHT)
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
        params["layer"]["wi_0"] = jax.device_put(params["layer"]["wi_0"], rows)
        state = ours.init(params)
        got, state = jax.jit(ours.step)(params, gradients, state)
        close(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, want))
        transfers = jgg.explain(ours.step, params, gradients, state).transfers
        assert any("whole blocks of 128 x 128" in str(t) for t in transfers)


class TestErrors:
    def test_recipe(self):
        with pytest.raises(ValueError, match="scaling='blockwise'"):
            optim.adamw(1e-3, recipe=jgg.Recipe(scaling="rowwise"))
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
            optim.quantized(optax.sgd(1.0), implementation="xla")

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


class TestLeaves:
    def test_single_leaves(self, rng):
        """Leaves without the names of an MLP are quantised one by one, wherever they are."""
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
