"""MoE layers of published models: activations, biases, ungated experts, routing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jax_grouped_gemm import Recipe, gated_ragged_dot, moe

T, D, F, E, K = 14, 10, 18, 5, 3


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


# Functions (gate, up) -> hidden in plain jax.numpy, for one token at a time in float64.
HIDDEN = {
    "silu": lambda g, u: g * sigmoid(g) * u,
    "gelu": lambda g, u: g * (1 + jax.lax.erf(g / np.sqrt(2))) / 2 * u,
    "gelu_tanh": lambda g, u: (
        g * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) / 2 * u
    ),
    "relu": lambda g, u: jnp.maximum(g, 0) * u,
    "relu2": lambda g, u: jnp.maximum(g, 0) ** 2 * u,
    "swiglu_oai": lambda g, u: (
        jnp.minimum(g, 7) * sigmoid(1.702 * jnp.minimum(g, 7)) * (jnp.clip(u, -7, 7) + 1)
    ),
    "clamped_silu": lambda g, u: (
        jnp.minimum(g, 10) * sigmoid(jnp.minimum(g, 10)) * jnp.clip(u, -10, 10)
    ),
}


def operands(rng, dtype=np.float32, scale=6.0):
    """Returns operands by name. Gates and ups are up to about 20, beyond any activation's limit."""
    shapes = dict(
        x=(T, D), logits=(T, E), wi_0=(E, D, F), wi_1=(E, D, F), wo=(E, F, D),
        b0=(E, F), b1=(E, F), bo=(E, D),
    )  # fmt: skip
    scales = dict(wi_0=scale * D**-0.5, wi_1=scale * D**-0.5, wo=F**-0.5)
    return {
        name: jnp.asarray(scales.get(name, 1) * rng.standard_normal(shape), dtype)
        for name, shape in shapes.items()
    }


def ours(o, *, activation="silu", gated=True, biased=True, on_input=False, top_k=K, **options):
    routing = moe.route(o["logits"], top_k)
    return moe.dropless_mlp(
        o["x"],
        routing,
        o["wi_0"],
        o["wi_1"] if gated else None,
        o["wo"],
        biases=(o["b0"], o["b1"] if gated else None, o["bo"]) if biased else None,
        activation=activation,
        apply_router_weight_on_input=on_input,
        **options,
    )


def token_by_token(o, *, hidden, gated=True, biased=True, on_input=False, top_k=K):
    """Computes the layer one token and one expert at a time."""

    def of_expert(x, weight, e):
        x = x * (weight if on_input else 1)
        gate = x @ o["wi_0"][e] + (o["b0"][e] if biased else 0)
        up = x @ o["wi_1"][e] + (o["b1"][e] if biased else 0) if gated else 1.0
        result = hidden(gate, up) @ o["wo"][e] + (o["bo"][e] if biased else 0)
        return result if on_input else weight * result

    def of_token(x, logits):
        chosen = jnp.argsort(-jax.lax.stop_gradient(logits))[:top_k]
        weights = jnp.exp(logits[chosen])
        weights = weights / weights.sum()
        return jax.vmap(partial(of_expert, x))(weights, chosen).sum(axis=0)

    return jax.vmap(of_token)(o["x"], o["logits"])


def value_and_gradients(layer, o, cotangent):
    def loss(o):
        y = layer(o)
        return (y * cotangent.astype(y.dtype)).sum(), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(o)
    return y, gradients


def assert_agree(o, rng, implementation=None, atol=2e-5, **options):
    """Asserts that errors of the result and all gradients are small relative to their maxima."""
    cotangent = rng.standard_normal((T, D))
    activation = options.pop("activation", "silu")
    hidden = options.pop("hidden", None) or HIDDEN[activation]
    layer = partial(ours, activation=activation, implementation=implementation, **options)
    result = value_and_gradients(layer, o, jnp.asarray(cotangent))
    # The layer's own operands, widened to float64 without rounding.
    exact = {name: np.asarray(x, np.float64) for name, x in o.items()}
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(x) for name, x in exact.items()}
        layer = partial(token_by_token, hidden=hidden, **options)
        expected = value_and_gradients(layer, exact, jnp.asarray(cotangent))
        expected = jax.tree.map(np.asarray, expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(result), jax.tree.leaves(expected), strict=True
    ):
        error = np.abs(np.asarray(a, np.float64) - b).max()
        assert error <= atol * max(np.abs(b).max(), 1), jax.tree_util.keystr(path)


class TestActivations:
    @pytest.mark.parametrize("activation", HIDDEN)
    def test_by_name(self, activation, rng):
        assert_agree(operands(rng), rng, activation=activation, biased=False)

    @pytest.mark.parametrize(
        "function, name",
        [(jax.nn.silu, "silu"), (jax.nn.gelu, "gelu_tanh"), (jax.nn.relu, "relu")],
    )
    def test_functions_of_jax_have_the_same_bits(self, function, name, rng):
        o = operands(rng)
        np.testing.assert_array_equal(ours(o, activation=function), ours(o, activation=name))

    def test_any_function(self, rng):
        assert_agree(
            operands(rng),
            rng,
            activation=lambda x: jnp.sin(x) + 0.5,
            hidden=lambda g, u: (jnp.sin(g) + 0.5) * u,
        )

    def test_own_numbers(self, rng):
        def hidden(g, u):
            g = jnp.minimum(g, 3)
            return g * sigmoid(0.7 * g) * (jnp.clip(u, -3, 3) + 0.25)

        activation = moe.Activation("silu", alpha=0.7, limit=3.0, up_offset=0.25)
        assert_agree(operands(rng), rng, activation=activation, hidden=hidden)

    @pytest.mark.parametrize("up_offset", [0.0, 0.5])
    def test_limit_after(self, up_offset, rng):
        def hidden(g, u):
            return jnp.minimum(g * sigmoid(g), 3) * (jnp.clip(u, -3, 3) + up_offset)

        activation = moe.Activation("silu", limit=3.0, limit_after=True, up_offset=up_offset)
        assert_agree(operands(rng), rng, activation=activation, hidden=hidden)

    def test_without_gate(self, rng):
        hidden = HIDDEN["relu2"]
        assert_agree(operands(rng), rng, activation="relu2", hidden=hidden, gated=False)

    @pytest.mark.parametrize(
        "activation, error, message",
        [
            ("swish", ValueError, "activation.*'silu'.*'swiglu_oai'.*got 'swish'"),
            (None, TypeError, "activation.*got None"),
            (3, TypeError, "activation.*got 3"),
        ],
    )
    def test_what_is_none(self, activation, error, message, rng):
        with pytest.raises(error, match=message):
            ours(operands(rng), activation=activation)

    @pytest.mark.parametrize(
        "fields, message",
        [
            (dict(function="swish"), "function.*'swish'"),
            (dict(function="gelu", alpha=2.0), "alpha.*'gelu'"),
            (dict(limit=-1.0), "limit.*-1"),
            (dict(limit_after=True), "limit_after needs a limit, got limit=None"),
        ],
    )
    def test_bad_fields(self, fields, message):
        with pytest.raises(ValueError, match=message):
            moe.Activation(**fields)

    @pytest.mark.parametrize("value", ["1", [1.0], 1j, True, np.ones(1)], ids=repr)
    @pytest.mark.parametrize("name", ["alpha", "limit", "up_offset"])
    def test_fields_that_are_no_numbers(self, name, value):
        with pytest.raises(TypeError, match=f"{name} must be a real number, got"):
            moe.Activation(**{name: value})

    @pytest.mark.parametrize("value", [["silu"], {}, 3, None], ids=repr)
    def test_function_that_is_none(self, value):
        with pytest.raises(ValueError, match="function must be callable or one of"):
            moe.Activation(value)


class TestModels:
    @pytest.mark.parametrize("implementation", [None, jax.lax.ragged_dot], ids=["ours", "stock"])
    def test_gpt_oss(self, implementation, rng):
        """GPT-OSS has biases in all products, clips gate and up, and adds 1 to up."""
        assert_agree(operands(rng), rng, implementation, activation="swiglu_oai")

    def test_llama_4(self, rng):
        """The router weight multiplies an expert's input, so the activation depends on it too."""
        o = operands(rng, scale=1.0)
        assert_agree(o, rng, on_input=True, biased=False, top_k=2)
        assert np.abs(ours(o, on_input=True) - ours(o)).max() > 0.1

    def test_biases_and_weights_on_the_input(self, rng):
        assert_agree(operands(rng), rng, on_input=True)

    @pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
    def test_some_biases_only(self, missing, rng):
        o = operands(rng)
        biases = [None if i in missing else o[f"b{'01o'[i]}"] for i in range(3)]
        routing = moe.route(o["logits"], K)
        result = moe.dropless_mlp(o["x"], routing, o["wi_0"], o["wi_1"], o["wo"], biases=biases)
        zeroed = o | {f"b{'01o'[i]}": np.zeros_like(o[f"b{'01o'[i]}"]) for i in missing}
        np.testing.assert_allclose(result, ours(zeroed), atol=1e-4)

    def test_slices_of_the_experts_sum_to_the_layer(self, rng):
        o = operands(rng)

        def part(o, low, high):
            local = {k: v if k in ("x", "logits") else v[low:high] for k, v in o.items()}
            return ours(local, activation="swiglu_oai", group_offset=jnp.int32(low))

        @jax.jit
        def both(o):
            return part(o, 0, 2), part(o, 2, E), ours(o, activation="swiglu_oai")

        first, second, whole = map(np.asarray, both(o))
        np.testing.assert_allclose(first + second, whole, atol=1e-4)

    def test_backward_pass_scatters_no_rows(self, rng):
        """Only the router's gradient uses scatter-add; gradients of rows and biases do not."""
        o = operands(rng)
        logits = o.pop("logits")
        gradient = jax.grad(lambda o: ours(o | dict(logits=logits)).sum())
        jaxpr = str(jax.make_jaxpr(gradient)(o))
        assert "gather" in jaxpr
        assert "scatter-add" not in jaxpr

    def test_higher_orders(self, rng):
        with jax.enable_x64(True):
            o = operands(rng, np.float64, scale=1.0)
            o["logits"] = jnp.argsort(o["logits"], axis=-1) + 0.1 * o["logits"]

            @jax.jit
            def of_biases(b0, b1, bo, x):
                return ours(o | dict(b0=b0, b1=b1, bo=bo, x=x), activation="swiglu_oai")

            args = [o[name] for name in ("b0", "b1", "bo", "x")]
            check_grads(of_biases, args, order=2, eps=1e-5)

    def test_bfloat16_rounds_gate_and_up_once(self, rng):
        """Gate and up are sums that are rounded once. Hidden is computed from the rounded sums."""
        o = operands(rng, jnp.bfloat16, scale=1.0)
        routing = moe.route(o["logits"].astype(jnp.float32), 1)
        wo = np.broadcast_to(np.eye(F, dtype=jnp.bfloat16), (E, F, F))
        x = np.pad(o["x"], [(0, 0), (0, F - D)])
        wi_0, wi_1 = (np.pad(o[name], [(0, 0), (0, F - D), (0, 0)]) for name in ("wi_0", "wi_1"))
        result = moe.dropless_mlp(x, routing, wi_0, wi_1, wo, biases=(o["b0"], o["b1"], None))
        experts = np.asarray(routing.experts)[:, 0]
        rounded = []
        for w, b in ((wi_0, o["b0"]), (wi_1, o["b1"])):
            w, b = (np.asarray(a, np.float64)[experts] for a in (w, b))
            exact = np.einsum("td,tdf->tf", np.asarray(x, np.float64), w) + b
            rounded.append(exact.astype(jnp.bfloat16).astype(np.float64))
        hidden = rounded[0] / (1 + np.exp(-rounded[0])) * rounded[1]
        np.testing.assert_array_equal(
            np.asarray(result, np.float32), hidden.astype(jnp.bfloat16).astype(np.float32)
        )

    def test_fp8_with_biases(self, rng):
        o = operands(rng, jnp.bfloat16, scale=1.0)

        @jax.jit
        def both(o):
            wide = {k: v.astype(jnp.float32) for k, v in o.items()}
            layer = partial(ours, activation="swiglu_oai")
            return layer(o, recipe=Recipe()), layer(wide)

        y, exact = both(o)
        assert y.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(y, np.float32) - exact)
        assert error < 0.08 * np.linalg.norm(exact)

    @pytest.mark.parametrize(
        "change, message",
        [
            (dict(b0=lambda b: b[1:]), r"biases\[0\].*\(5, 18\).*\(4, 18\)"),
            (dict(bo=lambda b: b[:, 1:]), r"biases\[2\].*\(5, 10\).*\(5, 9\)"),
        ],
    )
    def test_biases_that_do_not_fit(self, change, message, rng):
        o = operands(rng)
        o |= {name: function(o[name]) for name, function in change.items()}
        with pytest.raises(TypeError, match=message):
            ours(o)

    def test_biases_are_a_triple(self, rng):
        o = operands(rng)
        routing = moe.route(o["logits"], K)
        with pytest.raises(TypeError, match="biases must be a triple"):
            moe.dropless_mlp(o["x"], routing, o["wi_0"], o["wi_1"], o["wo"], biases=o["b0"])
        with pytest.raises(TypeError, match=r"biases\[1\] must be None where wi_1 is"):
            moe.dropless_mlp(
                o["x"], routing, o["wi_0"], None, o["wo"], biases=(o["b0"], o["b1"], o["bo"])
            )


class TestDeinterleave:
    @pytest.mark.parametrize("library", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
    @pytest.mark.parametrize("axis", [-1, 2, 1, -3])
    def test_gate_and_up_alternate(self, axis, library, rng):
        gate, up = (rng.standard_normal((4, 6, 8)).astype(np.float32) for _ in range(2))
        parts = np.moveaxis(gate, axis, -1), np.moveaxis(up, axis, -1)
        mixed = np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
        got = moe.deinterleave(library(np.moveaxis(mixed, -1, axis)), axis)
        assert {type(a) for a in got} == {type(library(gate))}
        np.testing.assert_array_equal(got, (gate, up))

    def test_is_what_gpt_oss_computes(self, rng):
        """gpt-oss has gate and up in even and odd columns of one matrix and one bias."""
        o = operands(rng)
        w = rng.standard_normal((E, D, 2 * F)).astype(np.float32)
        b = rng.standard_normal((E, 2 * F)).astype(np.float32)
        o["wi_0"], o["wi_1"] = moe.deinterleave(jnp.asarray(w))
        o["b0"], o["b1"] = moe.deinterleave(jnp.asarray(b))
        y = ours(o, activation="swiglu_oai")
        exact = {name: np.asarray(a, np.float64) for name, a in o.items()}
        w, b, expected = w.astype(np.float64), b.astype(np.float64), np.zeros((T, D))
        for t in range(T):
            chosen = np.argsort(-exact["logits"][t])[:K]
            weights = np.exp(exact["logits"][t][chosen])
            for e, weight in zip(chosen, weights / weights.sum(), strict=True):
                gate_up = exact["x"][t] @ w[e] + b[e]
                gate, up = np.minimum(gate_up[::2], 7), np.clip(gate_up[1::2], -7, 7)
                hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
                expected[t] += weight * (hidden @ exact["wo"][e] + exact["bo"][e])
        np.testing.assert_allclose(y, expected, atol=3e-5 * np.abs(expected).max())

    def test_is_the_concatenated_matrix(self, rng):
        x = jnp.asarray(rng.standard_normal((T, D)), jnp.float32)
        sizes = jnp.asarray(rng.multinomial(T, [1 / E] * E), jnp.int32)
        gate, up = moe.deinterleave(jnp.asarray(rng.standard_normal((E, D, 2 * F)), jnp.float32))
        both = jnp.concatenate([gate, up], axis=-1)
        np.testing.assert_allclose(
            gated_ragged_dot(x, both, None, sizes, concatenated=True),
            gated_ragged_dot(x, gate, up, sizes),
            rtol=1e-5,
            atol=1e-5,
        )

    @pytest.mark.parametrize(
        "gate_up, axis, message",
        [
            (np.ones((4, 7)), -1, r"axis -1 of even size, got \(4, 7\)"),
            (np.ones((4, 6)), 2, r"axis 2 of even size, got \(4, 6\)"),
            (np.ones((4, 6)), -3, r"axis -3 of even size, got \(4, 6\)"),
            (np.ones(()), -1, r"axis -1 of even size, got \(\)"),
            (np.ones((4, 6)), 1.0, "axis must be an integer, got 1.0"),
            ([[1.0, 2.0]], -1, "gate_up must be an array, got list"),
        ],
    )
    def test_mistakes(self, gate_up, axis, message):
        with pytest.raises(TypeError, match=f"deinterleave: .*{message}"):
            moe.deinterleave(gate_up, axis)
