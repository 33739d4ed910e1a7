"""Muon takes the dimension numbers, options and checkpoints of Optax's Muon."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm.optim import (
    MuonDimensionNumbers,
    MuonState,
    load_muon_state,
    muon,
    scale_by_muon,
)

optax = pytest.importorskip("optax")

SHAPES = {
    "matrix": (12, 40),
    "attention": {"query": (16, 4, 8), "out": (4, 8, 16)},
    "experts": (3, 8, 24),
    "bias": (7,),
}
NUMBERS = {
    "matrix": optax.contrib.MuonDimensionNumbers(),
    "attention": {
        "query": optax.contrib.MuonDimensionNumbers(0, (1, 2)),
        "out": MuonDimensionNumbers((0, -2), -1),
    },
    "experts": optax.contrib.MuonDimensionNumbers(1, 2),
    "bias": None,
}


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)


def draw(rng, shapes=SHAPES):
    def one(shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    return jax.tree.map(one, shapes, is_leaf=is_shape)


def theirs(numbers):
    """Converts dimension numbers to Optax's type."""
    return jax.tree.map(
        lambda x: x and optax.contrib.MuonDimensionNumbers(x.reduction_axis, x.output_axis),
        numbers,
        is_leaf=lambda x: x is None or hasattr(x, "reduction_axis"),
    )


def assert_trees_close(a, b, tolerance=1e-5):
    """Asserts that leaves differ by at most `tolerance` times the largest element of the leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(initial=0))


def run(optimizer, params, gradients, state=None):
    """Returns the updates of each step, and the last state."""
    state = optimizer.init(params) if state is None else state
    updates = []
    for gradient in gradients:
        with jax.default_matmul_precision("highest"):
            step, state = jax.jit(optimizer.update)(gradient, state, params)
        updates.append(step)
    return updates, state


class TestAgainstOptax:
    @pytest.mark.parametrize("form", ["tree", "function", "prefix"])
    def test_dimension_numbers(self, form, rng):
        params, gradients = draw(rng), [draw(rng) for _ in range(3)]
        numbers = NUMBERS
        if form == "prefix":
            numbers = {**NUMBERS, "attention": optax.contrib.MuonDimensionNumbers(0, (1, 2))}
        given, other = numbers, theirs(numbers)
        if form == "function":
            given, other = (lambda _: numbers), (lambda _: theirs(numbers))
        options = dict(weight_decay=0.1, consistent_rms=0.2)
        ours = muon(0.3, muon_weight_dimension_numbers=given, dtype=jnp.float32, **options)
        reference = optax.contrib.muon(0.3, muon_weight_dimension_numbers=other, **options)
        (updates, state), (expected, expected_state) = (
            run(optimizer, params, gradients) for optimizer in (ours, reference)
        )
        assert_trees_close(updates, expected)
        assert_trees_close(state, expected_state)

    @pytest.mark.parametrize(
        "options",
        [
            dict(adaptive=True),
            dict(preconditioning="schatten"),
            dict(ns_coeffs="dion"),
            dict(ns_coeffs="standard", ns_steps=3),
            dict(nesterov=False, mu_dtype=jnp.bfloat16),
        ],
        ids=str,
    )
    def test_options(self, options, rng):
        shapes = {"wide": (12, 40), "tall": (40, 12), "bias": (7,)}
        params, gradients = draw(rng, shapes), [draw(rng, shapes) for _ in range(3)]
        ours = muon(0.3, dtype=jnp.float32, **options)
        (updates, state), (expected, expected_state) = (
            run(optimizer, params, gradients)
            for optimizer in (ours, optax.contrib.muon(0.3, **options))
        )
        assert_trees_close(updates, expected, 1e-2 if "mu_dtype" in options else 1e-5)
        assert jax.tree.structure(state) == jax.tree.structure(expected_state)

    def test_scale_by_muon(self, rng):
        params, gradients = draw(rng, {"a": (8, 24), "b": (24, 8)}), []
        gradients = [draw(rng, {"a": (8, 24), "b": (24, 8)}) for _ in range(3)]
        numbers = optax.contrib.MuonDimensionNumbers()
        reference = optax.contrib.scale_by_muon(
            weight_dimension_numbers=dict.fromkeys("ab", numbers)
        )
        for given in (None, numbers, dict.fromkeys("ab", MuonDimensionNumbers())):
            ours = scale_by_muon(weight_dimension_numbers=given, dtype=jnp.float32)
            (updates, state), (expected, expected_state) = (
                run(optimizer, params, gradients) for optimizer in (ours, reference)
            )
            assert_trees_close(updates, expected)
            assert_trees_close(state, expected_state)


def as_dictionaries(state):
    """Returns the nested dictionaries that a checkpoint restores without a target."""
    if isinstance(state, dict):
        return {name: as_dictionaries(x) for name, x in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return {name: as_dictionaries(getattr(state, name)) for name in state._fields}
    if isinstance(state, tuple | list):
        return [as_dictionaries(x) for x in state]
    return state


class TestCheckpoints:
    @pytest.mark.parametrize("restored", ["state", "dictionaries"])
    def test_of_optax(self, restored, rng):
        """After two steps of Optax's Muon, a third step of our Muon equals Optax's third step."""
        params, gradients = draw(rng), [draw(rng) for _ in range(3)]
        schedule = optax.linear_schedule(0.3, 0.01, 5)
        options = dict(muon_weight_dimension_numbers=theirs(NUMBERS), adam_learning_rate=schedule)
        reference = optax.chain(optax.clip(1.0), optax.contrib.muon(schedule, **options))
        ours = optax.chain(optax.clip(1.0), muon(schedule, dtype=jnp.float32, **options))
        _, state = run(reference, params, gradients[:2])
        expected, _ = run(reference, params, gradients[2:], state)
        saved = state if restored == "state" else as_dictionaries(state)
        loaded = load_muon_state(ours.init(params), saved)
        assert jax.tree.structure(loaded) == jax.tree.structure(state)
        updates, _ = run(ours, params, gradients[2:], loaded)
        # With a schedule, XLA's unoptimised CPU programs of Optax are less exact.
        assert_trees_close(updates, expected, 5e-5)

    @pytest.mark.parametrize("restored", ["state", "dictionaries"])
    def test_of_version_0_1(self, restored, rng):
        """`load_muon_state` reads moments of Muon and Adam, and the count, from a state of 0.1."""
        shapes = {"matrix": (12, 40), "experts": (3, 8, 24), "bias": (7,)}
        params, gradients = draw(rng, shapes), [draw(rng, shapes) for _ in range(3)]
        optimizer = optax.chain(
            optax.clip(1.0), muon(optax.linear_schedule(0.3, 0.01, 5), dtype=jnp.float32)
        )
        _, state = run(optimizer, params, gradients[:2])
        expected, _ = run(optimizer, params, gradients[2:], state)

        matrices, others = (state[1].inner_states[kind].inner_state[0] for kind in ("muon", "adam"))
        old = MuonState(
            count=matrices.count,
            mu={**matrices.mu, "bias": others.mu["bias"]},
            nu={"matrix": None, "experts": None, "bias": others.nu["bias"]},
        )
        saved = (state[0], old if restored == "state" else as_dictionaries(old))
        loaded = load_muon_state(optimizer.init(params), saved)
        updates, _ = run(optimizer, params, gradients[2:], loaded)
        assert_trees_close(updates, expected, 1e-6)

    def test_an_old_state_is_named(self, rng):
        params = draw(rng, {"matrix": (12, 40)})
        old = MuonState(jnp.int32(1), params, {"matrix": None})
        with pytest.raises(TypeError, match="load_muon_state"):
            muon(0.1).update(params, old, params)

    def test_what_does_not_fit(self, rng):
        params = draw(rng, {"matrix": (12, 40)})
        state = muon(0.1).init(params)
        with pytest.raises(ValueError, match="the checkpoint has no .*mu.matrix"):
            load_muon_state(state, muon(0.1).init({"other": params["matrix"]}))
        with pytest.raises(ValueError, match=r"mu.matrix has shape \(12, 40\), but \(40, 12\)"):
            load_muon_state(state, muon(0.1).init({"matrix": params["matrix"].T}))


class Model(NamedTuple):
    embedding: jax.Array
    layers: jax.Array


def test_a_tree_of_named_tuples(rng):
    params = Model(*draw(rng, {"a": (30, 8), "b": (2, 8, 24)}).values())
    numbers = Model(None, MuonDimensionNumbers())
    optimizer = muon(0.1, muon_weight_dimension_numbers=numbers)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert isinstance(updates, Model)
    assert isinstance(state.inner_states["muon"].inner_state[0].mu.embedding, optax.MaskedNode)


class TestErrors:
    @pytest.mark.parametrize("name", ["spectral", "aol", "other"])
    def test_preconditioning(self, name):
        with pytest.raises(ValueError, match=f"preconditioning must be one of.*{name}"):
            muon(0.1, preconditioning=name)

    def test_leaves_that_are_no_matrices(self, rng):
        params = draw(rng, {"a": (8, 24), "bias": (7,)})
        with pytest.raises(ValueError, match=r"\['bias'\] of shape \(7,\) is no matrix"):
            scale_by_muon().init(params)

    @pytest.mark.parametrize(
        "numbers, message",
        [((0, 2), "axes that a leaf of 2 dimensions lacks"), ((0, -2), "twice")],
    )
    def test_numbers_that_do_not_fit(self, numbers, message, rng):
        params = draw(rng, {"a": (8, 24)})
        with pytest.raises(ValueError, match=message):
            muon(0.1, muon_weight_dimension_numbers=MuonDimensionNumbers(*numbers)).init(params)

    def test_methods_are_checked_at_once(self):
        with pytest.raises(ValueError, match="restarts"):
            muon(0.1, method="gram", restarts=(9,))
        with pytest.raises(TypeError, match="adaptive"):
            muon(0.1, adaptive=1)
