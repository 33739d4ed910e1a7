"""Quantised weights in every operation that takes them, and a format that a user adds."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.quantized.format import register
from tests.support.quantized import (
    EMBED,
    EXPERTS,
    FORMATS,
    HIDDEN,
    SIZES,
    grouped,
    mlp_weights,
    of_one_device,
    routed,
    weights,
)

NUMBERS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


@jax.jit
def layers(x, routing, weights, biases):
    """Returns the results of all layers that take quantised weights."""
    biased = moe.dropless_mlp(x, routing, *weights, biases=biases, activation="swiglu_oai")
    rows = jgg.ragged_mlp(x, *weights, group_sizes=SIZES)
    return biased, rows, jgg.gated_ragged_dot(x, *weights[:2], group_sizes=SIZES)


@pytest.mark.parametrize("name", FORMATS)
def test_ragged_dot(rng, name):
    q, w = weights(rng, name)
    x = rng.standard_normal((18, EMBED)).astype(np.float32)
    want = grouped(x, w, SIZES)
    got = jax.jit(jgg.ragged_dot)(x, q, SIZES)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-5)
    # With bfloat16 rows, the bits are those of weights that were dequantised to bfloat16.
    narrow = jnp.asarray(x, jnp.bfloat16)
    got = jgg.ragged_dot(narrow, q, SIZES)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jgg.ragged_dot(narrow, jgg.dequantize(q), SIZES))


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_that_fill_no_record(rng, name):
    q, w = weights(rng, name, (3, 33, 5))
    x = rng.standard_normal((7, 33)).astype(np.float32)
    x[6] = np.inf  # a row that no group owns
    sizes = np.array([4, 0, 2])
    got = jgg.ragged_dot(x, q, jnp.asarray(sizes))
    np.testing.assert_allclose(got[:6], grouped(x[:6], w, sizes), atol=1e-5)
    assert not np.asarray(got[6]).any()


INT4 = [dict(group_size=size, zero_points=zeros) for size in (32, 64) for zeros in (False, True)]
ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Each format has one dtype in the test of products, and another one in the test of layers.
CASES = [
    (name, options, list(ROUNDING)[i % 3])
    for i, (name, options) in enumerate([*((n, {}) for n in FORMATS), *(("int4", o) for o in INT4)])
]


@pytest.mark.parametrize("name, options, dtype", CASES, ids=str)
def test_random_products(rng, name, options, dtype):
    """Products and gradients of rows of any dtype and number, against float64."""
    k, n = rng.integers(1, 200, 2)
    local, m = (int(size) for size in rng.integers(1, 7, 2) * (1, 5))
    groups, offset = local + int(rng.integers(0, 4)), int(rng.integers(0, 3))
    sizes = rng.multinomial(m - rng.integers(0, 2), np.full(groups, 1 / groups))
    w = rng.standard_normal((local, k, n)) * np.exp(rng.standard_normal((local, 1, n)))
    q = jgg.quantize(w.astype(np.float32), name, **options)
    x, dy = (jnp.asarray(rng.standard_normal((m, size)), dtype) for size in (k, n))
    exact = np.zeros((groups, k, n))
    exact[offset : offset + local] = np.asarray(jgg.dequantize(q, dtype))[: groups - offset]

    def product(x):
        return jgg.ragged_dot(x, q, jnp.asarray(sizes), group_offset=offset)

    y, pullback = jax.vjp(product, x)
    transposed = np.swapaxes(exact, 1, 2)
    for got, a, b in ((y, x, exact), (pullback(dy)[0], dy, transposed)):
        want, bound = grouped(a, b, sizes), grouped(np.abs(a), np.abs(b), sizes)
        error = np.abs(np.asarray(got, np.float64) - want)
        assert (error <= ROUNDING[dtype] * np.abs(want) + 2.0**-22 * a.shape[1] * bound).all()


def swiglu_oai(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def exact_layer(x, routing, weights, biases, on_input):
    """Computes a layer in float64, token by token."""
    y = np.zeros((len(x), weights[2].shape[2]))
    for token, (experts, shares) in enumerate(zip(routing.experts, routing.weights, strict=True)):
        for e, share in zip(np.asarray(experts), np.asarray(shares, np.float64), strict=True):
            row = x[token] * (share if on_input else 1)
            gate, up = (row @ w[e] + b[e] for w, b in zip(weights[:2], biases[:2], strict=True))
            result = swiglu_oai(gate, up) @ weights[2][e] + biases[2][e]
            y[token] += result * (1 if on_input else share)
    return y


@pytest.mark.parametrize("name, options, dtype", CASES, ids=str)
def test_random_layers(rng, name, options, dtype):
    """Layers with biases, clamped SwiGLU and router weights anywhere, against float64."""
    dtype = {"float32": "float16", "float16": "bfloat16", "bfloat16": "float32"}[dtype]
    embed, hidden = (int(size) for size in rng.integers(1, 150, 2))
    shapes = [(EXPERTS, embed, hidden)] * 2 + [(EXPERTS, hidden, embed)]
    packed = [
        jgg.quantize(3 * rng.standard_normal(s).astype(np.float32) / s[1] ** 0.5, name, **options)
        for s in shapes
    ]
    biases = [jnp.asarray(rng.standard_normal(s[::2]), dtype) for s in shapes]
    x = jnp.asarray(rng.standard_normal((12, embed)), dtype)
    routing = moe.route(rng.standard_normal((12, EXPERTS)).astype(np.float32), 2)
    on_input = bool(rng.integers(2))
    got = moe.dropless_mlp(
        x,
        routing,
        *packed,
        biases=biases,
        activation="swiglu_oai",
        apply_router_weight_on_input=on_input,
    )
    assert got.dtype == dtype
    arrays = [x, *(jgg.dequantize(q, dtype) for q in packed), *biases]
    x, *arrays = (np.asarray(a, np.float64) for a in arrays)
    want = exact_layer(x, routing, arrays[:3], arrays[3:], on_input)
    bound = 8 * ROUNDING[dtype] * np.abs(want).max() + 1e-5
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=bound)


def test_a_nan_scale_spoils_its_column_alone(rng):
    codes = rng.integers(0, 16, (1, 64, 8), dtype=np.uint8)
    exponents = np.full((1, 2, 8), 120, np.uint8)
    exponents[0, 1, 3] = 255
    q = jgg.from_codes(codes, exponents, "mxfp4")
    y = np.asarray(jgg.ragged_dot(np.zeros((2, 64), np.float32), q, jnp.array([2])))
    assert np.isnan(y[:, 3]).all() and not np.delete(y, 3, 1).any()


def test_derivatives_go_to_activations_alone(rng):
    q, w = weights(rng, "int4")
    x = rng.standard_normal((18, EMBED)).astype(np.float32)
    dy = rng.standard_normal((18, HIDDEN)).astype(np.float32)

    def loss(x, q):
        return (jgg.ragged_dot(x, q, SIZES) * dy).sum()

    want = grouped(dy, np.swapaxes(w, 1, 2), SIZES)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x, q), want, atol=1e-4)
    _, tangent = jax.jvp(lambda x: jgg.ragged_dot(x, q, SIZES), (x,), (x,))
    np.testing.assert_allclose(tangent, grouped(x, w, SIZES), atol=1e-5)
    with pytest.raises(TypeError, match="quantised weights are frozen; differentiate x"):
        jax.grad(loss, 1, allow_int=True)(x, q)
    # The backward pass keeps no array of the size of the dequantised weights.
    _, vjp = jax.vjp(lambda x: jgg.ragged_dot(x, q, SIZES), x)
    assert max(leaf.nbytes for leaf in jax.tree.leaves(vjp)) < 4 * w.size


def test_transformations(rng):
    q, w = weights(rng, "mxfp4")
    x = rng.standard_normal((3, 18, EMBED)).astype(np.float32)
    want = np.stack([grouped(each, w, SIZES) for each in x])
    product = partial(jgg.ragged_dot, group_sizes=SIZES)
    check = partial(np.testing.assert_allclose, desired=want, atol=1e-5)
    check(jax.vmap(product, (0, None))(x, q))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 3), q)
    check(jax.vmap(product)(x, stacked))
    check(jax.lax.scan(lambda c, xs: (c, product(*xs)), None, (x, stacked))[1])
    check(jax.vmap(jax.checkpoint(product), (0, None))(x, q))
    exported = jax.export.export(jax.jit(product), disabled_checks=jgg.EXPORT_DISABLED_CHECKS)(
        x[0], q
    )
    got = jax.export.deserialize(exported.serialize()).call(x[0], q)
    np.testing.assert_allclose(got, want[0], atol=1e-5)
    # `rhs` may be a slice of the experts, the first of which is `group_offset`.
    part = jax.tree.map(lambda leaf: np.asarray(leaf)[2:], q)
    got = jgg.ragged_dot(x[0], part, SIZES, group_offset=2)
    np.testing.assert_allclose(got[5:], want[0][5:], atol=1e-5)
    assert not np.asarray(got[:5]).any()


def test_explain_says_what_is_dequantised():
    q = jax.eval_shape(jgg.quantize, jax.ShapeDtypeStruct((32, 2880, 5760), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((131072, 2880), jnp.bfloat16)
    found = jgg.explain(jgg.ragged_dot, x, q, jax.ShapeDtypeStruct((32,), jnp.int32))
    assert "dequantises 1.06 GB of weights first: mxfp4 [32, 2880, 5760], 283 MB" in str(found)
    assert found.plans[1].problem.op == "ragged_noncontracting"


@pytest.mark.parametrize("name", FORMATS)
def test_explain_says_what_is_quantised_in_each_call(rng, name):
    x, w = rng.standard_normal((18, EMBED)), rng.standard_normal((EXPERTS, EMBED, HIDDEN))
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)

    def in_step(x, w):
        return jgg.ragged_dot(x, jgg.quantize(w, name), SIZES)

    q = jgg.quantize(w, name)
    found = str(jgg.explain(in_step, x, w))
    assert f"quantises or packs weights in each call: {q.format} [4, 96, 160]" in found
    assert "quantise weights once, when they are loaded" in found
    assert "in each call" not in str(jgg.explain(jgg.ragged_dot, x, q, SIZES))
    want = grouped(x, np.asarray(jgg.dequantize(q, np.float32)), SIZES)
    np.testing.assert_allclose(jax.jit(in_step)(x, w), want, atol=1e-4)
    several = jax.vmap(in_step)(jnp.stack([x, 2 * x]), jnp.stack([w, w]))
    np.testing.assert_allclose(several, np.stack([want, 2 * want]), atol=2e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_layers(rng, name):
    packed, arrays = mlp_weights(rng, name)
    x, routing = routed(rng)
    assert len(x) == SIZES.sum()
    biases = tuple(rng.standard_normal(w.shape[::2]).astype(np.float32) for w in arrays)
    found, wanted = (layers(x, routing, w, biases) for w in (packed, arrays))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_layers_gradient(rng):
    packed, arrays = mlp_weights(rng, "mxfp4")
    x, routing = routed(rng)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    found, wanted = (of_one_device(dy, x, routing, *w) for w in (packed, arrays))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


def test_refusals(rng):
    q, w = weights(rng, "mxfp4")
    down, _ = weights(rng, "mxfp4", (EXPERTS, HIDDEN, EMBED))
    x = rng.standard_normal((16, EMBED)).astype(np.float32)
    sizes = SIZES
    cases = [
        (lambda: jgg.ragged_dot(x, q, sizes, transpose_rhs=True), ValueError, "transpose_rhs"),
        (lambda: jgg.ragged_dot(q, w, sizes), TypeError, "lhs must be.*QuantizedArray"),
        (
            lambda: jgg.ragged_dot_general(x, q, sizes, NUMBERS),
            TypeError,
            "rhs must be.*only the weights of ragged_dot and of MLPs may be quantised",
        ),
        (lambda: jgg.ragged_dot(q, q, sizes), TypeError, "nothing multiplies rows.*mxfp4"),
        (lambda: jgg.ragged_dot(x.astype(np.int8), q, sizes), TypeError, "lhs must be floating"),
        (
            lambda: jgg.ragged_dot_accumulate(q, x, x, sizes),
            TypeError,
            "accumulator must be.*only the weights",
        ),
        (
            lambda: jgg.ragged_mlp(x, q, None, down, sizes, recipe=jgg.Recipe()),
            ValueError,
            "with a recipe, wi_0 must be of the format fp8_128x128.*got mxfp4 in the layout",
        ),
        (
            lambda: jgg.gated_ragged_dot(x, q, w, sizes),
            TypeError,
            "wi_0 and wi_1 must have one format, got mxfp4 and an array",
        ),
        (
            lambda: jgg.ragged_dot(x, jgg.quantize(w, "fp8_128x128", layout="rows"), sizes),
            ValueError,
            "rhs has the format fp8_128x128 in the layout 'rows'.*layout='packed'",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize("name", ["QuantizedWeights", "QuantizedRows", "QuantizedMlp"])
def test_containers_are_deprecated(name):
    with pytest.warns(DeprecationWarning, match=f"{name} is deprecated.*removed in 0.4"):
        assert getattr(jgg, name).__name__ == name
    assert name not in jgg.__all__  # `import *` must not warn


def test_group_checks(rng):
    q, _ = weights(rng, "int8")
    x = rng.standard_normal((18, EMBED)).astype(np.float32)
    with jgg.check_groups(), pytest.raises(Exception, match="must sum to the 18 rows"):
        jgg.ragged_dot(x, q, SIZES)


# --- A format that a user adds, which consists of a `Format` and a function that dequantises.


def int8_demo(parts, format, matrix, dtype):
    """Dequantises int8 values with one float32 scale for each column."""
    return (parts.values.astype(jnp.float32) * parts.channel_scales).astype(dtype)


@pytest.fixture
def demo():
    return register(
        jgg.Format("int8_demo", np.dtype(np.int8), 8, channel_scales=True), dequantize=int8_demo
    )


def demo_weights(rng, shape):
    values = rng.integers(-127, 128, shape).astype(np.int8)
    scales = rng.uniform(0.5, 2, (shape[0], shape[2])).astype(np.float32) / 1000
    q = jgg.QuantizedArray(values, channel_scales=scales, format="int8_demo")
    return q, values.astype(np.float32) * scales[:, None]


def test_a_format_that_is_added(rng, demo):
    shapes = [(EXPERTS, EMBED, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, EMBED)]
    pairs = [demo_weights(rng, shape) for shape in shapes]
    packed, arrays = [q for q, _ in pairs], [w for _, w in pairs]
    x, routing = routed(rng, tokens=18)
    assert packed[0].shape == shapes[0]
    np.testing.assert_allclose(
        jgg.ragged_dot(x, packed[0], SIZES + np.array([0, 0, 0, 2], np.int32)),
        grouped(x, arrays[0], [5, 0, 9, 4]),
        atol=1e-5,
    )
    layer = jax.jit(moe.dropless_mlp)
    want = layer(x, routing, *arrays)
    np.testing.assert_allclose(layer(x, routing, *packed), want, atol=1e-5)
    mesh = jax.make_mesh((2,), ("expert",), (jax.sharding.AxisType.Auto,))
    y, _ = jax.jit(moe.expert_parallel(mesh, expert_axis="expert"))(x, routing, *packed)
    np.testing.assert_allclose(y, want, atol=1e-5)
    assert "int8_demo" in str(jgg.explain(moe.dropless_mlp, x, routing, *packed))
