"""Routers of published models against NumPy, token by token, and the losses of a routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import moe

T, E = 40, 16


@pytest.fixture
def logits(rng):
    return rng.standard_normal((T, E)).astype(np.float32)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


SCORES = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
}


def token_by_token(
    logits, top_k, *, scoring, bias=None, groups=1, top_groups=1, renormalize=True, scale=1.0
):
    experts, weights = [], []
    for row in logits.astype(np.float64):
        score = SCORES[scoring](row)
        criterion = score if bias is None else score + bias
        members = np.arange(E).reshape(groups, -1)
        ordered = np.sort(criterion[members], axis=-1)
        best = ordered[:, -1] if bias is None else ordered[:, -2:].sum(-1)
        allowed = members[np.argsort(-best)[:top_groups]].reshape(-1)
        chosen = allowed[np.argsort(-criterion[allowed])][:top_k]
        weight = score[chosen] / (score[chosen].sum() if renormalize else 1) * scale
        experts.append(chosen)
        weights.append(weight)
    return np.array(experts), np.array(weights)


@pytest.mark.parametrize("scoring", SCORES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("groups, top_groups", [(1, 1), (4, 2), (8, 5)])
def test_equals_one_token_at_a_time(scoring, renormalize, biased, groups, top_groups, logits, rng):
    bias = 0.3 * rng.standard_normal(E).astype(np.float32) if biased else None
    limited = {} if groups == 1 else dict(num_groups=groups, top_groups=top_groups)
    routing = moe.route(
        jnp.asarray(logits), 4, renormalize=renormalize, scoring=scoring, correction_bias=bias,
        scale=2.5, **limited,
    )  # fmt: skip
    experts, weights = token_by_token(
        logits, 4, scoring=scoring, bias=bias, groups=groups, top_groups=top_groups,
        renormalize=renormalize, scale=2.5,
    )  # fmt: skip
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-4)


def test_any_scoring(logits):
    named = moe.route(jnp.asarray(logits), 3, scoring="sigmoid")
    given = moe.route(jnp.asarray(logits), 3, scoring=jax.nn.sigmoid)
    np.testing.assert_array_equal(named.experts, given.experts)
    np.testing.assert_allclose(named.weights, given.weights, rtol=1e-6)


def test_sure_experts_are_told_apart():
    """Sigmoids of large logits are all one in float32; the logits still order the experts."""
    routing = moe.route(jnp.array([[30.0, 50.0, 40.0]]), 2, scoring="sigmoid")
    np.testing.assert_array_equal(routing.experts, [[1, 2]])


def test_the_bias_chooses_and_does_not_weigh(logits):
    """The bias has a gradient of zero, and a uniform bias changes nothing."""

    def weights(logits, bias):
        return moe.route(logits, 4, scoring="sigmoid", correction_bias=bias).weights

    gradient = jax.grad(lambda bias: (weights(logits, bias) ** 2).sum())(jnp.zeros(E))
    np.testing.assert_array_equal(gradient, 0)
    np.testing.assert_array_equal(weights(logits, jnp.ones(E)), weights(logits, jnp.zeros(E)))
    favourite = moe.route(
        jnp.asarray(logits), 4, scoring="sigmoid", correction_bias=jnp.zeros(E).at[5].set(9)
    )
    assert (np.asarray(favourite.experts)[:, 0] == 5).all()


def test_rank_promotion_may_be_an_error(logits, rng):
    x = jnp.asarray(rng.standard_normal((T, 8)), jnp.float32)
    wi, wo = jnp.ones((E, 8, 4)), jnp.ones((E, 4, 8))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):

        def loss(x, wi, wo, logits):
            routing = moe.route(logits, 4, correction_bias=jnp.ones(E), num_groups=4, top_groups=2)
            biases = (jnp.ones((E, 4)), None, jnp.ones((E, 8)))
            y = moe.dropless_mlp(x, routing, wi, wi, wo, biases=biases)
            return y.sum(), moe.auxiliary_losses(routing)

        # Ranks and dtypes are checked while operations are traced, and implementations of
        # primitives are traced while a program is lowered. Nothing is computed.
        gradients = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
        jax.jit(gradients).lower(x, wi, wo, jnp.asarray(logits))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(top_k=2.0), TypeError, "top_k.*integer.*2.0"),
        (dict(top_k=True), TypeError, "top_k.*integer.*True"),
        (dict(renormalize="no"), TypeError, "renormalize.*'no'"),
        (dict(scoring="softplus"), ValueError, "scoring.*'sigmoid'.*'softplus'"),
        (dict(correction_bias=np.ones(3)), TypeError, r"correction_bias.*\(16,\).*\(3,\)"),
        (dict(correction_bias=np.ones(E, int)), TypeError, "correction_bias.*int32"),
        (dict(num_groups=3, top_groups=1), ValueError, "num_groups.*16.*3"),
        (dict(num_groups=4, top_groups=5), ValueError, "top_groups.*4.*5"),
        (dict(num_groups=8, top_groups=1), ValueError, "top_groups.*top_k = 4.*1"),
        (dict(num_groups=4), TypeError, "top_groups.*integer.*None"),
        (dict(top_groups=4), TypeError, "num_groups.*integer.*None"),
    ],
)
def test_bad_options(options, error, message, logits):
    with pytest.raises(error, match=message):
        moe.route(jnp.asarray(logits), **(dict(top_k=4) | options))


@pytest.mark.parametrize("logits", [[[1.0, 2.0]], 3.0, None, np.float32(3)])
def test_logits_are_an_array(logits):
    with pytest.raises(TypeError, match="logits must be"):
        moe.route(logits, 1)


class TestLosses:
    def test_share_of_tokens_is_top_k_times_as_much(self, logits):
        """With `share_of="tokens"`, shares sum to top_k, as in the models of Hugging Face."""
        routing = moe.route(jnp.asarray(logits), 4)
        one_hot = np.eye(E)[np.asarray(routing.experts)]  # [T, k, E]
        tokens_per_expert = one_hot.mean(axis=0)  # [k, E]
        theirs = (tokens_per_expert * softmax(logits).mean(axis=0)).sum() * E
        loss = moe.load_balancing_loss(routing, share_of="tokens")
        np.testing.assert_allclose(loss, theirs, rtol=1e-5)
        np.testing.assert_allclose(loss, 4 * moe.load_balancing_loss(routing), rtol=1e-6)
        both = moe.auxiliary_losses(routing, share_of="tokens")
        np.testing.assert_array_equal(both.load_balancing, loss)

    def test_experts_of_a_narrow_type(self):
        experts, weights = jnp.array([[1, 2], [0, 1]], jnp.uint8), jnp.ones((2, 2))
        routing = moe.Routing(jnp.zeros((2, 300)), experts, weights)
        np.testing.assert_allclose(moe.load_balancing_loss(routing), 1, rtol=1e-6)

    def test_unknown_share(self, logits):
        with pytest.raises(ValueError, match="share_of.*'rows'"):
            moe.load_balancing_loss(moe.route(jnp.asarray(logits), 1), share_of="rows")

    @pytest.mark.parametrize("share_of", ["choices", "tokens"])
    def test_no_tokens(self, share_of):
        losses = moe.auxiliary_losses(moe.route(jnp.ones((0, E)), 2), share_of=share_of)
        assert losses == (0, 0)


class TestMask:
    @pytest.mark.parametrize("share_of", ["choices", "tokens"])
    @pytest.mark.parametrize("padding", [np.nan, np.inf, 0.0])
    @pytest.mark.parametrize("axes", [None, AxisType.Auto, AxisType.Explicit], ids=str)
    def test_equals_float64_without_padding(self, share_of, padding, axes, rng):
        mask = rng.random((4, T)) < 0.6
        logits = rng.standard_normal((4, T, E)).astype(np.float32)
        padded = jnp.asarray(np.where(mask[..., None], logits, padding), jnp.float32)
        given = mask
        if axes is not None:
            mesh = Mesh(jax.devices("cpu")[:4], "data", axis_types=(axes,))
            padded, given = jax.device_put((padded, mask), NamedSharding(mesh, P("data")))

        def loss(logits, mask):
            routing = moe.route(logits, 4)
            losses = moe.auxiliary_losses(routing, share_of=share_of, mask=mask)
            return losses.load_balancing + 0.1 * losses.router_z, losses

        (_, losses), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(padded, given)
        real = logits[mask].astype(np.float64)
        probabilities = softmax(real)
        counts = np.bincount(np.argsort(-real)[:, :4].reshape(-1), minlength=E)
        share = counts / len(real) / (4 if share_of == "choices" else 1)
        log_partition = np.log(np.exp(real).sum(-1))
        np.testing.assert_allclose(
            losses.load_balancing, E * (share * probabilities.mean(0)).sum(), rtol=1e-5
        )
        np.testing.assert_allclose(losses.router_z, (log_partition**2).mean(), rtol=1e-5)
        # d(E f.p) = E p (f - f.p) / T and d(z^2) = 2 z p / T.
        of_balance = E * probabilities * (share - (probabilities @ share)[:, None])
        of_z = 2 * log_partition[:, None] * probabilities
        expected = np.zeros_like(logits, np.float64)
        expected[mask] = (of_balance + 0.1 * of_z) / len(real)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
        assert not np.asarray(gradient)[~mask].any()

    @pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")], ids=str)
    def test_explicit_axes(self, spec, rng):
        """Tokens and masks may be split along explicit axes of the mesh of `jax.set_mesh`."""
        mask = rng.random((4, T)) < 0.6
        logits = jnp.asarray(rng.standard_normal((4, T, E)), jnp.float32)

        def run(logits, mask):
            routing = moe.mask_tokens(moe.route(logits, 4), mask)
            losses, vjp = jax.vjp(
                lambda x: moe.auxiliary_losses(moe.route(x, 4), mask=mask), logits
            )
            return losses, vjp(losses)[0], routing.experts, routing.weights

        expected = jax.jit(run)(logits, mask)
        with jax.set_mesh(Mesh(jax.devices("cpu")[:4], "data", axis_types=(AxisType.Explicit,))):
            got = jax.jit(run)(*(jax.device_put(a, P(*spec)) for a in (logits, mask)))
            assert jax.typeof(got[1]).sharding.spec == P(*spec, *[None] * (3 - len(spec)))
            assert jax.typeof(got[2]).sharding == jax.typeof(got[1]).sharding
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("jitted", [False, True])
    def test_masked_tokens_visit_no_expert_and_are_not_counted(self, jitted, logits, rng):
        mask = rng.random(T) < 0.6
        padded = jnp.asarray(np.where(mask[:, None], logits, np.nan), jnp.float32)

        def run(logits, mask):
            routing = moe.mask_tokens(moe.route(logits, 3, scoring="sigmoid"), mask)
            return routing, moe.sort_by_expert(routing).group_sizes

        routing, counts = (jax.jit(run) if jitted else run)(padded, mask)
        experts, weights = token_by_token(logits[mask], 3, scoring="sigmoid")
        np.testing.assert_array_equal(routing.experts[mask], experts)
        np.testing.assert_allclose(routing.weights[mask], weights, rtol=1e-5)
        assert (routing.experts[~mask] == -1).all() and (routing.weights[~mask] == 0).all()
        np.testing.assert_array_equal(counts, np.bincount(experts.reshape(-1), minlength=E))

    def test_experts_of_a_narrow_type(self, logits, rng):
        """In an unsigned dtype, -1 would name an expert, so masked experts become int32."""
        mask = rng.random(T) < 0.6
        chosen = moe.route(jnp.asarray(logits), 2)
        narrow = chosen._replace(experts=chosen.experts.astype(jnp.uint8))
        for a, b in zip(moe.mask_tokens(narrow, mask), moe.mask_tokens(chosen, mask), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_no_token_is_left(self, logits):
        def losses(logits):
            return moe.auxiliary_losses(moe.route(logits, 2), mask=np.zeros(T, bool))

        @jax.jit
        def run(logits):
            found, vjp = jax.vjp(losses, logits)
            return found, vjp(moe.AuxiliaryLosses(jnp.float32(1), jnp.float32(1)))[0]

        (balance, z), gradient = run(logits)
        assert balance == z == 0
        np.testing.assert_array_equal(gradient, 0)

    @pytest.mark.parametrize("mask", [np.ones(T), np.ones(T - 1, bool), np.ones((T, 1), bool)])
    def test_bad_masks(self, mask, logits):
        routing = moe.route(jnp.asarray(logits), 2)
        for function in (moe.load_balancing_loss, moe.router_z_loss, moe.mask_tokens):
            message = rf"{function.__name__}: mask must be bool \(40,\).*got"
            with pytest.raises(TypeError, match=message):
                function(routing, mask=mask)
        with pytest.raises(TypeError, match="mask_tokens: routing must be a moe.Routing, .*got"):
            moe.mask_tokens(routing.experts, mask)


NAMED = pytest.mark.parametrize("scoring", SCORES)


@NAMED
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("low", [-20, -45, -80, -100, -250, -5000])
def test_logits_far_below_zero(scoring, renormalize, low, rng):
    """Values and gradients match float64. Logits of -5000 become -250 there, to avoid underflow."""
    logits = low + rng.uniform(-1, 1, (T, E))
    shifted = logits if low > -300 else logits - low - 250

    def weights(logits):
        return moe.route(logits, 4, scoring=scoring, renormalize=renormalize).weights

    ct = rng.standard_normal((T, 4))
    got, vjp = jax.vjp(weights, jnp.asarray(logits, jnp.float32))
    (gradient,) = vjp(jnp.asarray(ct, jnp.float32))
    with jax.enable_x64(True):

        def exact(logits):
            experts = jax.lax.top_k(logits, 4)[1]
            if scoring == "softmax":
                scores = jax.nn.softmax(logits, axis=-1)
            elif scoring == "sigmoid":
                scores = 1 / (1 + jnp.exp(-logits))
            else:
                scores = jnp.sqrt(jnp.log1p(jnp.exp(logits)))
            scores = jnp.take_along_axis(scores, experts, axis=-1)
            return scores / scores.sum(-1, keepdims=True) if renormalize else scores

        # Round to float32 first, as the tested logits are rounded, and then shift all logits alike.
        rounded = np.float64(np.float32(logits)) + (shifted - logits)
        wanted, exact_vjp = jax.vjp(exact, jnp.asarray(rounded))
        (wanted_gradient,) = exact_vjp(jnp.asarray(ct))
    tolerance = dict(rtol=1e-5, atol=1e-6 if renormalize or scoring == "softmax" else 1e-37)
    np.testing.assert_allclose(got, wanted, **tolerance)
    np.testing.assert_allclose(gradient, wanted_gradient, **tolerance)
    if renormalize:
        np.testing.assert_allclose(got.sum(-1), 1, rtol=1e-6)


@NAMED
@pytest.mark.parametrize("masked", [1, E - 1, E])
def test_masked_experts(scoring, masked, logits):
    logits = jnp.asarray(logits).at[:, :masked].set(-jnp.inf)
    weights, vjp = jax.vjp(lambda x: moe.route(x, 2, scoring=scoring).weights, logits)
    expected = np.where(masked == E, 0.5, [1, 0]) if masked >= E - 1 else weights
    np.testing.assert_allclose(weights, np.broadcast_to(expected, weights.shape), atol=1e-6)
    (gradient,) = vjp(jnp.ones_like(weights))
    assert np.isfinite(gradient).all()
