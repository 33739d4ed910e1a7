"""Muon: its grouped orthogonalisation against NumPy in float64, and its steps against Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm.optim import COEFFICIENTS, muon, orthogonalize, scale_by_muon
from tests.support import muon_training

SHAPES = [(24, 40), (40, 24), (3, 16, 16), (2, 2, 8, 32), (1, 5)]


def plain(x, steps=5):
    """Returns Newton-Schulz of one matrix in float64."""
    a, b, c = COEFFICIENTS
    x = np.asarray(x, np.float64)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def spread(rng, shape):
    """Returns matrices with singular values of 0.05 to 1. Random matrices may have some near 0."""
    u, _, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return ((u * np.geomspace(1, 0.05, u.shape[-1])) @ vt).astype(np.float32)


def test_equals_the_plain_version(rng):
    matrices = [rng.standard_normal(shape, np.float32) for shape in SHAPES]
    outs = jax.jit(lambda m: orthogonalize(m, dtype=jnp.float32))(matrices)
    for out, x in zip(outs, matrices, strict=True):
        assert out.dtype == x.dtype and out.shape == x.shape
        for one, matrix in zip(
            np.asarray(out).reshape(-1, *x.shape[-2:]), x.reshape(-1, *x.shape[-2:]), strict=True
        ):
            np.testing.assert_allclose(one, plain(matrix), atol=1e-4)


def test_singular_values_are_near_one(rng):
    for out in jax.jit(orthogonalize)([spread(rng, shape) for shape in SHAPES]):
        values = np.linalg.svd(np.asarray(out, np.float64), compute_uv=False)
        assert 0.6 < values.min() and values.max() < 1.3


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("method", ["standard", "auto"])
def test_tiny_matrices(method, dtype, rng):
    """Tiny matrices, such as gradients of experts that long had no tokens, give finite results."""
    x = jnp.asarray(rng.standard_normal((3, 16, 40)), jnp.float32)
    scales = [1.0, 1e-12, 1e-18, 1e-20, 1e-25, 1e-33]
    xs = [x * scale for scale in scales]
    for scale, out in zip(
        scales, orthogonalize(xs, eps=0, dtype=dtype, method=method), strict=True
    ):
        want = orthogonalize([x], eps=0, dtype=dtype, method=method)[0]
        np.testing.assert_allclose(out, want, atol=0.03, err_msg=str(scale))
    for scale in (*scales[2:], 1e-38, 1e-42, 0.0):
        (out,) = orthogonalize([x.at[1].multiply(scale)], dtype=dtype, method=method)
        assert jnp.isfinite(out).all()
        assert jnp.abs(out[1]).max() < 1e-5


class TestOrthogonalizeArguments:
    def test_nothing(self):
        assert orthogonalize([]) == []

    def test_any_iterable(self, rng):
        xs = [rng.standard_normal(shape, np.float32) for shape in SHAPES]
        for one, other in zip(orthogonalize(xs), orthogonalize(x for x in xs), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_matrices_without_elements(self, rng):
        x = rng.standard_normal((4, 6), np.float32)
        empty = [jnp.ones(shape) for shape in ((0, 4), (4, 0), (0, 3, 3))]
        outs = orthogonalize([empty[0], x, *empty[1:]])
        assert [out.shape for out in outs] == [(0, 4), (4, 6), (4, 0), (0, 3, 3)]
        np.testing.assert_array_equal(outs[1], orthogonalize([x])[0])
        assert [out.shape for out in orthogonalize(empty)] == [x.shape for x in empty]

    def test_steps_may_be_traced(self, rng):
        x = rng.standard_normal((8, 12), np.float32)
        traced = jax.jit(lambda steps: orthogonalize([x], steps=steps, dtype=jnp.float32))
        np.testing.assert_allclose(traced(3)[0], plain(x, steps=3), atol=1e-5)

    def test_coefficients_of_every_iteration(self, rng):
        """A list has one triple for each step, and its length replaces `steps`."""
        x = [rng.standard_normal((8, 12), np.float32)]
        (once,) = orthogonalize(x, steps=1, dtype=jnp.float32)
        (twice,) = orthogonalize(x, coefficients=[COEFFICIENTS] * 2, steps=7, dtype=jnp.float32)
        np.testing.assert_allclose(twice, plain(x[0], steps=2), atol=1e-5)
        assert np.abs(once - twice).max() > 1e-2

    def test_eps(self, rng):
        x = rng.standard_normal((8, 12)).astype(np.float32)
        (small,) = orthogonalize([1e-9 * x], eps=1.0, steps=1, dtype=jnp.float32)
        a = COEFFICIENTS[0]
        np.testing.assert_allclose(small, a * 1e-9 * x, rtol=1e-4)

    def test_rank_promotion_may_be_an_error(self, rng):
        xs = [rng.standard_normal(shape, np.float32) for shape in SHAPES]
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            jax.eval_shape(orthogonalize, xs)

    @pytest.mark.parametrize(
        "matrices, message",
        [
            (np.ones((3, 4), np.float32), r"matrices must be a sequence.*\(3, 4\)"),
            (3, "matrices must be a sequence.*int"),
            ([[[1.0]]], r"matrices\[0\] must be a JAX or NumPy array, got list"),
            ([np.ones((2, 2)), np.arange(12).reshape(3, 4)], r"matrices\[1\].*int32.*\(3, 4\)"),
            ([np.ones((3, 4), np.complex64)], r"matrices\[0\].*complex64"),
            ([np.ones(4)], r"matrices\[0\].*\(4,\)"),
        ],
        ids=["array", "number", "lists", "integers", "complex", "vector"],
    )
    def test_what_is_no_list_of_matrices(self, matrices, message):
        with pytest.raises(TypeError, match=message):
            orthogonalize(matrices)

    @pytest.mark.parametrize(
        "options, error, message",
        [
            (dict(steps=-1), ValueError, "steps.*-1"),
            (dict(steps=2.5), ValueError, "steps.*2.5"),
            (dict(coefficients=(1.0, 2.0)), ValueError, r"three.*\(1.0, 2.0\)"),
            (dict(coefficients="muon"), ValueError, "one of.*dion.*got 'muon'"),
            (dict(dtype=jnp.int8), TypeError, "dtype.*int8"),
        ],
    )
    def test_options(self, options, error, message, rng):
        with pytest.raises(error, match=message):
            orthogonalize([rng.standard_normal((3, 4))], **options)


def model(rng):
    """Returns weights and a loss: a two-layer network learns the outputs of another one."""

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-2] ** 0.5)

    def network(w, x):
        return jnp.tanh(x @ w["in"]) @ w["out"]

    target, weights = ({"in": draw(16, 32), "out": draw(32, 8)} for _ in range(2))
    x = jnp.asarray(rng.standard_normal((256, 16), np.float32))
    return weights, lambda w: jnp.mean((network(w, x) - network(target, x)) ** 2)


def train(optimizer, weights, loss, steps=60):
    @jax.jit
    def step(weights, state):
        updates, state = optimizer.update(jax.grad(loss)(weights), state, weights)
        return jax.tree.map(jnp.add, weights, updates), state

    state = optimizer.init(weights)
    for _ in range(steps):
        weights, state = step(weights, state)
    return loss(weights)


@pytest.mark.parametrize("nesterov", [False, True])
def test_trains(nesterov, rng):
    weights, loss = model(rng)
    assert train(muon(0.02, nesterov=nesterov), weights, loss) < 0.2 * loss(weights)


def test_200_steps_follow_optax():
    """Losses of 200 steps with float16 iterations stay near those of Optax in float32."""
    found = {
        name: np.asarray(muon_training.losses(optimizer, 7, experts=2, d=16, f=24))
        for name, optimizer in muon_training.optimizers().items()
    }
    assert found["optax"][-1] < 0.5 * found["optax"][0]
    np.testing.assert_allclose(found["ours"], found["optax"], rtol=0.005)


def test_in_an_optax_chain(rng):
    optax = pytest.importorskip("optax")
    weights, loss = model(rng)
    chain = optax.chain(optax.clip_by_global_norm(1.0), muon(1.0), optax.scale(0.02))
    assert train(chain, weights, loss) < 0.2 * loss(weights)
    mixed = optax.multi_transform(
        {"muon": muon(0.02), "adam": optax.adam(1e-2)}, {"in": "muon", "out": "adam"}
    )
    assert train(mixed, weights, loss) < 0.3 * loss(weights)


PARAMS = {
    "wide": (12, 48),
    "tall": (40, 8),
    "square": (16, 16),
    "bias": (7,),
    "scale": (),
}


def tree_like(rng, shapes=PARAMS, dtype=jnp.float32):
    return {name: jnp.asarray(rng.standard_normal(x), dtype) for name, x in shapes.items()}


def trajectories(rng, ours, theirs, shapes=PARAMS, steps=8):
    """Yields updates of two optimisers, from the same gradients but with separate parameters."""
    params = [tree_like(rng, shapes)] * 2
    states = [optimizer.init(params[0]) for optimizer in (ours, theirs)]
    step = [jax.jit(optimizer.update) for optimizer in (ours, theirs)]
    updates = [None, None]
    for _ in range(steps):
        gradients = tree_like(rng, shapes)
        for i in range(2):
            updates[i], states[i] = step[i](gradients, states[i], params[i])
            params[i] = jax.tree.map(jnp.add, params[i], updates[i])
        yield updates


class TestAgainstOptax:
    """Every step equals that of `optax.contrib.muon`, for all options that both have."""

    @pytest.mark.parametrize(
        "options",
        [
            dict(),
            dict(nesterov=False),
            dict(ns_steps=3, beta=0.8, eps=1e-3),
            dict(ns_coeffs=(2.0, -1.5, 0.5)),
            dict(weight_decay=0.1, adam_weight_decay=0.2),
            dict(weight_decay=0.1, weight_decay_mask=lambda p: {k: k != "tall" for k in p}),
            dict(consistent_rms=0.2),
            dict(adam_b1=0.7, adam_b2=0.9, adam_eps_root=1e-4, adam_learning_rate=0.5),
        ],
        ids=lambda options: "_".join(options) or "default",
    )
    @pytest.mark.parametrize("schedule", [False, True])
    def test_every_step(self, options, schedule, rng):
        optax = pytest.importorskip("optax")
        rate = optax.linear_schedule(0.3, 0.01, 6) if schedule else 0.3
        ours = muon(rate, dtype=jnp.float32, **options)
        theirs = optax.contrib.muon(rate, **options)
        for u, expected in trajectories(rng, ours, theirs):
            for name in PARAMS:
                np.testing.assert_allclose(
                    u[name], expected[name], rtol=2e-3, atol=1e-4, err_msg=name
                )

    def test_stacks_are_kernels_side_by_side(self, rng):
        """Each kernel of a stack gets the update that Optax gives it alone."""
        optax = pytest.importorskip("optax")
        stack = jnp.asarray(rng.standard_normal((3, 12, 40)), jnp.float32)
        ours = muon(0.1, dtype=jnp.float32)
        u, _ = ours.update(stack, ours.init(stack))
        theirs = optax.contrib.muon(0.1)
        for one, gradient in zip(u, stack, strict=True):
            expected, _ = theirs.update(gradient, theirs.init(gradient), gradient)
            np.testing.assert_allclose(one, expected, rtol=2e-3, atol=1e-5)

    def test_float16_iteration_is_near(self, rng):
        optax = pytest.importorskip("optax")
        for u, expected in trajectories(rng, muon(0.1), optax.contrib.muon(0.1)):
            for name in ("wide", "tall", "square"):
                a, b = np.ravel(u[name]), np.ravel(expected[name])
                assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b)
                assert 0.9 < np.linalg.norm(a) / np.linalg.norm(b) < 1.1


class TestState:
    @pytest.mark.parametrize("mu_dtype", [None, jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("gradient_dtype", [jnp.float32, jnp.bfloat16])
    def test_dtypes_never_change(self, mu_dtype, gradient_dtype, rng):
        """The state keeps its dtypes, so it can be the carry of a scan."""
        params = tree_like(rng, dtype=jnp.bfloat16)
        optimizer = muon(0.1, mu_dtype=mu_dtype, weight_decay=0.1)
        gradients = tree_like(rng, dtype=gradient_dtype)

        def step(state, _):
            updates, state = optimizer.update(gradients, state, params)
            return state, updates

        state, updates = jax.lax.scan(step, optimizer.init(params), length=2)
        matrices, others = (state.inner_states[kind].inner_state[0] for kind in ("muon", "adam"))
        for mu in (matrices.mu, others.mu):
            assert {x.dtype for x in jax.tree.leaves(mu)} == {jnp.dtype(mu_dtype or jnp.bfloat16)}
        assert {x.dtype for x in jax.tree.leaves(others.nu)} == {jnp.dtype(jnp.bfloat16)}
        expected = jnp.promote_types(gradient_dtype, mu_dtype or jnp.bfloat16)
        assert {x.dtype for x in jax.tree.leaves(updates)} == {expected}

    def test_half_precision_sums_in_float32(self, rng):
        """A gradient that is too small to change a bfloat16 mean still changes the update."""
        params = tree_like(rng, {"w": (8, 8)}, jnp.bfloat16)
        first, second = (tree_like(rng, {"w": (8, 8)}) for _ in range(2))
        optimizer = muon(1.0, mu_dtype=jnp.bfloat16, nesterov=False, dtype=jnp.float32)
        state = optimizer.update(first, optimizer.init(params))[1]
        with_second = optimizer.update({"w": 1e-3 * second["w"]}, state)[0]["w"]
        without = optimizer.update({"w": 0 * second["w"]}, state)[0]["w"]
        assert (np.asarray(with_second) != np.asarray(without)).mean() > 0.9

    def test_leaves_without_elements(self, rng):
        params = tree_like(rng, {"a": (0, 4), "b": (4, 0), "c": (4, 6), "d": (0,)})
        optimizer = muon(0.1)
        updates, state = optimizer.update(params, optimizer.init(params), params)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
        assert np.isfinite(updates["c"]).all()

    def test_no_leaves(self):
        optimizer = muon(0.1)
        updates, state = optimizer.update({}, optimizer.init({}))
        assert updates == {} and int(state.inner_states["muon"].inner_state[0].count) == 1


class TestArguments:
    def test_further_arguments_of_update(self, rng):
        params = tree_like(rng)
        optimizer = muon(0.1)
        more = dict(value=1.0, grad_fn=None)
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p, **more), params)

    def test_weight_decay_needs_parameters(self, rng):
        params = tree_like(rng)
        optimizer = muon(0.1, weight_decay=0.1)
        with pytest.raises(ValueError, match="params"):
            optimizer.update(params, optimizer.init(params))

    def test_options_are_checked_at_once(self):
        with pytest.raises(TypeError, match="nesterov"):
            muon(0.1, nesterov="no")
        with pytest.raises(ValueError, match="implementation"):
            muon(0.1, implementation="gpu")
        with pytest.raises(ValueError, match="three"):
            muon(0.1, ns_coeffs=(1.0,))

    def test_rank_promotion_may_be_an_error(self, rng):
        params = tree_like(rng)
        optimizer = muon(0.1, weight_decay=0.1)
        with jax.numpy_rank_promotion("raise"):
            jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)
        matrices = {name: params[name] for name in ("wide", "tall")}
        of_matrices = scale_by_muon()
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            jax.eval_shape(lambda m: of_matrices.update(m, of_matrices.init(m)), matrices)

    def test_learning_rate_may_be_traced(self, rng):
        params = tree_like(rng)

        def first_update(rate):
            optimizer = muon(rate, dtype=jnp.float32)
            return optimizer.update(params, optimizer.init(params))[0]["tall"]

        traced = jax.jit(first_update)(jnp.float32(0.25))
        np.testing.assert_allclose(traced, first_update(0.25), rtol=1e-3, atol=1e-5)

    def test_injected_hyperparameters(self, rng):
        optax = pytest.importorskip("optax")
        params = tree_like(rng)
        optimizer = optax.inject_hyperparams(muon)(learning_rate=optax.constant_schedule(0.5))
        updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
        expected, _ = muon(0.5).update(params, muon(0.5).init(params))
        np.testing.assert_allclose(updates["wide"], expected["wide"], atol=0.02)
