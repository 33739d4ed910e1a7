"""Quantised weights in every operation that takes them, and a format that a user adds."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.quantized.format import register

FORMATS = ["mxfp4", "int4", "int8", "fp8", "fp8_128x128"]
SIZES = jnp.array([5, 0, 9, 2])
EXPERTS, EMBED, HIDDEN = 4, 96, 160
NUMBERS = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))


def weights(rng, name, shape=(EXPERTS, EMBED, HIDDEN)):
    """Returns quantised weights, and their exact values in float32."""
    x = rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[1]).astype(np.float32)
    q = jgg.quantize(x, name)
    return q, np.asarray(jgg.dequantize(q, np.float32))


def mlp_weights(rng, name):
    shapes = [(EXPERTS, EMBED, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, EMBED)]
    pairs = [weights(rng, name, shape) for shape in shapes]
    return [q for q, _ in pairs], [w for _, w in pairs]


def grouped(x, w, sizes):
    """Returns the product in float64, group by group."""
    ends = np.cumsum(sizes)
    out = np.zeros((x.shape[0], w.shape[2]))
    for i, end in enumerate(ends):
        rows = slice(end - sizes[i], end)
        out[rows] = np.asarray(x[rows], np.float64) @ np.asarray(w[i], np.float64)
    return out


def routed(rng, tokens=16, top_k=2):
    x = rng.standard_normal((tokens, EMBED)).astype(np.float32)
    return x, moe.route(rng.standard_normal((tokens, EXPERTS)).astype(np.float32), top_k)


@pytest.mark.parametrize("name", FORMATS)
def test_ragged_dot(rng, name):
    q, w = weights(rng, name)
    x = rng.standard_normal((18, EMBED)).astype(np.float32)
    want = grouped(x, w, np.asarray(SIZES))
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

    want = grouped(dy, np.swapaxes(w, 1, 2), np.asarray(SIZES))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x, q), want, atol=1e-4)
    _, tangent = jax.jvp(lambda x: jgg.ragged_dot(x, q, SIZES), (x,), (x,))
    np.testing.assert_allclose(tangent, grouped(x, w, np.asarray(SIZES)), atol=1e-5)
    with pytest.raises(TypeError, match="quantised weights are frozen; differentiate x"):
        jax.grad(loss, 1, allow_int=True)(x, q)
    # The backward pass keeps no array of the size of the dequantised weights.
    _, vjp = jax.vjp(lambda x: jgg.ragged_dot(x, q, SIZES), x)
    assert max(leaf.nbytes for leaf in jax.tree.leaves(vjp)) < 4 * w.size


def test_transformations(rng):
    q, w = weights(rng, "mxfp4")
    x = rng.standard_normal((3, 18, EMBED)).astype(np.float32)
    want = np.stack([grouped(each, w, np.asarray(SIZES)) for each in x])
    product = partial(jgg.ragged_dot, group_sizes=SIZES)
    check = partial(np.testing.assert_allclose, desired=want, atol=1e-5)
    check(jax.vmap(product, (0, None))(x, q))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), q)
    check(jax.vmap(product)(x, stacked))
    check(jax.lax.scan(lambda c, xs: (c, product(*xs)), None, (x, stacked))[1])
    check(jax.vmap(jax.checkpoint(product), (0, None))(x, q))
    exported = jax.export.export(jax.jit(product), disabled_checks=jgg.EXPORT_DISABLED_CHECKS)(
        x[0], q
    )
    got = jax.export.deserialize(exported.serialize()).call(x[0], q)
    np.testing.assert_allclose(got, want[0], atol=1e-5)
    # `rhs` may be a slice of the experts, the first of which is `group_offset`.
    part = jax.tree.map(lambda leaf: leaf[2:], q)
    got = jgg.ragged_dot(x[0], part, SIZES, group_offset=2)
    np.testing.assert_allclose(got[5:], want[0][5:], atol=1e-5)
    assert not np.asarray(got[:5]).any()


def test_explain_says_what_is_dequantised():
    q = jax.eval_shape(jgg.quantize, jax.ShapeDtypeStruct((32, 2880, 5760), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((65536, 2880), jnp.bfloat16)
    found = jgg.explain(jgg.ragged_dot, x, q, jax.ShapeDtypeStruct((32,), jnp.int32))
    assert "dequantises 1.06 GB of weights first: mxfp4 [32, 2880, 5760], 283 MB" in str(found)
    assert found.plans[1].problem.op == "ragged_noncontracting"


@pytest.mark.parametrize("name", FORMATS)
def test_layers(rng, name):
    packed, arrays = mlp_weights(rng, name)
    x, routing = routed(rng)
    biases = tuple(rng.standard_normal(w.shape[::2]).astype(np.float32) for w in arrays)
    layer = partial(moe.dropless_mlp, biases=biases, activation="swiglu_oai")
    want = layer(x, routing, *arrays)
    np.testing.assert_allclose(jax.jit(layer)(x, routing, *packed), want, atol=1e-5)
    rows = x[: int(SIZES.sum())]
    for call, used in ((jgg.ragged_mlp, 3), (jgg.gated_ragged_dot, 2)):
        got = call(rows, *packed[:used], group_sizes=SIZES)
        np.testing.assert_allclose(got, call(rows, *arrays[:used], group_sizes=SIZES), atol=1e-5)


def test_a_layers_gradient(rng):
    packed, arrays = mlp_weights(rng, "mxfp4")
    x, routing = routed(rng)
    grad = jax.grad(lambda x, *w: (moe.dropless_mlp(x, routing, *w) ** 2).sum())
    np.testing.assert_allclose(jax.jit(grad)(x, *packed), grad(x, *arrays), atol=1e-4, rtol=1e-4)


def test_expert_parallel(rng):
    packed, arrays = mlp_weights(rng, "mxfp4")
    x, routing = routed(rng)
    want = moe.dropless_mlp(x, routing, *arrays)
    mesh = jax.make_mesh((4,), ("expert",), (jax.sharding.AxisType.Auto,))
    layer = moe.expert_parallel(mesh, expert_axis="expert")
    placed = jax.device_put(packed, jax.sharding.NamedSharding(mesh, P("expert")))
    y, _ = jax.jit(layer)(x, routing, *placed)
    np.testing.assert_allclose(y, want, atol=1e-5)
    both = jax.make_mesh((2, 2), ("expert", "model"), (jax.sharding.AxisType.Auto,) * 2)
    layer = moe.expert_parallel(both, expert_axis="expert", tensor_axis="model")
    with pytest.raises(ValueError, match=r"wi_0 \(4, 96, 160\).*mxfp4.*2 slices along n.*64"):
        layer(x, routing, *packed)


@pytest.mark.parametrize(
    "options",
    [dict(chunks=2, overlap=False), dict(save="nothing", overlap=False), dict(save="rows")],
    ids=str,
)
def test_expert_parallel_schedules(rng, options):
    """Packed weights give the right gradients in chunks, without overlap, and for any `save`."""
    packed, arrays = mlp_weights(rng, "mxfp4")
    x, routing = routed(rng)
    mesh = jax.make_mesh((4,), ("expert",), (jax.sharding.AxisType.Auto,))
    layer = moe.expert_parallel(mesh, expert_axis="expert", **options)
    grad = jax.jit(jax.grad(lambda x, w: (layer(x, routing, *w)[0] ** 2).sum()))
    np.testing.assert_allclose(grad(x, packed), grad(x, arrays), atol=1e-5)


DIVISIBLE = dict(embed=256, hidden=512)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_bytes_that_are_split(rng, name, explicit):
    """Weights that are split along experts, k and n are gathered in their packed form."""
    embed, hidden = DIVISIBLE.values()
    shapes = [(EXPERTS, embed, hidden)] * 2 + [(EXPERTS, hidden, embed)]
    packed, arrays = zip(*(weights(rng, name, shape) for shape in shapes), strict=True)
    x = rng.standard_normal((16, embed)).astype(np.float32)
    routing = moe.route(rng.standard_normal((16, EXPERTS)).astype(np.float32), 2)
    want, pullback = jax.vjp(lambda x: moe.dropless_mlp(x, routing, *arrays), x)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2, 2), ("expert", "model", "data"), (kind,) * 3)
    layer = moe.expert_parallel(mesh, expert_axis="expert", tensor_axis="model", fsdp_axis="data")
    specs = [P("expert", "data", "model")] * 2 + [P("expert", "model", "data")]

    def place(q, spec):
        return jax.device_put(
            q, jax.tree.map(lambda s: jax.sharding.NamedSharding(mesh, s), q.specs(spec))
        )

    placed = [place(q, spec) for q, spec in zip(packed, specs, strict=True)]
    assert placed[0].values.addressable_shards[0].data.nbytes * 8 == packed[0].values.nbytes
    tokens = jax.device_put(x, jax.sharding.NamedSharding(mesh, P(("expert", "data"))))
    y, pullback_of_split = jax.vjp(jax.jit(lambda x: layer(x, routing, *placed)[0]), tokens)
    np.testing.assert_allclose(y, want, atol=1e-5)
    dy = rng.standard_normal(x.shape).astype(np.float32)
    dx = pullback_of_split(jax.device_put(dy, y.sharding))[0]
    np.testing.assert_allclose(dx, pullback(dy)[0], atol=1e-4)
    if not explicit:
        text = jax.jit(layer).lower(tokens, routing, *placed).as_text()
        gathers = [line for line in text.splitlines() if "all_gather" in line and "ui8" in line]
        assert gathers, "what travels is packed"


def test_slices_inside_shard_map(rng):
    """Matrices may be split along k or n: each device multiplies by its own slice."""
    q, w = weights(rng, "int4", (EXPERTS, 256, 128))
    x = rng.standard_normal((18, 256)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
    want = grouped(x, w, np.asarray(SIZES))

    def columns(x, q):
        assert q.shape == (EXPERTS, 256, 64)
        return jgg.ragged_dot(x, q, SIZES)

    split = jax.shard_map(
        columns, mesh=mesh, in_specs=(P(), q.specs(P(None, None, "i"))), out_specs=P(None, "i")
    )
    np.testing.assert_allclose(split(x, q), want, atol=1e-5)

    def rows(x, q):
        assert q.shape == (EXPERTS, 128, 128)
        return jax.lax.psum(jgg.ragged_dot(x, q, SIZES), "i")

    split = jax.shard_map(
        rows, mesh=mesh, in_specs=(P(None, "i"), q.specs(P(None, "i"))), out_specs=P()
    )
    np.testing.assert_allclose(split(x, q), want, atol=1e-5)
    with pytest.raises(TypeError, match="slice of a QuantizedArray along n.*multiples of 64"):
        uneven, _ = weights(rng, "int4", (EXPERTS, 256, 100))
        jax.shard_map(
            columns,
            mesh=mesh,
            in_specs=(P(), uneven.specs(P(None, None, "i"))),
            out_specs=P(None, "i"),
        )(x, uneven)


def test_tokens_that_are_split(rng):
    packed, arrays = mlp_weights(rng, "int8")
    x, routing = routed(rng)
    want = moe.dropless_mlp(x, routing, *arrays)
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        x, routing, packed = jax.device_put((x, routing, packed), split)
        np.testing.assert_allclose(jax.jit(moe.dropless_mlp)(x, routing, *packed), want, atol=1e-5)


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


def test_two_fp8_operands(rng):
    x = rng.standard_normal((16, 200)).astype(np.float32)
    w = rng.standard_normal((EXPERTS, 200, 136)).astype(np.float32)
    rows = jgg.quantize(x, "fp8_1x128")
    values, scales = jgg.quantize_blockwise(x)
    np.testing.assert_array_equal(rows.values, values)
    np.testing.assert_array_equal(rows.scales, scales)
    both = jgg.quantize_weights(w)
    q = jgg.quantize(w, "fp8_128x128", layout="rows")
    for found, want in zip(jax.tree.leaves(q), jax.tree.leaves(both.array), strict=True):
        np.testing.assert_array_equal(found, want)
    want = jgg.scaled_ragged_dot(values, scales, both.values, both.scales, SIZES)
    np.testing.assert_array_equal(jgg.ragged_dot(rows, both.array, SIZES), want)
    got = jax.jit(lambda x, w: jgg.ragged_dot(x, w, SIZES, transpose_rhs=True))(
        rows, both.transposed
    )
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="precision None, ANY_F8_ANY_F8_F32 or"):
        jgg.ragged_dot(rows, q, SIZES, precision="highest")
    with pytest.raises(TypeError, match="lhs must be of the format fp8_1x128.*got fp8_128x128"):
        jgg.ragged_dot(jgg.quantize(x, "fp8_128x128", layout="rows"), q, SIZES)
    with pytest.raises(TypeError, match="nothing multiplies rows.*'packed'"):
        jgg.ragged_dot(rows, jgg.quantize(w, "int8"), SIZES)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("weights_format", ["fp8_128x128", "columns", "fp8_tensor"])
@pytest.mark.parametrize("rows_format", ["fp8_1x128", "fp8_row", "fp8_tensor"])
def test_two_fp8_operands_of_every_scaling(rng, rows_format, weights_format, transposed):
    dtypes = [jnp.float8_e4m3fn, jnp.float8_e5m2]
    x = rng.standard_normal((16, 200)).astype(np.float32)
    w = rng.standard_normal((EXPERTS, 200, 136)).astype(np.float32)
    given = np.swapaxes(w, 1, 2) if transposed else w
    name = weights_format if weights_format != "columns" else "fp8_row" if transposed else "fp8"
    rows = jgg.quantize(x, rows_format, dtype=rng.choice(dtypes))
    q = jgg.quantize(given, name, layout="rows", dtype=rng.choice(dtypes))
    assert rows.shape == x.shape and q.shape == given.shape
    values = np.asarray(jgg.dequantize(q, np.float32))
    np.testing.assert_allclose(values, given, atol=0.15 * np.abs(w).max())
    want = grouped(
        np.asarray(jgg.dequantize(rows, np.float32)),
        np.swapaxes(values, 1, 2) if transposed else values,
        np.asarray(SIZES),
    )
    options = dict(transpose_rhs=transposed, preferred_element_type=jnp.float32)
    got = jgg.ragged_dot(rows, q, SIZES, **options)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    if "128" not in rows_format + weights_format:
        fast = jgg.ragged_dot(rows, q, SIZES, "ANY_F8_ANY_F8_F32_FAST_ACCUM", **options)
        np.testing.assert_allclose(fast, want, atol=1e-2 * np.abs(want).max())
    # `to_dict` keeps the format, and the constructor finds the layout from the values.
    assert jgg.QuantizedArray.from_dict(q.to_dict()).format == q.format
    parts = q.values, q.scales, q.channel_scales
    assert jgg.QuantizedArray(*parts, format=name).format == q.format


@pytest.mark.parametrize("with_up", [True, False])
def test_a_recipe_with_weights_that_are_in_fp8(rng, with_up):
    """FP8 weights give the bits of weights that the recipe quantises, and get no gradient."""
    x, routing = routed(rng)
    shapes = [(EXPERTS, EMBED, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, EMBED)]
    arrays = [rng.standard_normal(shape).astype(np.float32) / 10 for shape in shapes]
    q = [jgg.quantize(w, "fp8_128x128", layout="rows") for w in arrays]
    if not with_up:
        arrays[1] = q[1] = None
    layer = partial(moe.dropless_mlp, recipe=jgg.Recipe())
    dy = rng.standard_normal(x.shape).astype(np.float32)

    def both(x, *weights):
        y, pullback = jax.vjp(lambda x: layer(x, routing, *weights), x)
        return y, pullback(dy)[0]

    for got, want in zip(jax.jit(both)(x, *q), jax.jit(both)(x, *arrays), strict=True):
        np.testing.assert_array_equal(got, want)
    rows = x[: int(SIZES.sum())]
    hidden = partial(jgg.gated_ragged_dot, rows, group_sizes=SIZES, recipe=jgg.Recipe())
    np.testing.assert_array_equal(hidden(*q[:2]), hidden(*arrays[:2]))
    with pytest.raises(TypeError, match="quantised weights are frozen"):
        jax.grad(lambda wo: layer(x, routing, *q[:2], wo).sum())(q[2])
    mesh = jax.make_mesh((2,), ("expert",), (jax.sharding.AxisType.Auto,))
    many = jax.jit(moe.expert_parallel(mesh, expert_axis="expert", recipe=jgg.Recipe()))
    np.testing.assert_allclose(many(x, routing, *q)[0], many(x, routing, *arrays)[0], atol=1e-6)
    refused = [
        (dict(recipe=jgg.Recipe(forward="bf16")), q, "forward='fp8'"),
        ({}, q, "give MLPs a recipe"),
        (
            dict(recipe=jgg.Recipe()),
            [*q[:2], arrays[2]],
            "recipe cannot be used if wi_0.* is quantised",
        ),
        (
            dict(recipe=jgg.Recipe()),
            [None if w is None else jgg.quantize(w, "int8") for w in arrays],
            "with a recipe, wi_0 must be of the format fp8_128x128.*got int8",
        ),
    ]
    for options, weights, message in refused:
        with pytest.raises(ValueError, match=message):
            moe.dropless_mlp(x, routing, *weights, **options)


def test_fp8_ragged_dot_with_a_quantized_array(rng):
    x = rng.standard_normal((18, 200)).astype(np.float32)
    w = rng.standard_normal((EXPERTS, 200, 136)).astype(np.float32)
    product = partial(jgg.fp8_ragged_dot, x, w, SIZES)
    got = product(quantized_rhs=jgg.quantize(w, "fp8_128x128", layout="rows"))
    np.testing.assert_array_equal(got, product(quantized_rhs=jgg.quantize_weights(w)))
    with pytest.raises(TypeError, match="quantized_rhs must be.*format fp8_128x128, got Quant"):
        product(quantized_rhs=jgg.quantize(w, "int8"))


def test_scaling_strings_are_deprecated(rng):
    x = rng.standard_normal((16, 64)).astype(np.float32)
    rows = jgg.quantize(x, "fp8_row")
    q = jgg.quantize(
        rng.standard_normal((EXPERTS, 64, 40)).astype(np.float32), "fp8", layout="rows"
    )
    operands = rows.values, rows.scales, q.values, q.channel_scales, SIZES
    with pytest.warns(DeprecationWarning, match="lhs_scaling='1xk'.*removed in 0.4.*'fp8_row'"):
        want = jgg.scaled_ragged_dot(*operands, lhs_scaling="1xk")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        np.testing.assert_array_equal(jgg.ragged_dot(rows, q, SIZES), want)


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
        jgg.ragged_dot(x, packed[0], SIZES + jnp.array([0, 0, 0, 2])),
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
