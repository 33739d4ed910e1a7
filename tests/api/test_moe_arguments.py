"""The MoE functions with no tokens, with arrays over a mesh, and with operands that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

T, D, F, E, K = 6, 8, 4, 4, 2


def operands(rng, tokens=T):
    shapes = [(tokens, D), (tokens, E), (E, D, F), (E, D, F), (E, F, D)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


class TestNoTokens:
    @pytest.mark.parametrize("leading", [(0,), (0, 3), (2, 0)])
    @pytest.mark.parametrize("recipe", [None, jgg.Recipe()], ids=["float32", "fp8"])
    def test_result_and_gradients(self, leading, recipe, rng):
        _, _, *weights = operands(rng)
        x, logits = jnp.ones((*leading, D)), jnp.ones((*leading, E))

        def loss(x, logits, *weights):
            y = moe.dropless_mlp(x, moe.route(logits, K), *weights, recipe=recipe)
            assert y.shape == x.shape
            return y.sum()

        gradients = jax.jit(jax.grad(loss, argnums=range(5)))(x, logits, *weights)
        for gradient, operand in zip(gradients, (x, logits, *weights), strict=True):
            assert gradient.shape == operand.shape
            np.testing.assert_array_equal(gradient, 0)

    @pytest.mark.parametrize("recipe", [None, jgg.Recipe()])
    def test_rows_of_no_tokens(self, recipe, rng):
        _, _, *weights = operands(rng)
        rows, sizes = np.array([0, 1, -1, 2]), np.array([1, 0, 2, 0])

        def layer(x, *weights):
            return jgg.ragged_mlp(x, *weights, sizes, rows=rows, recipe=recipe)

        @jax.jit
        def results(*factors):
            y, vjp = jax.vjp(layer, *factors)
            return y, *vjp(jnp.ones_like(y))

        for result in results(jnp.ones((0, D)), *weights):
            np.testing.assert_array_equal(result, 0)

    @pytest.mark.parametrize("on_input", [True, False])
    @pytest.mark.parametrize(
        "options", [{}, dict(recipe=jgg.Recipe()), dict(implementation=jax.lax.ragged_dot)]
    )
    def test_tokens_without_features(self, options, on_input, rng):
        x, logits = jnp.zeros((T, 0)), operands(rng)[1]
        weights = [jnp.zeros((E, 0, F)), jnp.zeros((E, 0, F)), jnp.zeros((E, F, 0))]

        def layer(x, logits, *weights):
            routing = moe.route(logits, K)
            return moe.dropless_mlp(
                x, routing, *weights, apply_router_weight_on_input=on_input, **options
            )

        @jax.jit
        def results(*factors):
            y, vjp = jax.vjp(layer, *factors)
            return y, vjp(y)

        y, gradients = results(x, logits, *weights)
        assert y.shape == (T, 0)
        for gradient, operand in zip(gradients, (x, logits, *weights), strict=True):
            assert gradient.shape == operand.shape
            np.testing.assert_array_equal(gradient, 0)

    def test_parts(self):
        order = moe.sort_by_expert(moe.route(jnp.ones((0, E)), K))
        assert order.inverse.shape == (0, K)
        np.testing.assert_array_equal(order.group_sizes, np.zeros(E))
        rows = moe.dispatch(jnp.ones((0, D)), order)
        assert rows.shape == (0, D)
        assert moe.combine(rows, order).shape == (0, D)

    def test_losses_of_no_tokens_are_zero(self):
        assert moe.auxiliary_losses(moe.route(jnp.ones((0, E)), K)) == (0, 0)

    @pytest.mark.parametrize("kind", ["linen", "nnx"])
    def test_layers(self, kind):
        pytest.importorskip("flax", reason="Flax is not installed")
        from flax import nnx

        from jax_grouped_gemm.flax import linen as jgg_linen
        from jax_grouped_gemm.flax import nnx as jgg_nnx

        x = jnp.ones((0, D))
        if kind == "linen":
            (y, losses), _ = jgg_linen.MoE(F, E, K).init_with_output(jax.random.key(0), x)
        else:
            y, losses = jgg_nnx.MoE(D, F, E, K, rngs=nnx.Rngs(0))(x)
        assert y.shape == x.shape and losses == (0, 0)


class TestExplicitAxes:
    @pytest.fixture
    def mesh(self):
        return jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Explicit,))

    def sharded(self, rng, mesh):
        x, logits, *weights = operands(rng, tokens=8)
        where = jax.sharding.NamedSharding(mesh, P("data"))
        whole = jax.sharding.NamedSharding(mesh, P())
        return [jax.device_put(a, where) for a in (x, logits)] + [
            jax.device_put(w, whole) for w in weights
        ]

    def test_tokens_stay_split(self, rng, mesh):
        layer = jax.jit(lambda x, logits, *w: moe.dropless_mlp(x, moe.route(logits, K), *w))
        with jax.set_mesh(mesh):
            x, logits, *weights = self.sharded(rng, mesh)
            got = layer(x, logits, *weights)
            assert jax.typeof(got).sharding.spec == P("data", None)
            # A routing with another sharding is moved to the sharding of the tokens.
            whole = jax.sharding.reshard(logits, P())
            again = layer(x, whole, *weights)
        np.testing.assert_array_equal(got, again)
        expected = layer(*(jnp.asarray(np.asarray(a)) for a in (x, logits, *weights)))
        np.testing.assert_allclose(got, expected, atol=1e-5)

    def test_what_needs_all_tokens_says_what_to_write(self, rng, mesh):
        with jax.set_mesh(mesh):
            _, logits, *_ = self.sharded(rng, mesh)
            with pytest.raises(NotImplementedError, match=r"shard_map.*auto_axes"):
                moe.sort_by_expert(moe.route(logits, K))

    def test_what_it_says_works(self, rng, mesh):
        with jax.set_mesh(mesh):
            args = self.sharded(rng, mesh)

            def layer(x, logits, *weights):
                return moe.dropless_mlp(x, moe.route(logits, K), *weights)

            expected = jax.jit(layer)(*(jnp.asarray(np.asarray(a)) for a in args))
            auto = jax.sharding.auto_axes(layer, out_sharding=P("data"))
            specs = (P("data"), P("data"), P(), P(), P())
            mapped = jax.shard_map(layer, in_specs=specs, out_specs=P("data"))
            for got in jax.jit(lambda *args: (auto(*args), mapped(*args)))(*args):
                np.testing.assert_allclose(got, expected, atol=1e-5)


class TestMistakes:
    @pytest.fixture
    def order(self, rng):
        return moe.sort_by_expert(moe.route(operands(rng)[1], K))

    @pytest.mark.parametrize("name", ["x", "wi_0", "wi_1", "wo"])
    def test_operands_are_arrays(self, name, rng):
        x, logits, wi_0, wi_1, wo = operands(rng)
        given = dict(x=x, wi_0=wi_0, wi_1=wi_1, wo=wo)
        given[name] = given[name].tolist()
        with pytest.raises(TypeError, match=f"{name} must be a JAX or NumPy array, got list"):
            moe.dropless_mlp(routing=moe.route(logits, K), **given)

    def test_tokens_are_no_integers(self, rng):
        x, logits, *matrices = operands(rng)
        with pytest.raises(TypeError, match="x must be floating, got dtype int32"):
            moe.dropless_mlp(x.astype(jnp.int32), moe.route(logits, K), *matrices)

    @pytest.mark.parametrize("routing", [None, (1, 2, 3)])
    def test_routing(self, routing, rng):
        x, _, *weights = operands(rng)
        with pytest.raises(TypeError, match="routing must be a moe.Routing"):
            moe.dropless_mlp(x, routing, *weights)
        with pytest.raises(TypeError, match="routing must be a moe.Routing"):
            moe.sort_by_expert(routing)

    @pytest.mark.parametrize(
        "loss", [moe.load_balancing_loss, moe.router_z_loss, moe.auxiliary_losses]
    )
    def test_losses_of_no_routing(self, loss, rng):
        routing = moe.route(operands(rng)[1], K)
        for other in (None, routing.logits, tuple(routing)):
            with pytest.raises(TypeError, match=f"{loss.__name__}: routing must be a moe.Routing"):
                loss(other)
        with pytest.raises(TypeError, match=f"{loss.__name__}: routing.logits must be a.* got int"):
            loss(routing._replace(logits=1))
        with pytest.raises(TypeError, match=f"{loss.__name__}: routing must have logits"):
            loss(routing._replace(experts=routing.experts[1:]))

    @pytest.mark.parametrize("value", [["tokens"], np.ones(2), None], ids=repr)
    def test_options_of_routers(self, value, rng):
        logits = operands(rng)[1]
        with pytest.raises(ValueError, match="share_of must be one of"):
            moe.load_balancing_loss(moe.route(logits, K), share_of=value)
        with pytest.raises(ValueError, match="scoring must be callable or one of"):
            moe.route(logits, K, scoring=value)

    def test_routing_of_shapes_that_do_not_fit(self, rng):
        x, logits, *weights = operands(rng)
        routing = moe.route(logits, K)
        with pytest.raises(TypeError, match=r"routing must have.*\(6, 4\), \(6, 2\) and \(6, 1\)"):
            moe.dropless_mlp(x, routing._replace(weights=routing.weights[:, :1]), *weights)

    def test_dispatch_of_other_tokens(self, order, rng):
        for x in (jnp.ones((T - 1, D)), jnp.ones((T + 1, D)), jnp.ones((1, T, D))):
            with pytest.raises(TypeError, match=r"x must be \[T, .*\] with T = 6"):
                moe.dispatch(x, order)
        with pytest.raises(TypeError, match="expert_order must be a moe.ExpertOrder"):
            moe.dispatch(jnp.ones((T, D)), None)

    def test_combine_of_another_order(self, order):
        rows = jnp.ones((T * K, D))
        with pytest.raises(ValueError, match="top_k must be that of expert_order, 2, got 3"):
            moe.combine(rows, order, 3)
        with pytest.raises(TypeError, match="top_k must be an integer, got 2.0"):
            moe.combine(rows, order, 2.0)
        with pytest.raises(TypeError, match=r"rows must be \[12, "):
            moe.combine(rows[1:], order)

    def test_gated_activation(self, rng):
        gate, up = (jnp.asarray(rng.standard_normal((5, 3)), jnp.float32) for _ in range(2))
        weights = jnp.asarray(rng.standard_normal(5), jnp.float32)
        expected = jnp.tanh(gate) * up * weights[:, None]
        by_keyword = moe.gated_activation(gate, up, weights=weights, activation=jnp.tanh)
        np.testing.assert_allclose(by_keyword, expected, rtol=1e-6)
        by_position = moe.gated_activation(gate, up, weights, jnp.tanh)
        np.testing.assert_array_equal(by_position, by_keyword)
        np.testing.assert_allclose(
            moe.gated_activation(gate, None, None, "relu"), np.maximum(gate, 0)
        )
        with pytest.raises(TypeError, match=r"up \(5, 2\)"):
            moe.gated_activation(gate, up[:, 1:], weights)
        with pytest.raises(TypeError, match=r"weights must be \[m\] = \(5,\), got \(4,\)"):
            moe.gated_activation(gate, up, weights[1:])

    def test_where_the_weight_goes_is_a_boolean(self, rng):
        x, logits, *weights = operands(rng)
        with pytest.raises(TypeError, match="apply_router_weight_on_input"):
            moe.dropless_mlp(x, moe.route(logits, K), *weights, apply_router_weight_on_input="no")
