"""The functional MoE layer against a token-by-token float64 computation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from jax_grouped_gemm import moe

T, D, F, E, K = 24, 12, 20, 5, 2


def layer_inputs(rng, tokens=T, experts=E, dtype=np.float32):
    """Returns x [T, D], logits [T, E], wi_0, wi_1 [E, D, F] and wo [E, F, D], scaled for products
    of order one."""
    shapes = [(tokens, D), (tokens, experts), (experts, D, F), (experts, D, F), (experts, F, D)]
    scales = [1, 1, D**-0.5, D**-0.5, F**-0.5]
    return [
        jnp.asarray(scale * rng.standard_normal(shape), dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


@partial(jax.jit, static_argnames=("top_k", "renormalize", "activation", "implementation"))
def layer(x, logits, wi_0, wi_1, wo, *, top_k=K, renormalize=True, **options):
    routing = moe.route(logits, top_k, renormalize=renormalize)
    return moe.dropless_mlp(x, routing, wi_0, wi_1, wo, **options)


def exact_layer(x, logits, wi_0, wi_1, wo, *, top_k=K, renormalize=True, activation=None):
    """Returns the layer's result in float64, computed for one token and one expert at a time."""
    x, logits, wi_0, wi_1, wo = (np.asarray(a, np.float64) for a in (x, logits, wi_0, wi_1, wo))
    activation = activation or (lambda v: v / (1 + np.exp(-v)))
    out = np.zeros_like(x)
    for token in range(len(x)):
        probabilities = np.exp(logits[token]) / np.exp(logits[token]).sum()
        chosen = np.argsort(-logits[token], kind="stable")[:top_k]
        total = probabilities[chosen].sum() if renormalize else 1.0
        for expert in chosen:
            hidden = activation(x[token] @ wi_0[expert]) * (x[token] @ wi_1[expert])
            out[token] += probabilities[expert] / total * (hidden @ wo[expert])
    return out


def dense_ragged_dot(lhs, rhs, group_sizes, **_):
    """A ragged dot that compiles quickly and is differentiable to any order."""
    owner = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(lhs.shape[0]), side="right")
    return jnp.einsum("mk,mkn->mn", lhs, rhs[owner])


def gradients(fn, inputs):
    """Returns the gradients of the mean square of fn's result with respect to all inputs."""
    return jax.jit(jax.grad(lambda *args: (fn(*args) ** 2).mean(), argnums=range(5)))(*inputs)


class TestRoute:
    @pytest.mark.parametrize("renormalize", [True, False])
    def test_weights_are_the_chosen_probabilities(self, renormalize, rng):
        logits = rng.standard_normal((3, 7, E)).astype(np.float32)
        routing = moe.route(jnp.asarray(logits), 3, renormalize=renormalize)
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        experts = np.argsort(-logits, axis=-1)[..., :3]
        weights = np.take_along_axis(probabilities, experts, axis=-1)
        if renormalize:
            weights /= weights.sum(-1, keepdims=True)
        np.testing.assert_array_equal(routing.experts, experts)
        np.testing.assert_allclose(routing.weights, weights, rtol=1e-5)

    def test_half_precision_logits_are_widened(self, rng):
        logits = jnp.asarray(rng.standard_normal((T, E)), jnp.bfloat16)
        routing = moe.route(logits, K)
        assert routing.logits.dtype == routing.weights.dtype == jnp.float32
        np.testing.assert_allclose(routing.weights.sum(-1), 1, rtol=1e-6)

    def test_huge_logits_stay_finite(self, rng):
        logits = jnp.asarray(1e4 * rng.standard_normal((T, E)), jnp.float32)
        for renormalize in (True, False):
            weights = moe.route(logits, K, renormalize=renormalize).weights
            assert np.isfinite(weights).all() and (np.asarray(weights) <= 1 + 1e-6).all()

    def test_bad_arguments(self):
        with pytest.raises(TypeError, match="logits.*int32"):
            moe.route(jnp.zeros((T, E), jnp.int32), K)
        for top_k in (0, E + 1):
            with pytest.raises(ValueError, match=f"top_k.*{E}.*got {top_k}"):
                moe.route(jnp.zeros((T, E)), top_k)


class TestPermutation:
    def test_rows_are_sorted_by_expert_then_token(self, rng):
        routing = moe.route(jnp.asarray(rng.standard_normal((T, E)), jnp.float32), K)
        order, inverse, group_sizes = moe.sort_by_expert(routing)
        experts = np.asarray(routing.experts).reshape(-1)
        np.testing.assert_array_equal(order, np.argsort(experts, kind="stable"))
        np.testing.assert_array_equal(np.asarray(order)[inverse], np.arange(T * K).reshape(T, K))
        np.testing.assert_array_equal(group_sizes, np.bincount(experts, minlength=E))

    def test_dispatch_copies_and_combine_sums(self, rng):
        x, logits, *_ = layer_inputs(rng)
        order = moe.sort_by_expert(moe.route(logits, K))
        rows = moe.dispatch(x, order)
        np.testing.assert_array_equal(rows, np.asarray(x)[np.asarray(order.order) // K])
        np.testing.assert_allclose(moe.combine(rows, order, K), K * x, rtol=1e-6)

    def test_gradients_are_the_transposed_permutation(self, rng):
        """Derivatives of `permute_rows`, up to the third order in both modes, match differences."""
        with jax.enable_x64(True):
            rows = jnp.asarray(rng.standard_normal((9, 3)))
            permutation = rng.permutation(9)
            inverse = np.argsort(permutation)

            @jax.jit
            def cubed(rows):
                return moe.permute_rows(rows, permutation, inverse) ** 3

            np.testing.assert_allclose(cubed(rows), np.asarray(rows)[permutation] ** 3)
            check_grads(cubed, (rows,), order=3, eps=1e-5)

    def test_backward_pass_scatters_no_rows(self, rng):
        """Gradients need no scatter-add of [T*k, D] rows, which GPUs do slowly and in any order."""
        x, logits, *weights = layer_inputs(rng)
        routing = moe.route(logits, K)

        def loss(x):
            return (moe.dropless_mlp(x, routing, *weights) ** 2).sum()

        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(x))
        assert "gather" in jaxpr
        assert "scatter-add" not in jaxpr


class TestLayer:
    @pytest.mark.parametrize("renormalize", [True, False])
    @pytest.mark.parametrize("top_k", [1, 2, E])
    def test_matches_one_token_at_a_time(self, top_k, renormalize, rng):
        inputs = layer_inputs(rng)
        options = dict(top_k=top_k, renormalize=renormalize)
        np.testing.assert_allclose(
            layer(*inputs, **options), exact_layer(*inputs, **options), atol=1e-5
        )

    def test_leading_dimensions(self, rng):
        x, logits, *weights = layer_inputs(rng)
        result = layer(x.reshape(2, 3, 4, D), logits.reshape(2, 3, 4, E), *weights)
        assert result.shape == (2, 3, 4, D)
        np.testing.assert_allclose(
            result.reshape(T, D), exact_layer(x, logits, *weights), atol=1e-5
        )

    def test_activation(self, rng):
        inputs = layer_inputs(rng)
        np.testing.assert_allclose(
            layer(*inputs, activation=jnp.tanh),
            exact_layer(*inputs, activation=np.tanh),
            atol=1e-5,
        )

    def test_no_token_is_dropped_when_all_choose_one_expert(self, rng):
        x, logits, *weights = layer_inputs(rng)
        logits = logits.at[:, 3].add(100)
        result = layer(x, logits, *weights, top_k=1)
        np.testing.assert_allclose(result, exact_layer(x, logits, *weights, top_k=1), atol=1e-5)

    def test_bfloat16(self, rng):
        x, logits, *weights = layer_inputs(rng, dtype=jnp.bfloat16)
        result = layer(x, logits, *weights)
        assert result.dtype == jnp.bfloat16
        exact = exact_layer(x, logits, *weights)
        # Three steps round to 8 significant bits: gate and up, hidden, and the result.
        error = np.linalg.norm(np.asarray(result, np.float64) - exact) / np.linalg.norm(exact)
        assert error < 3 * 2.0**-8

    def test_same_bits_every_time(self, rng):
        inputs = layer_inputs(rng)
        gradient = jax.jit(lambda *args: gradients(layer, args))
        for first, second in zip(gradient(*inputs), gradient(*inputs), strict=True):
            np.testing.assert_array_equal(first, second)

    @pytest.mark.parametrize("implementation", [None, "xla"])
    def test_gradients_match_the_stock_ragged_dot(self, implementation, rng):
        inputs = layer_inputs(rng)
        result = gradients(partial(layer, implementation=implementation), inputs)
        stock = gradients(partial(layer, implementation=jax.lax.ragged_dot), inputs)
        for ours, expected in zip(result, stock, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-6)

    def test_implementation_is_passed_on(self, rng):
        with pytest.raises(ValueError, match="no such thing"):
            layer(*layer_inputs(rng), implementation="no such thing")

    def test_slices_of_the_experts_sum_to_the_layer(self, rng):
        x, logits, *weights = layer_inputs(rng)
        parts = [
            layer(x, logits, *(w[low:high] for w in weights), group_offset=jnp.int32(low))
            for low, high in [(0, 2), (2, E)]
        ]
        np.testing.assert_allclose(sum(parts), exact_layer(x, logits, *weights), atol=1e-5)

    @pytest.mark.parametrize(
        "name, change, message",
        [
            ("x", lambda a: a[1:], r"leading dimensions.*\(23, 12\).*\(24, 2\)"),
            ("wi_0", lambda a: a[:, 1:], r"wi_0.*12.*\(5, 11, 20\)"),
            ("wi_1", lambda a: a[..., 1:], r"wi_1.*\(5, 12, 20\).*\(5, 12, 19\)"),
            ("wo", lambda a: a.swapaxes(1, 2), r"wo.*\(5, 20, 12\).*\(5, 12, 20\)"),
        ],
    )
    def test_shapes_that_do_not_fit(self, name, change, message, rng):
        x, logits, wi_0, wi_1, wo = layer_inputs(rng)
        operands = dict(x=x, wi_0=wi_0, wi_1=wi_1, wo=wo)
        operands[name] = change(operands[name])
        with pytest.raises(TypeError, match=message):
            moe.dropless_mlp(routing=moe.route(logits, K), **operands)

    def test_a_slice_of_the_experts_needs_an_offset(self, rng):
        x, logits, *weights = layer_inputs(rng)
        with pytest.raises(TypeError, match="4 experts.*router has 5.*group_offset"):
            layer(x, logits, *(w[1:] for w in weights))


class TestTransformations:
    def test_gradients(self, rng):
        with jax.enable_x64(True):
            x, logits, *weights = layer_inputs(rng, tokens=6, dtype=np.float64)
            # Logits are so far apart that finite differences do not change the choice of experts.
            logits = jnp.argsort(logits, axis=-1) + 0.1 * logits

            def output(*args):
                return layer(*args, renormalize=False, implementation=dense_ragged_dot)

            check_grads(output, (x, logits, *weights), order=1, modes=["rev"], eps=1e-5)
            gradient = partial(gradients, output)
            check_grads(gradient, ((x, logits, *weights),), order=1, modes=["fwd"], eps=1e-5)

    def test_vmap(self, rng):
        x, logits, *weights = layer_inputs(rng)
        xs = jnp.stack([x, 2 * x[::-1], -x])
        logits = jnp.stack([logits, logits[::-1], 3 * logits])
        result = jax.vmap(layer, in_axes=(0, 0, None, None, None))(xs, logits, *weights)
        for index in range(3):
            np.testing.assert_allclose(
                result[index], exact_layer(xs[index], logits[index], *weights), atol=1e-4
            )

    def test_scan_over_rematerialised_layers(self, rng):
        """The gradient through a scanned, rematerialised stack is that of the plain loop."""
        x = layer_inputs(rng)[0]
        layers = [layer_inputs(rng)[2:] for _ in range(2)]
        router = jnp.asarray(rng.standard_normal((D, E)), jnp.float32)

        def residual_layer(x, weights, **options):
            return x + layer(x, x @ router, *weights, **options)

        def looped(x, layers):
            for weights in layers:
                x = residual_layer(x, weights, implementation=jax.lax.ragged_dot)
            return (x**2).mean()

        def scanned(x, layers):
            stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
            body = jax.checkpoint(residual_layer, prevent_cse=False)
            return (jax.lax.scan(lambda x, w: (body(x, w), None), x, stacked)[0] ** 2).mean()

        expected = jax.jit(jax.grad(looped, argnums=(0, 1)))(x, layers)
        result = jax.jit(jax.grad(scanned, argnums=(0, 1)))(x, layers)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), result, expected)

    def test_expert_parallel(self, rng):
        """Every device holds all tokens and a slice of the experts; a psum gives the layer."""
        mesh = jax.sharding.Mesh(jax.devices("cpu")[:4], "exp")
        inputs = layer_inputs(rng, experts=8)

        def on_device(x, logits, wi_0, wi_1, wo):
            first_expert = jax.lax.axis_index("exp") * wi_0.shape[0]
            y = layer(x, logits, wi_0, wi_1, wo, group_offset=first_expert)
            return jax.lax.psum(y, "exp")

        sharded = P("exp")
        parallel = jax.shard_map(
            on_device, mesh=mesh, in_specs=(P(), P(), sharded, sharded, sharded), out_specs=P()
        )
        np.testing.assert_allclose(jax.jit(parallel)(*inputs), exact_layer(*inputs), atol=1e-5)
        stock = gradients(partial(layer, implementation=jax.lax.ragged_dot), inputs)
        for ours, expected in zip(gradients(parallel, inputs), stock, strict=True):
            np.testing.assert_allclose(ours, expected, atol=1e-6)

        # Devices exchange one gradient for each token, not one for each of its k copies.
        jaxpr = str(jax.make_jaxpr(lambda *args: gradients(parallel, args))(*inputs))
        assert f"f32[{T},{D}] = psum" in jaxpr
        assert f"f32[{T * K},{D}] = psum" not in jaxpr


@partial(jax.jit, static_argnums=1)
def balance(logits, top_k):
    return moe.load_balancing_loss(moe.route(logits, top_k))


class TestLosses:
    def test_balanced_router(self):
        logits = np.log(np.float32([[1, 2, 3], [3, 1, 2], [2, 3, 1]]))
        np.testing.assert_allclose(balance(logits, 2), 1, rtol=1e-6)

    def test_collapsed_router(self, rng):
        logits = rng.standard_normal((T, E)).astype(np.float32)
        logits[:, 2] += 50
        np.testing.assert_allclose(balance(logits, 1), E, rtol=1e-5)

    def test_formulas(self, rng):
        logits = rng.standard_normal((4, 6, E))
        losses = moe.auxiliary_losses(moe.route(jnp.asarray(logits, jnp.float32), K))
        flat = logits.reshape(-1, E)
        probabilities = np.exp(flat) / np.exp(flat).sum(-1, keepdims=True)
        chosen = np.argsort(-flat, axis=-1)[:, :K]
        share = np.bincount(chosen.reshape(-1), minlength=E) / chosen.size
        balance = E * (share * probabilities.mean(0)).sum()
        z = (np.log(np.exp(flat).sum(-1)) ** 2).mean()
        np.testing.assert_allclose(losses.load_balancing, balance, rtol=1e-5)
        np.testing.assert_allclose(losses.router_z, z, rtol=1e-5)

    def test_descent_balances_the_router(self, rng):
        logits = rng.standard_normal((T, E)).astype(np.float32)
        logits[:, 2] += 1
        loss, gradient = jax.jit(jax.value_and_grad(balance), static_argnums=1)(logits, K)
        assert balance(logits - gradient, K) < loss
