"""Products of two FP8 operands, and recipes with weights that are in FP8."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.support.quantized import EMBED, EXPERTS, HIDDEN, SIZES, grouped, routed

OF_ROWS = ["fp8_1x128", "fp8_row", "fp8_tensor"]
OF_WEIGHTS = ["fp8_128x128", "columns", "fp8_tensor"]
# All pairs of scalings. Every other pair has transposed weights, so that each scaling is tested
# with both layouts. This also holds among the pairs whose scales are constant along k.
SCALINGS = [
    (rows, weights, (i + j) % 2 == 1)
    for i, rows in enumerate(OF_ROWS)
    for j, weights in enumerate(OF_WEIGHTS)
]


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


@pytest.mark.parametrize("rows_format, weights_format, transposed", SCALINGS)
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
        SIZES,
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

    @jax.jit
    def results(x, *weights):
        y, pullback = jax.vjp(lambda x: layer(x, routing, *weights), x)
        hidden = jgg.gated_ragged_dot(x, *weights[:2], group_sizes=SIZES, recipe=jgg.Recipe())
        return y, pullback(dy)[0], hidden

    found, wanted = results(x, *q), results(x, *arrays)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match="quantised weights are frozen"):
        jax.grad(lambda wo: layer(x, routing, *q[:2], wo).sum())(q[2])
    mesh = jax.make_mesh((2,), ("expert",), (jax.sharding.AxisType.Auto,))
    many = jax.jit(moe.expert_parallel(mesh, expert_axis="expert", recipe=jgg.Recipe()))
    np.testing.assert_allclose(many(x, routing, *q)[0], wanted[0], atol=1e-6)
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
