"""Published models as Flax layers with padding masks, against one token at a time in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="Flax is not installed")

from flax import linen as nn  # noqa: E402
from flax import nnx  # noqa: E402
from jax.experimental import checkify  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jax_grouped_gemm as jgg  # noqa: E402
from jax_grouped_gemm import moe  # noqa: E402
from jax_grouped_gemm.flax import linen as of_linen  # noqa: E402
from jax_grouped_gemm.flax import nnx as of_nnx  # noqa: E402
from tests.support.flax_models import (  # noqa: E402
    BATCH,
    BOTH,
    DEEPSEEK,
    LENGTH,
    OPTIONS,
    D,
    E,
    F,
    LinenRouter,
    NnxRouter,
    assert_close,
    exact_value_and_gradients,
    layer_of,
    parameters,
    value_and_gradients,
)

LIBRARIES = pytest.mark.parametrize("library", ["linen", "nnx"])


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((BATCH, LENGTH, D)), jnp.float32)


@pytest.fixture
def bias(rng):
    return jnp.asarray(0.3 * rng.standard_normal(E), jnp.float32)


@pytest.fixture
def cotangent(rng):
    return jnp.asarray(rng.standard_normal((BATCH, LENGTH, D)), jnp.float32)


@pytest.fixture
def mask(rng):
    """A mask of sequences with different lengths, one of which is empty."""
    lengths = rng.permutation([0, LENGTH, *rng.integers(1, LENGTH, BATCH - 2)])
    return np.arange(LENGTH) < lengths[:, None]


@pytest.fixture
def mesh():
    devices = np.array(jax.devices("cpu")[:4])
    return Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))


def check(rng, model, layer, bias, cotangent, x, mask=None, padding=np.nan):
    params = parameters(rng, model)
    given = np.ones(x.shape[:-1], bool) if mask is None else mask
    expected = exact_value_and_gradients(model, bias, cotangent, params, x, given)
    padded = jnp.where(given[..., None], x, padding)
    got = value_and_gradients(layer, cotangent, params, padded, mask)
    assert_close(got, expected)
    (y, *_), (_, dx) = got
    assert not np.asarray(y)[~given].any() and not np.asarray(dx)[~given].any()


@pytest.mark.parametrize(
    "model, library, masked",
    [(model, library, True) for model in OPTIONS for library in ("linen", "nnx")]
    + [("deepseek_v3", "nnx", False), ("gpt_oss", "linen", False), ("llama_4", "nnx", False)],
)
def test_models(masked, library, model, rng, bias, cotangent, x, mask):
    layer = layer_of(library, model, bias)
    check(rng, model, layer, bias, cotangent, x, mask if masked else None)


# The next two tests together run each model with both kinds of axes, both strategies and both
# libraries, and each strategy with both libraries.
OVER_A_MESH = [
    ("deepseek_v3", "nnx", "ragged_all_to_all"),
    ("gpt_oss", "linen", "all_gather"),
    ("llama_4", "linen", "ragged_all_to_all"),
]
OTHER = dict(
    linen="nnx", nnx="linen", all_gather="ragged_all_to_all", ragged_all_to_all="all_gather"
)


@pytest.mark.parametrize("model, library, strategy", OVER_A_MESH)
def test_over_a_mesh(strategy, library, model, mesh, rng, bias, cotangent, x, mask):
    """Masks of a layer over a mesh may differ by device. One device has no real tokens."""
    layer = layer_of(library, model, bias, mesh=mesh, expert_axis="expert", strategy=strategy)
    check(rng, model, layer, bias, cotangent, x, mask)


@pytest.mark.parametrize(
    "model, library, strategy", [(m, OTHER[lib], OTHER[by]) for m, lib, by in OVER_A_MESH]
)
def test_explicit_axes(strategy, library, model, mesh, rng, bias, cotangent, x, mask):
    """Tokens and mask may be divided along an explicit axis, the default of `jax.make_mesh`."""
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    layer = layer_of(library, model, bias, mesh=mesh, expert_axis="expert", strategy=strategy)
    params = parameters(rng, model)
    expected = exact_value_and_gradients(model, bias, cotangent, params, x, mask)
    padded = jnp.where(mask[..., None], x, np.nan)
    with jax.set_mesh(mesh):
        divided = jax.device_put((cotangent, padded, mask), P("expert"))
        whole = jax.device_put(params, P())
        got = value_and_gradients(layer, divided[0], whole, *divided[1:])
        assert jax.typeof(got[0][0]).sharding.spec == P("expert", None, None)
    assert_close(got, expected)


def test_biases_beside_fsdp_and_tensor_axes(rng, bias, cotangent, x, mask):
    devices = np.array(jax.devices("cpu")).reshape(2, 2, 2)
    axes = dict(fsdp_axis="fsdp", expert_axis="expert", tensor_axis="tensor")
    mesh = Mesh(devices, tuple(axes.values()), axis_types=(AxisType.Auto,) * 3)
    layer = layer_of("nnx", "gpt_oss", bias, mesh=mesh, **axes)
    check(rng, "gpt_oss", layer, bias, cotangent, x, mask)


@pytest.mark.parametrize("library, on_mesh", [("linen", False), ("nnx", True)])
def test_fp8(on_mesh, library, mesh, rng, bias, cotangent, x, mask):
    """Values and gradients of GPT-OSS are off by FP8's rounding, and padding is exactly zero."""
    options = dict(mesh=mesh, expert_axis="expert") if on_mesh else {}
    layer = layer_of(library, "gpt_oss", bias, recipe=jgg.Recipe(), **options)
    params = parameters(rng, "gpt_oss")
    params |= {name: params[name] / 4 for name in ("wi_0", "wi_1")}
    expected = exact_value_and_gradients("gpt_oss", bias, cotangent, params, x, mask)
    padded = jnp.where(mask[..., None], x, np.nan)
    got = value_and_gradients(layer, cotangent, params, padded, mask)
    for (path, b), a in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got), strict=True
    ):
        error = np.linalg.norm(np.asarray(a) - b)
        assert error < 0.12 * np.linalg.norm(b), jax.tree_util.keystr(path)
    (y, *_), (_, dx) = got
    assert not np.asarray(y)[~mask].any() and not np.asarray(dx)[~mask].any()


@LIBRARIES
def test_weights_quantised_in_advance(library, rng, x, mask):
    """Weights quantised in advance give the results of weights quantised in the call."""
    options = OPTIONS["gpt_oss"] | dict(recipe=jgg.Recipe(), bias_init=BOTH["bias_init"])
    if library == "nnx":
        layer = of_nnx.MoE(D, F, E, **options, rngs=nnx.Rngs(int(rng.integers(2**31))))
        run = nnx.jit(lambda layer, x, mask: layer(x, mask)[0])
        expected = run(layer, x, mask)
        of_nnx.quantize(layer)
        y = run(layer, x, mask)
    else:
        layer = of_linen.MoE(F, E, **options)
        params = nn.unbox(layer.init(jax.random.key(int(rng.integers(2**31))), x))["params"]
        run = jax.jit(lambda variables, x, mask: layer.apply(variables, x, mask)[0])
        expected = run({"params": params}, x, mask)
        quantized = of_linen.quantize_params(params, jgg.Recipe())
        y = run({"params": params, "quantized": quantized}, x, mask)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@LIBRARIES
def test_no_real_token(library, rng, bias, cotangent, x):
    layer = layer_of(library, "gpt_oss", bias)
    nothing = np.zeros(x.shape[:-1], bool)
    params = parameters(rng, "gpt_oss")
    got = value_and_gradients(layer, cotangent, params, jnp.full_like(x, np.nan), nothing)
    for a in jax.tree.leaves(got):
        np.testing.assert_array_equal(a, 0)


@LIBRARIES
def test_bfloat16_experts_with_float32_biases(library, rng, bias, x):
    """With bfloat16 experts, the router stays in float32, and biases do not widen the result."""
    params = parameters(rng, "gpt_oss")
    expected, losses = layer_of(library, "gpt_oss", bias)(params, x)
    y, got = layer_of(library, "gpt_oss", bias, dtype=jnp.bfloat16)(params, x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, losses)
    assert np.linalg.norm(y - expected) < 0.03 * np.linalg.norm(expected)


SHAPES = {
    "gate": {"kernel": (D, E), "bias": (E,)},
    "wi_0": (E, D, F),
    "wi_1": (E, D, F),
    "wo": (E, F, D),
    "wi_0_bias": (E, F),
    "wi_1_bias": (E, F),
    "wo_bias": (E, D),
}


def assert_made(params):
    """Asserts that all parameters exist, and that `bias_init` drew the biases at random."""
    assert jax.tree.map(jnp.shape, params) == SHAPES
    for made in (params["gate"]["bias"], *(params[f"{n}_bias"] for n in ("wi_0", "wi_1", "wo"))):
        assert len(np.unique(made)) == made.size


def test_linen_parameters(rng, x):
    key = jax.random.key(int(rng.integers(2**31)))
    boxed = of_linen.MoE(F, E, 2, **BOTH).init(key, x)
    assert_made(nn.unbox(boxed)["params"])
    specs = nn.get_partition_spec(boxed)["params"]
    assert specs["gate"] == {"kernel": P("embed", None), "bias": P(None)}
    assert specs["wi_0_bias"] == specs["wi_1_bias"] == P("exp", "mlp")
    assert specs["wo_bias"] == P("exp", "embed")
    own = nn.with_partitioning(jax.nn.initializers.zeros, ("rows", "columns"))
    layer = of_linen.MoE(F, E, 2, biases=True, bias_init=own)
    specs = nn.get_partition_spec(layer.init(key, x))["params"]
    assert specs["wi_0_bias"] == specs["wi_1_bias"] == specs["wo_bias"] == P("rows", "columns")


def test_nnx_parameters(rng):
    layer = of_nnx.MoE(D, F, E, 2, **BOTH, rngs=nnx.Rngs(int(rng.integers(2**31))))
    state = nnx.state(layer, nnx.Param)
    assert_made(nnx.to_pure_dict(state))
    with nn.logical_axis_rules([("exp", "x"), ("embed", None), ("mlp", "y")]):
        specs = nnx.to_pure_dict(nnx.get_partition_spec(state))
    assert specs["gate"] == {"kernel": P(None, None), "bias": P(None)}
    assert specs["wi_0_bias"] == specs["wi_1_bias"] == P("x", "y")
    assert specs["wo_bias"] == P("x", None)


def assert_counted(counts, logits, mask):
    """Asserts that `counts` counts only choices of real tokens, made without a correction bias."""
    chosen = moe.route(logits, correction_bias=jnp.zeros(E), **DEEPSEEK).experts
    expected = np.bincount(np.asarray(chosen)[mask].reshape(-1), minlength=E)
    np.testing.assert_array_equal(counts, expected)


def test_correction_bias_of_nnx(rng, x, mask):
    """The correction bias has no gradient. Counts of real tokens update it, as in DeepSeek-V3."""
    layer = of_nnx.MoE(D, F, E, 3, router=NnxRouter(), rngs=nnx.Rngs(0))

    @nnx.jit
    def step(layer, x):
        def loss(layer):
            y, losses = layer(x, mask)
            return (y**2).sum() + losses.router_z

        gradients = nnx.grad(loss)(layer)
        routing = moe.mask_tokens(layer.router(layer.gate(x)), mask)
        counts = moe.sort_by_expert(routing).group_sizes
        layer.router.correction_bias[...] += 0.1 * jnp.sign(counts.mean() - counts)
        return gradients, counts

    gradients, counts = step(layer, jnp.where(mask[..., None], x, np.nan))
    assert "router" not in nnx.to_pure_dict(gradients)
    assert_counted(counts, layer.gate(x), mask)
    expected = 0.1 * np.sign(mask.sum() * 3 / E - np.asarray(counts))
    np.testing.assert_allclose(layer.router.correction_bias[...], expected, rtol=1e-6)


def test_correction_bias_of_linen(rng, x, mask):
    """The correction bias is no parameter, and the layer sows a routing that counts real tokens."""
    layer = of_linen.MoE(F, E, 3, router=LinenRouter())
    variables = nn.unbox(layer.init(jax.random.key(int(rng.integers(2**31))), x))
    assert variables.keys() == {"params", "router"}
    assert variables["router"]["router"]["correction_bias"].shape == (E,)
    padded = jnp.where(mask[..., None], x, np.nan)
    _, sown = layer.apply(variables, padded, mask, mutable="intermediates")
    (routing,) = sown["intermediates"]["routing"]
    counts = moe.sort_by_expert(routing).group_sizes
    logits = jnp.dot(x, variables["params"]["gate"]["kernel"], precision="highest")
    assert_counted(counts, logits, mask)


@LIBRARIES
def test_groups_are_checked(library, rng, bias, x, mask):
    """`check_groups` refuses rows of padding, which have no group, unless `unowned_rows=True`."""
    layer = jax.jit(layer_of(library, "gpt_oss", bias))
    params = parameters(rng, "gpt_oss")
    with jgg.check_groups():
        checkify.checkify(layer)(params, x)[0].throw()
        with pytest.raises(checkify.JaxRuntimeError, match="unowned_rows=True"):
            checkify.checkify(layer)(params, x, mask)[0].throw()
    with jgg.check_groups(unowned_rows=True):
        error, (y, _) = checkify.checkify(layer)(params, x, mask)
        error.throw()
    np.testing.assert_array_equal(y, layer(params, x, mask)[0])


MASKS = {
    "floating point": lambda mask: mask.astype(np.float32),
    "integers": lambda mask: mask.astype(np.int32),
    "of one sequence": lambda mask: mask[0],
    "with a dimension more": lambda mask: mask[..., None],
}


@LIBRARIES
@pytest.mark.parametrize("name", MASKS)
def test_bad_masks(name, library, rng, bias, x, mask):
    layer = layer_of(library, "gpt_oss", bias)
    message = r"MoE: mask must be bool \(4, 6\), the leading dimensions of x \(4, 6, 16\), got"
    with pytest.raises(TypeError, match=message):
        layer(parameters(rng, "gpt_oss"), x, MASKS[name](mask))


ROUTED = {
    "routing must be a moe.Routing": lambda logits: jax.lax.top_k(logits, 2),
    "router must choose top_k = 2 experts a token": lambda logits: moe.route(logits, 3),
    "experts must be integers": lambda logits: moe.Routing(
        logits, logits[..., :2], logits[..., :2]
    ),
}


@LIBRARIES
@pytest.mark.parametrize("message", ROUTED)
def test_routers_that_do_not_route(message, library, rng, bias, x):
    layer = layer_of(library, "gpt_oss", bias, router=ROUTED[message])
    with pytest.raises(TypeError, match=message):
        layer(parameters(rng, "gpt_oss"), x)
