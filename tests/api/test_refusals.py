"""Arguments and layers that cannot work raise errors that name them; other layers still work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support import expert_parallel as ep
from tests.support.expert_parallel import D, E, F, K, T

nnx = pytest.importorskip("flax.nnx")
from flax import linen  # noqa: E402

from jax_grouped_gemm.flax import linen as of_linen  # noqa: E402
from jax_grouped_gemm.flax import nnx as of_nnx  # noqa: E402

BF16 = jgg.Recipe(forward="bf16", dgrad="bf16")


def mesh():
    return jax.make_mesh((4, 2), ("expert", "model"), (jax.sharding.AxisType.Auto,) * 2)


def tokens(rng):
    return jnp.asarray(rng.standard_normal((T, D)), jnp.float32)


apply_nnx = nnx.jit(lambda layer, x: layer(x)[0])


@pytest.mark.parametrize("other", [dict(recipe=BF16), dict(), "tensor_axis"], ids=str)
def test_nnx_quantize_leaves_other_layers_alone(other, rng):
    options = dict(recipe=jgg.Recipe(), mesh=mesh(), expert_axis="expert", tensor_axis="model")
    options = options if other == "tensor_axis" else other
    rngs = nnx.Rngs(int(rng.integers(100)))
    layers = nnx.List(
        [
            of_nnx.MoE(D, F, E, K, rngs=rngs, **options),
            of_nnx.MoE(D, F, E, K, recipe=jgg.Recipe(), rngs=rngs),
        ]
    )
    x = tokens(rng)
    before = [apply_nnx(layer, x) for layer in layers]
    of_nnx.quantize(layers)
    assert layers[0].quantized is None
    assert layers[1].quantized is not None
    for layer, y in zip(layers, before, strict=True):
        np.testing.assert_allclose(apply_nnx(layer, x), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("other", [dict(recipe=BF16), dict(), "tensor_axis"], ids=str)
def test_linen_layers_that_are_not_in_fp8_ignore_quantised_weights(other, rng):
    options = dict(recipe=jgg.Recipe(), mesh=mesh(), expert_axis="expert", tensor_axis="model")
    options = options if other == "tensor_axis" else other

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = of_linen.MoE(F, E, K, **options)(x)[0]
            return of_linen.MoE(F, E, K, recipe=jgg.Recipe())(x)[0]

    x = tokens(rng)
    shapes = jax.eval_shape(Model().init, jax.random.key(0), x)["params"]
    params = jax.tree.map(
        lambda p: jnp.asarray(0.1 * rng.standard_normal(p.shape).astype(p.dtype)), shapes
    )
    quantized = of_linen.quantize_params(params, jgg.Recipe())

    @jax.jit
    def both(params, quantized, x):
        given = {"params": params}, {"params": params, "quantized": quantized}
        return [Model().apply(variables, x) for variables in given]

    before, after = both(params, quantized, x)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


WRONG = {
    "top_k must be at most num_experts = 8, got 9": dict(top_k=9),
    "activation must be": dict(activation="no such thing"),
    "implementation must be": dict(implementation="gpu"),
    "recipe must be": dict(recipe="fp8"),
    "router must be callable or None, got 'sigmoid'": dict(router="sigmoid"),
    "renormalize must be True": dict(router=lambda z: moe.route(z, K), renormalize=False),
    "renormalize must be True or False, got 1": dict(renormalize=1),
    "biases must be True or False, got 'yes'": dict(biases="yes"),
    "gate_bias must be True or False, got 1": dict(gate_bias=1),
    "apply_router_weight_on_input must be": dict(apply_router_weight_on_input=None),
    "recipe decides": dict(recipe=jgg.Recipe(), precision="highest"),
    "need an expert_axis": dict(fsdp_axis="expert"),
    "no axis of the mesh": dict(expert_axis="experts"),
    "num_experts must be a multiple of the 4 devices": dict(num_experts=6, expert_axis="expert"),
    "strategy must be": dict(expert_axis="expert", strategy="broadcast"),
    "buffer_factor must be": dict(expert_axis="expert", buffer_factor=-1),
    "chunks must be 'auto' or a positive divisor of the tokens of a device, got 'many'": dict(
        expert_axis="expert", chunks="many"
    ),
    "overlap must be": dict(expert_axis="expert", overlap=True, chunks=2),
    "two meanings": dict(expert_axis="expert", tensor_axis="expert"),
    "tensor_axis must be None with batch_invariant": dict(
        expert_axis="expert", tensor_axis="model", batch_invariant=True
    ),
    "precision must be": dict(precision="nope"),
    "dtype must be a dtype, got 'bfloat17'": dict(dtype="bfloat17"),
    "dtype must be floating": dict(dtype=jnp.int32),
    "param_dtype must be floating": dict(param_dtype=jnp.int32),
    "param_dtype must have 16 bits": dict(param_dtype=jnp.float8_e4m3fn),
}
OF_MESH = "no axis of the mesh", "num_experts must be a multiple of the 4 devices"


@pytest.mark.parametrize("make", ["nnx", "linen"])
@pytest.mark.parametrize("given", ["mesh", "no mesh"])
@pytest.mark.parametrize("message", WRONG)
def test_layers_that_cannot_work_are_refused_when_made(message, given, make):
    options = dict(hidden_features=F, num_experts=E, top_k=K) | WRONG[message]
    if "expert_axis" in options and (given == "mesh" or message in OF_MESH):
        options["mesh"] = mesh()
    with pytest.raises((TypeError, ValueError), match=message):
        if make == "linen":
            of_linen.MoE(**options)
        else:
            of_nnx.MoE(D, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "options",
    [
        dict(strategy="none"),
        dict(activation="none"),
        dict(stratgy="auto"),
        dict(chunks=0),
        dict(implementation="nope"),
        dict(recipe="fp8"),
        dict(precision="nope"),
        dict(max_sms=-1),
        dict(tensor_axis="model", batch_invariant=True),
    ],
    ids=str,
)
def test_expert_parallel_refuses_options_when_made(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        moe.expert_parallel(mesh(), expert_axis="expert", **options)


def float_ids(rng):
    x, experts, weights, *matrices = ep.operands(rng)
    return x, ep.routing(experts.astype(jnp.float32), weights), *matrices


@pytest.mark.parametrize("name", ["one device", "mesh", "balance", "z", "both", "sort"])
def test_float_expert_ids_are_refused(name, rng):
    x, routing, *matrices = float_ids(rng)
    layer = moe.expert_parallel(mesh(), expert_axis="expert")
    calls = {
        "one device": lambda: moe.dropless_mlp(x, routing, *matrices),
        "mesh": lambda: jax.jit(layer)(x, routing, *matrices),
        "balance": lambda: moe.load_balancing_loss(routing),
        "z": lambda: moe.router_z_loss(routing),
        "both": lambda: moe.auxiliary_losses(routing),
        "sort": lambda: moe.sort_by_expert(routing),
    }
    with pytest.raises(TypeError, match="experts must be integers, got dtype float32"):
        calls[name]()


def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


SIZES = shaped(4, dtype=jnp.int32)
MANY = 2**31
PAST_INT32 = {
    "ragged_dot": (jgg.ragged_dot, shaped(MANY, 64), shaped(4, 64, 64), SIZES),
    "ragged_mlp": (
        lambda x, wi, wo, sizes: jgg.ragged_mlp(x, wi, wi, wo, sizes),
        shaped(MANY, 64),
        shaped(4, 64, 64),
        shaped(4, 64, 64),
        SIZES,
    ),
    "dropless_mlp": (
        lambda x, logits, w: moe.dropless_mlp(x, moe.route(logits, 8), w, w, w),
        shaped(2**28, 64),
        shaped(2**28, 16),
        shaped(16, 64, 64),
    ),
    "sort_by_expert": (
        lambda experts: moe.sort_by_expert(experts, 4),
        shaped(MANY, 1, dtype=jnp.int32),
    ),
    "permute_rows": (
        moe.permute_rows,
        shaped(MANY, 8),
        shaped(MANY, dtype=jnp.int32),
        shaped(MANY, dtype=jnp.int32),
    ),
    "gather_rows": (moe.gather_rows, shaped(8, 8), shaped(MANY, dtype=jnp.int32)),
    "quantize_ragged": (
        lambda x, sizes: jgg.quantize_ragged(x, sizes),
        shaped(MANY, 128),
        SIZES,
    ),
}


@pytest.mark.parametrize("name", PAST_INT32)
def test_rows_past_int32_are_refused_by_name(name):
    function, *operands = PAST_INT32[name]
    words = "(lhs|x|rows|experts) of shape .*2147483648 (rows|elements), .*2147483647"
    with pytest.raises(NotImplementedError, match=rf"^\w+: {words}"):
        jax.eval_shape(function, *operands)


def test_counts_past_int32_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"num_experts must be from 0 to 2\^31 - 1, got 2147483648"
    ):
        moe.sort_by_expert(jnp.zeros((4, 2), jnp.int32), MANY)
    fp8 = shaped(1, 64, 128, dtype=jnp.float8_e4m3fn), shaped(1, 64, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"num_rows must be from 0 to 2\^31 - 1, got 2147483648"):
        jax.eval_shape(
            lambda a, b, c, d, e: jgg.scaled_ragged_dot_contracting(a, b, c, d, e, num_rows=MANY),
            *fp8, *fp8, SIZES,
        )  # fmt: skip
    logits = shaped(MANY, 16, dtype=jnp.float32)
    jax.eval_shape(lambda x: moe.router_z_loss(moe.route(x, 8)), logits)
    with pytest.raises(NotImplementedError, match=r"router_z_loss: mask .* has 2147483648 tokens"):
        jax.eval_shape(
            lambda x, m: moe.router_z_loss(moe.route(x, 8), mask=m),
            logits,
            shaped(MANY, dtype=jnp.bool_),
        )


@pytest.mark.parametrize("name", ["load_balancing_loss", "auxiliary_losses"])
def test_losses_of_more_choices_than_int32(name):
    logits = shaped(2**28, 16, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="load_balancing_loss.*2147483648 choices"):
        jax.eval_shape(lambda x: getattr(moe, name)(moe.route(x, 8)), logits)


@pytest.mark.parametrize(
    "scale", ["2.5", True, None, np.bool_(True), 1j, [1.0], np.ones(2)], ids=str
)
def test_scale_of_route_is_a_number(scale, rng):
    with pytest.raises(TypeError, match="scale must be a real number"):
        moe.route(tokens(rng), K, scale=scale)


@pytest.mark.parametrize("scale", [2, 2.5, np.float64(2.5), np.int8(2), jnp.bfloat16(2.5)])
def test_scales_keep_the_dtype_of_weights(scale, rng):
    x = tokens(rng)
    plain, scaled = moe.route(x, K), moe.route(x, K, scale=scale)
    assert scaled.weights.dtype == jnp.float32
    np.testing.assert_allclose(scaled.weights, float(scale) * plain.weights, rtol=1e-6)


SCORINGS = {
    "fewer experts": lambda z: z[..., :3],
    "one more": lambda z: jnp.pad(z, ((0, 0), (0, 1))),
    "integers": lambda z: z.astype(jnp.int32),
    "no array": lambda z: None,
}


@pytest.mark.parametrize("name", SCORINGS)
def test_scoring_returns_scores_of_all_experts(name, rng):
    with pytest.raises(TypeError, match="scoring"):
        moe.route(tokens(rng), K, scoring=SCORINGS[name])


@pytest.mark.parametrize("renormalize", [False, True])
def test_scores_of_fewer_bits_make_weights_of_the_dtype_of_logits(renormalize, rng):
    def scoring(z):
        return jax.nn.sigmoid(z).astype(jnp.bfloat16)

    routing = moe.route(tokens(rng), K, scoring=scoring, renormalize=renormalize)
    assert routing.weights.dtype == routing.logits.dtype == jnp.float32


EAGER = {
    "gated_ragged_dot": lambda x, w, out, sizes, experts: jgg.gated_ragged_dot(x, w, w, sizes),
    "ragged_mlp": lambda x, w, out, sizes, experts: jgg.ragged_mlp(x, w, w, out, sizes),
    "fp8_ragged_dot": lambda x, w, out, sizes, experts: jgg.fp8_ragged_dot(
        x, w, sizes, recipe=jgg.Recipe()
    ),
    "quantize_weights": lambda x, w, out, sizes, experts: jgg.quantize_weights(w),
    "quantize_ragged": lambda x, w, out, sizes, experts: jgg.quantize_ragged(x, sizes),
    "grouped_gemm": lambda x, w, out, sizes, experts: jgg.grouped_gemm(w, out),
    "sort_by_expert": lambda x, w, out, sizes, experts: moe.sort_by_expert(experts, E),
}


@pytest.mark.parametrize("name", EAGER)
def test_eager_calls_send_nothing_to_the_device(name, rng):
    x, sizes = tokens(rng), jnp.full(E, T // E)
    w = jnp.asarray(rng.standard_normal((E, D, F)), jnp.float32)
    given = x, w, w.mT, sizes, jnp.asarray(rng.integers(0, E, (T, K)))
    expected = EAGER[name](*given)
    with jax.transfer_guard("disallow"):
        found = EAGER[name](*given)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_eager_ragged_dot_sends_nothing_to_the_device(rng):
    x = tokens(rng)
    w = jnp.asarray(rng.standard_normal((E, D, F)), jnp.float32)
    sizes = jnp.full(E, T // E)
    jgg.ragged_dot(x, w, sizes)
    with jax.transfer_guard("disallow"):
        y = jgg.ragged_dot(x, w, sizes)
    rows = np.asarray(x, np.float64).reshape(E, T // E, D)
    expected = (rows @ np.asarray(w, np.float64)).reshape(T, F)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
