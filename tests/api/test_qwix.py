"""Arrays of qwix keep their codes and scales, and arrays that no format can have are refused."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_grouped_gemm as jgg

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


class QArray(NamedTuple):
    """The fields of `qwix.QArray`."""

    qvalue: jax.Array
    scale: jax.Array
    zero_point: jax.Array | None = None
    qtype: object = None


def of_tiles(x, shape):
    """Returns an array of `shape`, in which each element has the number x of its tile."""
    for axis, size in enumerate(shape):
        x = np.repeat(x, size // x.shape[axis], axis)
    return x


@pytest.mark.parametrize(
    "dtype, scale_shape",
    [
        (jnp.float4_e2m1fn, (2, 8, 384)),
        (jnp.int4, (2, 8, 384)),
        (jnp.int4, (2, 2, 384)),
        (jnp.int4, (2, 1, 384)),
        (jnp.int4, (1, 4, 1)),
        (jnp.int8, (2, 1, 384)),
        (jnp.int8, (2, 1, 3)),
        (E4M3, (2, 1, 384)),
        (E4M3, (1, 1, 1)),
        (E4M3, (2, 2, 3)),
        (E4M3, (2, 2, 1)),
    ],
    ids=str,
)
def test_qwix_by_its_fields(rng, dtype, scale_shape):
    shape = 2, 256, 384
    dtype = np.dtype(dtype)
    is_e2m1 = dtype == jnp.float4_e2m1fn
    if is_e2m1:
        scale = np.exp2(rng.integers(-9, 9, scale_shape)).astype(np.float32)
        scale[0, 0, :2] = 2.0**-127, 2.0**124
    else:
        scale = rng.uniform(0.5, 2, scale_shape).astype(np.float32)
    if dtype == jnp.int4:
        scale = scale.astype(BF16).astype(np.float32)
    integers = dtype == jnp.int8
    values = rng.integers(-128, 128, shape) if integers else rng.uniform(-6, 6, shape).round()
    values = values.astype(dtype)
    for zeros in (None, rng.integers(-8, 8, scale_shape)) if dtype == jnp.int4 else (None,):
        zero = None if zeros is None else jnp.asarray(zeros.astype(dtype))
        array = jnp.asarray(values), jnp.asarray(scale), zero
        q = jgg.checkpoints.qwix(QArray(*array, "mxfp4" if is_e2m1 else dtype))
        exact = values.astype(np.float32) - (0 if zeros is None else of_tiles(zeros, shape))
        np.testing.assert_array_equal(
            jgg.dequantize(q, np.float32), (exact * of_tiles(scale, shape)).astype(np.float32)
        )


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "dtype, shape, scale_shapes, name",
    [
        (jnp.int8, (2, 0, 64), [(2, 0, 64), (2, 1, 64), (1, 0, 1)], "int8"),
        (jnp.int8, (2, 64, 0), [(2, 1, 0), (1, 1, 1)], "int8"),
        (jnp.int8, (0, 0, 0), [(0, 0, 0), (1, 1, 1)], "int8"),
        (jnp.int4, (2, 0, 64), [(2, 0, 64), (2, 1, 64)], "int4"),
        (jnp.int4, (2, 256, 0), [(2, 2, 0), (2, 1, 1)], "int4"),
        (E4M3, (2, 0, 64), [(2, 0, 64), (2, 1, 1)], "fp8"),
        (E4M3, (2, 256, 0), [(2, 2, 0)], "fp8_128x128"),
        (jnp.float4_e2m1fn, (2, 0, 64), [(2, 0, 64), (2, 1, 64)], "mxfp4"),
        (jnp.float4_e2m1fn, (2, 64, 0), [(2, 2, 0)], "mxfp4"),
    ],
    ids=str,
)
def test_empty_arrays_are_as_quantize_makes_them(dtype, shape, scale_shapes, name, traced):
    values = jnp.zeros(shape, dtype)
    layout = "packed" if name.startswith("fp8") else None
    for scale_shape in scale_shapes:
        for has_zeros in (False, True) if name == "int4" else (False,):
            zeros = jnp.zeros(scale_shape, dtype) if has_zeros else None
            array = QArray(values, jnp.ones(scale_shape), zeros)
            read = jgg.checkpoints.qwix
            q = jax.jit(read)(array) if traced else read(array)
            want = jgg.quantize(jnp.zeros(shape), name, layout=layout, zero_points=has_zeros)
            assert q.shape == shape and q.format == want.format
            jax.tree.map(np.testing.assert_array_equal, q, want)


def test_qwix_names_the_operand():
    int8, int4 = (jnp.ones((4, 256, 64), dtype) for dtype in (jnp.int8, jnp.int4))
    ones = jnp.ones((4, 1, 64))
    shapes = r"scale must divide those of qvalue \(4, 256, 64\).*k and n must be 1 or equal, got"
    cases = [
        (QArray(int8, ones[:2]), shapes + r" \(2, 1, 64\)"),
        (QArray(int8, ones[:0]), shapes + r" \(0, 1, 64\)"),
        (QArray(int8, ones[:, :0]), shapes + r" \(4, 0, 64\)"),
        (QArray(int8, ones[0]), shapes + r" \(1, 64\)"),
        (QArray(int4, ones, 0), "zero_point must be a JAX or NumPy array, got int: 0"),
        (QArray(int8, 1.0), "scale must be a JAX or NumPy array, got float: 1.0"),
        *(
            (QArray(values, ones.astype(dtype)), f"scale must be floating, got {dtype}")
            for values in (int8, int4, int8.astype(E4M3), int8.astype(jnp.float4_e2m1fn))
            for dtype in ("complex64", "int32", "bool")
        ),
        *(
            (QArray(int4, ones, ones.astype(dtype)), f"zero_point must be integers, got {dtype}")
            for dtype in ("complex64", "bool")
        ),
    ]
    for array, message in cases:
        with pytest.raises(TypeError, match=message):
            jgg.checkpoints.qwix(array)


def test_qwix_refusals(rng):
    int8, ones = jnp.ones((2, 256, 64), jnp.int8), jnp.ones((2, 1, 64))
    cases = [
        (QArray(int8, jnp.ones((2, 2, 64))), ValueError, "int8 with scales of 128 along k and 1"),
        (QArray(int8, ones, jnp.ones((2, 1, 64), jnp.int8)), ValueError, "int8 with zero points"),
        (QArray(int8.astype(jnp.int4), ones, None, "nf4"), ValueError, "no format has nf4 values"),
        (QArray(int8, jnp.ones((2, 3, 64))), TypeError, r"must divide.*\(2, 256, 64\)"),
        (QArray(int8.astype(jnp.float4_e2m1fn), jnp.full((2, 8, 64), 3.0)), ValueError, "powers"),
        *(
            (
                QArray(int8.astype(jnp.float4_e2m1fn), jnp.full((2, 8, 64), x)),
                ValueError,
                "2\\^-127",
            )
            for x in (-1.0, 0.0, 2.0**-128)
        ),
        *(
            (
                QArray(int8.astype(jnp.int4), ones, jnp.full((2, 1, 64), x)),
                ValueError,
                "int4 with zero points that are not integers from -8 to 7",
            )
            for x in (-9, 8, 0.5)
        ),
        (ones, TypeError, "array must be a qwix.QArray"),
    ]
    for array, error, message in cases:
        with pytest.raises(error, match=message):
            jgg.checkpoints.qwix(array)
    with pytest.raises(TypeError, match=r"rhs must be.*QArray: checkpoints.qwix\(\)"):
        jgg.ragged_dot(jnp.ones((4, 256)), QArray(int8, ones), jnp.array([1, 3]))


def test_qwix_itself(rng):
    library = pytest.importorskip("qwix")
    w = rng.standard_normal((2, 256, 384)).astype(np.float32)
    for qtype, tiles in (
        ("mxfp4", {1: 32}),
        (jnp.int4, {1: 64}),
        (jnp.int8, {}),
        (jnp.float8_e4m3fn, {1: 128, 2: 128}),
    ):
        channels = {0, 2} - tiles.keys()
        theirs = library.quantize(w, qtype, channelwise_axes=channels, tiled_axes=tiles)
        got = np.asarray(jgg.dequantize(jgg.checkpoints.qwix(theirs), np.float32))
        want = library.dequantize(theirs)
        np.testing.assert_allclose(got, want, rtol=2**-8 if qtype == jnp.int4 else 1e-6)
