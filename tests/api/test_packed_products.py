"""Products of bfloat16 rows and packed weights are one operation, which JAX can transform."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe

BF16 = jnp.bfloat16
EXPERTS, EMBED, HIDDEN, ROWS = 4, 96, 160, 16
SIZES = jnp.array([5, 0, 9, 2], jnp.int32)
FORMATS = pytest.mark.parametrize("name", ["mxfp4", "int4", "int8", "fp8", "fp8_128x128"])


def weights(rng, name, shape=(EXPERTS, EMBED, HIDDEN)):
    x = rng.standard_normal(shape) / np.sqrt(shape[1])
    return jgg.quantize(jnp.asarray(x, jnp.float32), name)


def mlp_weights(rng, name):
    wi = (EXPERTS, EMBED, HIDDEN)
    return [weights(rng, name, shape) for shape in (wi, wi, (EXPERTS, HIDDEN, EMBED))]


def rows(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape or (ROWS, EMBED)), BF16)


def bound(function, *arguments):
    """Returns the names of a program's operations on packed weights."""
    text = str(jax.make_jaxpr(function)(*arguments))
    names = "packed_ragged_dot", "packed_mlp", "decode_mlp"
    return [name for name in names if name in text]


def same(got, want):
    assert got.dtype == want.dtype == BF16
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@FORMATS
@pytest.mark.parametrize("shape", [(ROWS, EMBED + 1), (EMBED,)])
def test_rows_that_do_not_fit(name, shape, rng):
    message = rf"lhs must be \[m, k\] and rhs .*got lhs bfloat16.* and rhs {name}.*\[4, 96, 160\]"
    with pytest.raises(TypeError, match=message):
        jgg.ragged_dot(rows(rng, *shape), weights(rng, name), SIZES)


@FORMATS
def test_ragged_dot(rng, name):
    x, q = rows(rng), weights(rng, name)
    assert bound(jgg.ragged_dot, x, q, SIZES) == ["packed_ragged_dot"]
    same(jax.jit(jgg.ragged_dot)(x, q, SIZES), jgg.ragged_dot(x, jgg.dequantize(q), SIZES))
    part = jax.tree.map(lambda leaf: leaf[2:], q)
    want = jgg.ragged_dot(x, jgg.dequantize(part), SIZES, group_offset=2)
    same(jgg.ragged_dot(x, part, SIZES, group_offset=2), want)


layer = partial(moe.dropless_mlp, activation="swiglu_oai")


@jax.jit
def mlps(x, logits, scale, biases, matrices):
    """Returns the results of a layer, of MLPs with and without up, and of their first halves."""
    results = [layer(x, moe.route(logits, 2), *matrices, biases=biases)]
    for up in (matrices[1], None):
        results.append(jgg.ragged_mlp(x, matrices[0], up, matrices[2], SIZES, weights=scale))
        results.append(jgg.gated_ragged_dot(x, matrices[0], up, SIZES, biases=(biases[0], None)))
    return results


@FORMATS
def test_mlps(rng, name):
    packed = mlp_weights(rng, name)
    arrays = list(map(jgg.dequantize, packed))
    biases = tuple(rows(rng, EXPERTS, q.shape[2]) for q in packed)
    x, logits = rows(rng), rng.standard_normal((ROWS, EXPERTS)).astype(np.float32)
    assert bound(partial(layer, biases=biases), x, moe.route(logits, 2), *packed) == ["decode_mlp"]
    scale = rng.random(ROWS).astype(np.float32)
    for up in (packed[1], None):
        call = partial(jgg.ragged_mlp, group_sizes=SIZES, weights=scale)
        assert bound(call, x, packed[0], up, packed[2]) == ["packed_mlp"]
    for got, want in zip(
        *(mlps(x, logits, scale, biases, each) for each in (packed, arrays)), strict=True
    ):
        same(got, want)


def test_explain_says_why_transformed_calls_dequantise(rng):
    packed = mlp_weights(rng, "int8")
    x, routing = rows(rng), moe.route(rng.standard_normal((ROWS, EXPERTS)).astype(np.float32), 2)
    calls = (
        (lambda x: jgg.ragged_dot(x, packed[0], SIZES), 1),
        (lambda x: jgg.ragged_mlp(x, *packed, SIZES), 3),
        (lambda x: moe.dropless_mlp(x, routing, *packed), 3),
    )
    for call, matrices in calls:
        gradient = jax.grad(lambda x, call=call: call(x).astype(jnp.float32).sum())
        for function, operand in ((gradient, x), (jax.vmap(call), jnp.stack([x, x]))):
            text = str(jgg.explain(function, operand))
            assert text.count("dequantises") >= matrices
            assert text.count("is differentiated or vectorised") == text.count("dequantises")
        assert "dequantises" not in str(jgg.explain(call, x))


def test_derivatives_are_those_of_dequantised_weights(rng):
    packed = mlp_weights(rng, "mxfp4")
    arrays = list(map(jgg.dequantize, packed))
    x, routing = rows(rng), moe.route(rng.standard_normal((ROWS, EXPERTS)).astype(np.float32), 2)
    for function, given in (
        (lambda x, q: jgg.ragged_dot(x, q, SIZES), [packed[0], arrays[0]]),
        (lambda x, w: moe.dropless_mlp(x, routing, *w), [packed, arrays]),
    ):

        def loss(x, w, function=function):
            return (function(x, w).astype(jnp.float32) ** 2).sum()

        @jax.jit
        def derivatives(x, w, function=function, loss=loss):
            tangent = jax.jvp(lambda x: function(x, w), (x,), (x,))[1]
            return jax.grad(loss)(x, w), tangent

        for got, want in zip(*(derivatives(x, w) for w in given), strict=True):
            same(got, want)
        with pytest.raises(TypeError, match="quantised weights are frozen; differentiate x"):
            jax.grad(loss, 1, allow_int=True)(x, given[0])


def test_vmap_scan_remat_and_export(rng):
    q, x = weights(rng, "int4"), rows(rng, 3, ROWS, EMBED)
    product = partial(jgg.ragged_dot, group_sizes=SIZES)
    want = jnp.stack([product(each, jgg.dequantize(q)) for each in x])
    same(jax.vmap(product, (0, None))(x, q), want)
    same(jax.vmap(jax.checkpoint(product), (0, None))(x, q), want)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), q)
    same(jax.vmap(product)(x, stacked), want)
    same(jax.lax.scan(lambda c, xs: (c, product(*xs)), None, (x, stacked))[1], want)
    exported = jax.export.export(jax.jit(product), disabled_checks=jgg.EXPORT_DISABLED_CHECKS)
    same(jax.export.deserialize(exported(x[0], q).serialize()).call(x[0], q), want[0])


@pytest.mark.parametrize(
    "kind, splits",
    [
        (AxisType.Auto, "rows"),
        (AxisType.Auto, "experts"),
        (AxisType.Auto, "columns"),
        (AxisType.Explicit, "rows"),
        (AxisType.Explicit, "experts"),
    ],
)
def test_whatever_is_split(rng, kind, splits):
    q, x = weights(rng, "mxfp4", (EXPERTS, 128, 256)), rows(rng, ROWS, 128)
    want = jgg.ragged_dot(x, jgg.dequantize(q), SIZES)
    mesh = jax.make_mesh((2,), ("i",), (kind,))
    of_weights = dict(rows=P(), experts=P("i"), columns=P(None, None, "i"))[splits]
    place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
    x = jax.device_put(x, place(P("i") if splits == "rows" else P()))
    packed = jax.device_put(q, jax.tree.map(place, q.specs(of_weights)))
    with jax.set_mesh(mesh):
        same(jax.jit(jgg.ragged_dot)(x, packed, SIZES), want)


@pytest.mark.parametrize("name", ["mxfp4", "int8"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_mlps_whose_rows_are_split(rng, kind, name):
    """Each device computes the MLP of its own rows, and nothing is gathered."""
    packed, x = mlp_weights(rng, name), rows(rng)
    want = jax.jit(jgg.ragged_mlp)(x, *packed, SIZES)
    mesh = jax.make_mesh((2,), ("i",), (kind,))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("i")))
        whole = jax.device_put((*packed, SIZES), NamedSharding(mesh, P()))
        compiled = jax.jit(jgg.ragged_mlp).lower(split, *whole).compile()
        same(compiled(split, *whole), want)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_dequantised_matrices_stay_where_they_are(rng, kind):
    """Each device dequantises its own matrices, and nothing is gathered."""
    packed = weights(rng, "int4", (EXPERTS, 64, 96))
    want = jgg.dequantize(packed)
    mesh = jax.make_mesh((2,), ("i",), (kind,))
    with jax.set_mesh(mesh):
        split = jax.device_put(packed, NamedSharding(mesh, P("i")))
        compiled = jax.jit(jgg.dequantize).lower(split).compile()
        found = compiled(split)
    np.testing.assert_array_equal(found, want)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, P("i")), found.ndim)
    assert "all-gather" not in compiled.as_text()


def test_layers_whose_tokens_are_split(rng):
    packed = mlp_weights(rng, "int8")
    x = rows(rng, 32, EMBED)
    routing = moe.route(rng.standard_normal((32, EXPERTS)).astype(np.float32), 2)
    want = jax.jit(moe.dropless_mlp)(x, routing, *packed)
    mesh = jax.make_mesh((4,), ("data",), (AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        placed = jax.device_put((x, routing, packed), split)
        same(jax.jit(moe.dropless_mlp)(placed[0], placed[1], *placed[2]), want)
    over_experts = moe.expert_parallel(jax.make_mesh((2,), ("expert",)), expert_axis="expert")
    y, _ = jax.jit(over_experts)(x, routing, *packed)
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(want, np.float32), atol=2**-8, rtol=2**-6
    )
