"""If a recipe would be slower than bf16, bf16 is used: values, derivatives and `explain`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.fp8.choice import Choice
from tests.support.dtypes import BF16, F32

pytestmark = pytest.mark.plans_as_users_get_them
RECIPE = jgg.Recipe()
T, D, F, E, K = 24, 40, 24, 4, 2
CHOICE = "recipe_in_bf16"


def layer_operands(rng, dtype=BF16, shape=(T, D)):
    def random(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    matrices = random(E, D, F, scale=0.2), random(E, D, F, scale=0.2), random(E, F, D, scale=0.2)
    logits = jnp.asarray(rng.standard_normal((*shape[:-1], E)), F32)
    return random(*shape), logits, matrices


def loss(x, logits, matrices, **options):
    y = moe.dropless_mlp(x, moe.route(logits, K), *matrices, **options)
    return jnp.sum(jnp.sin(y.astype(F32)))


def layer(x, logits, matrices, **options):
    return moe.dropless_mlp(x, moe.route(logits, K), *matrices, **options)


gradients = jax.value_and_grad(loss, (0, 1, 2))
# Without a recipe nothing is chosen, so tests share these programs.
layer_in_bf16, gradients_in_bf16 = jax.jit(layer), jax.jit(gradients)


def compiled(function, *operands, **options):
    """Returns the result of a program that is traced anew, as tests change how it is chosen."""
    return jax.jit(lambda *given: function(*given, **options))(*operands)


def choices(function, *operands, **options):
    """Returns, for each choice of bf16, whether it is for training or the forward pass alone."""
    plans = jgg.explain(lambda *given: function(*given, **options), *operands).plans
    found = [plan for plan in plans if plan.problem.op == CHOICE]
    assert all(plan.kernel.name == "bf16" and "in FP8" in plan.reason for plan in found)
    return ["training" if plan.problem.training else "alone" for plan in found]


def multiplies_in_fp8(function, *operands, **options):
    plans = jgg.explain(lambda *given: function(*given, **options), *operands).plans
    return any("scaled" in plan.problem.op for plan in plans)


def equal(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.float32(one), np.float32(other))


@pytest.fixture
def training_alone(monkeypatch):
    """Lets bf16 be faster only if there is a backward pass, for all sizes."""
    monkeypatch.setattr(Choice, "seconds", lambda self, target=None: (2.0, 1.0, self.training))


@pytest.fixture
def forward_alone(monkeypatch):
    """Lets bf16 be faster only if there is no backward pass, for all sizes."""
    monkeypatch.setattr(Choice, "seconds", lambda self, target=None: (2.0, 1.0, not self.training))


class TestLayers:
    def test_small_layers_are_those_without_a_recipe(self, rng):
        """Small layers with a recipe have bf16 layers' bits, and finite second derivatives."""
        operands = layer_operands(rng)
        equal(compiled(gradients, *operands, recipe=RECIPE), gradients_in_bf16(*operands))
        assert choices(gradients, *operands, recipe=RECIPE) == ["training"]
        assert not multiplies_in_fp8(gradients, *operands, recipe=RECIPE)

        def second(x, *others):
            return jnp.sum(jax.grad(loss)(x, *others, recipe=RECIPE).astype(F32) ** 2)

        assert np.isfinite(np.float32(compiled(jax.grad(second), *operands))).all()

    @pytest.mark.parametrize(
        "recipe",
        [
            jgg.Recipe(wgrad="bf16"),
            jgg.Recipe(dgrad="bf16"),
            jgg.Recipe(forward="bf16"),
        ],
        ids=str,
    )
    def test_every_recipe(self, recipe, rng):
        operands = layer_operands(rng)
        equal(compiled(gradients, *operands, recipe=recipe), gradients_in_bf16(*operands))

    def test_what_is_asked_for_is_fp8(self, rng):
        """Layers stay in FP8 if all weights are FP8, x is float32, or `implementation` is set."""
        x, logits, matrices = operands = layer_operands(rng)
        quantized = jgg.quantize_mlp(*matrices, RECIPE)
        frozen = [jgg.quantize(w, "fp8_128x128", layout="rows") for w in matrices]
        gradient = jax.grad(loss)
        for function in (gradient, layer):
            assert multiplies_in_fp8(function, x, logits, frozen, recipe=RECIPE)
            assert choices(function, x, logits, frozen, recipe=RECIPE) == []
        options = dict(recipe=RECIPE, apply_router_weight_on_input=True)
        before = compiled(layer, x, logits, frozen, **options)
        assert (
            np.abs(np.float32(before)).max() > 0
        )  # the zeros in place of bf16 weights were not used
        for implementation in ("cuda", "xla"):
            options = dict(recipe=RECIPE, implementation=implementation)
            assert multiplies_in_fp8(gradient, *operands, **options)
            assert multiplies_in_fp8(gradient, *operands, **options, quantized=quantized)
        wide = layer_operands(rng, F32)
        assert multiplies_in_fp8(gradient, *wide, recipe=RECIPE)
        mixed = wide[0], logits, matrices
        assert multiplies_in_fp8(gradient, *mixed, recipe=RECIPE)

    def test_weights_quantised_before(self, rng):
        """If bf16 is faster, layers that get quantised and bf16 weights use the bf16 weights."""
        operands = layer_operands(rng)
        options = dict(recipe=RECIPE, quantized=jgg.quantize_mlp(*operands[2], RECIPE))
        for function, in_bf16 in ((layer, layer_in_bf16), (gradients, gradients_in_bf16)):
            both = (2.0, 1.0, True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Choice, "seconds", lambda self, target=None, both=both: both)
                equal(compiled(function, *operands, **options), in_bf16(*operands))
                assert choices(function, *operands, **options) == ["training"]
                assert not multiplies_in_fp8(function, *operands, **options)
                wrong = options | dict(quantized=options["quantized"].wi)
                with pytest.raises(TypeError, match="quantized must be a QuantizedMlp"):
                    function(*operands, **wrong)

    def test_weights_quantised_before_training(self, training_alone, rng):
        """If bf16 is faster only in training, training is in bf16, and a forward pass in FP8."""
        operands = layer_operands(rng)
        options = dict(recipe=RECIPE, quantized=jgg.quantize_mlp(*operands[2], RECIPE))
        assert choices(layer, *operands, **options) == []
        in_fp8 = compiled(layer, *operands, **options, implementation="xla")
        equal(compiled(layer, *operands, **options), in_fp8)
        assert choices(gradients, *operands, **options) == ["training"]
        assert not multiplies_in_fp8(gradients, *operands, **options)
        wanted = gradients_in_bf16(*operands)
        equal(compiled(gradients, *operands, **options), wanted)
        remat = jax.value_and_grad(jax.checkpoint(lambda *x: loss(*x, **options)), (0, 1, 2))
        equal(compiled(remat, *operands), wanted)

    def test_weights_quantised_before_the_forward_pass(self, forward_alone, rng):
        operands = layer_operands(rng)
        options = dict(recipe=RECIPE, quantized=jgg.quantize_mlp(*operands[2], RECIPE))
        assert choices(layer, *operands, **options) == ["alone"]
        equal(compiled(layer, *operands, **options), layer_in_bf16(*operands))
        gradient = jax.grad(loss)
        assert choices(gradient, *operands, **options) == []
        assert multiplies_in_fp8(gradient, *operands, **options)

    def test_the_forward_pass_alone(self, forward_alone, rng):
        """If bf16 is faster only without gradients, training computes its values in FP8 too."""
        operands = layer_operands(rng)
        assert choices(layer, *operands, recipe=RECIPE) == ["alone"]
        equal(compiled(layer, *operands, recipe=RECIPE), layer_in_bf16(*operands))
        assert choices(jax.value_and_grad(loss), *operands, recipe=RECIPE) == []
        value, _ = compiled(jax.value_and_grad(loss), *operands, recipe=RECIPE)
        equal(value, compiled(loss, *operands, recipe=RECIPE, implementation="xla"))
        assert value != compiled(loss, *operands, recipe=RECIPE)

    def test_biases_and_leading_dimensions(self, forward_alone, rng):
        x, logits, matrices = layer_operands(rng, shape=(3, 8, D))
        biases = [jnp.asarray(rng.standard_normal((E, n)), BF16) for n in (F, F, D)]
        found, exact = (
            compiled(layer, x, logits, matrices, biases=biases, recipe=r) for r in (RECIPE, None)
        )
        assert choices(layer, x, logits, matrices, recipe=RECIPE) == ["alone"]
        assert found.shape == x.shape and found.dtype == BF16
        np.testing.assert_allclose(np.float32(found), np.float32(exact), atol=0.03, rtol=0.02)

    def test_mapped(self, rng):
        x, logits, matrices = layer_operands(rng)
        many = np.stack([x, -x, 2 * x])
        in_axes = 0, None, None
        found = compiled(
            jax.vmap(partial(jax.grad(loss), recipe=RECIPE), in_axes), many, logits, matrices
        )
        for one, each in zip(many, found, strict=True):
            exact = np.float32(gradients_in_bf16(one, logits, matrices)[1][0])
            np.testing.assert_allclose(np.float32(each), exact, atol=0.05, rtol=0.02)
        mapped = jax.vmap(lambda x: layer(x, logits, matrices, recipe=RECIPE))
        assert choices(mapped, many) == ["training"]

    @pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
    def test_over_devices(self, kind, rng):
        """Each device chooses for the tokens that it has."""
        mesh = jax.make_mesh((4,), ("x",), (kind,))
        x, logits, matrices = layer_operands(rng)
        with jax.set_mesh(mesh):
            split = [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (x, logits)]
            whole = jax.device_put(matrices, NamedSharding(mesh, P()))
            gradient = jax.jit(jax.grad(loss, (0, 2)), static_argnames="recipe")
            found = gradient(*split, whole, recipe=RECIPE)
            wanted = gradient(*split, whole)
        equal(found, wanted)

    def test_experts_of_several_devices(self, rng):
        mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
        x, logits, matrices = layer_operands(rng)

        def run(recipe):
            of_mesh = moe.expert_parallel(mesh, expert_axis="x", recipe=recipe)

            def of(x, matrices):
                y, _ = of_mesh(x, moe.route(logits, K), *matrices)
                return jnp.sum(jnp.sin(y.astype(F32)))

            return jax.jit(jax.grad(of, (0, 1)))

        equal(run(RECIPE)(x, matrices), run(None)(x, matrices))
        assert not multiplies_in_fp8(run(RECIPE), x, matrices)
        assert "training" in choices(run(RECIPE), x, matrices)

    def test_remat_and_scan(self, rng):
        x, logits, matrices = layer_operands(rng)

        def deep(x, recipe):
            @jax.checkpoint
            def body(x, _):
                return x + layer(x, logits, matrices, recipe=recipe), None

            return jnp.sum(jax.lax.scan(body, x, length=2)[0].astype(F32))

        equal(*(compiled(jax.grad(deep), x, recipe=recipe) for recipe in (RECIPE, None)))


class TestMlps:
    def test_rows(self, rng):
        x, _, (wi_0, wi_1, wo) = layer_operands(rng)
        sizes = jnp.array([5, 0, 12, 7])

        def run(x, recipe):
            return jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes, recipe=recipe)

        equal(run(x, RECIPE), run(x, None))
        assert choices(run, x, recipe=RECIPE) == ["training"]

    def test_hidden_layers(self, rng):
        x, _, (wi_0, wi_1, _) = layer_operands(rng)
        sizes = jnp.array([5, 0, 12, 7])

        def run(x, recipe):
            return jgg.gated_ragged_dot(x, wi_0, wi_1, sizes, recipe=recipe)

        equal(run(x, RECIPE), run(x, None))
        assert choices(run, x, recipe=RECIPE) == ["training"]


class TestMatmuls:
    def operands(self, rng, dtype=BF16):
        lhs = jnp.asarray(rng.standard_normal((T, D)), dtype)
        rhs = jnp.asarray(rng.standard_normal((E, D, F)), dtype)
        return lhs, rhs, jnp.array([5, 0, 12, 7])

    def test_small_ones(self, rng):
        lhs, rhs, sizes = self.operands(rng)

        def gradients(product):
            def of(lhs, rhs):
                return jnp.sum(jnp.sin(product(lhs, rhs, sizes).astype(F32)))

            return jax.value_and_grad(of, (0, 1))

        equal(gradients(jgg.fp8_ragged_dot)(lhs, rhs), gradients(jgg.ragged_dot)(lhs, rhs))
        assert choices(gradients(jgg.fp8_ragged_dot), lhs, rhs) == ["training"]

    def test_over_devices(self, rng):
        """The plan of a choice has no note about devices, because the choice computes nothing."""
        mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
        lhs, rhs, sizes = self.operands(rng)
        split = jax.device_put(lhs, NamedSharding(mesh, P("x")))
        whole = jax.device_put((rhs, sizes), NamedSharding(mesh, P()))
        found = jax.jit(jgg.fp8_ragged_dot)(split, *whole)
        equal(found, jgg.ragged_dot(lhs, rhs, sizes))
        assert found.sharding.spec == P("x")
        chosen, product = jgg.explain(jgg.fp8_ragged_dot, split, *whole).plans
        assert chosen.problem.op == CHOICE and not chosen.notes
        assert product.problem.m == T // 4

    def test_alone(self, forward_alone, rng):
        lhs, rhs, sizes = self.operands(rng)
        equal(jgg.fp8_ragged_dot(lhs, rhs, sizes), jgg.ragged_dot(lhs, rhs, sizes))
        assert choices(jgg.fp8_ragged_dot, lhs, rhs, sizes) == ["alone"]

        def of(lhs):
            return jnp.sum(jgg.fp8_ragged_dot(lhs, rhs, sizes).astype(F32))

        assert choices(jax.grad(of), lhs) == []
        assert multiplies_in_fp8(jax.grad(of), lhs)

    def test_what_is_asked_for_is_fp8(self, rng):
        lhs, rhs, sizes = self.operands(rng)
        quantized = jgg.quantize_weights(rhs)
        assert multiplies_in_fp8(jgg.fp8_ragged_dot, lhs, rhs, sizes, quantized_rhs=quantized)
        assert multiplies_in_fp8(jgg.fp8_ragged_dot, lhs, rhs, sizes, implementation="cuda")
        assert multiplies_in_fp8(jgg.fp8_ragged_dot, *self.operands(rng, F32))
