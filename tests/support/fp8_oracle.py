"""FP8 quantisation in NumPy, and exact products of quantised operands in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tests.support import oracle

BLOCK = 128
TINY = np.finfo(np.float32).tiny


def quantize(x, block_shape, dtype, power_of_two=False):
    """Quantises x [r, c] in blocks to values [r, c] and scales, in float32 operations."""
    x = np.asarray(x).astype(np.float32)
    padded = np.zeros([-(-n // b) * b for n, b in zip(x.shape, block_shape, strict=True)], x.dtype)
    padded[: x.shape[0], : x.shape[1]] = x
    (r, c), (height, width) = padded.shape, block_shape
    blocks = padded.reshape(r // height, height, c // width, width)
    finite = np.isfinite(blocks)
    limit = float(ml_dtypes.finfo(dtype).max)
    largest = np.abs(np.where(finite, blocks, 0)).max(axis=(1, 3), keepdims=True)
    scales = np.maximum(largest * np.float32(1 / limit), np.float32(2.0**-100))
    if power_of_two:
        scales = np.exp2(np.ceil(np.log2(scales.astype(np.float64)))).astype(np.float32)
    scales = np.where(largest < TINY, np.float32(1), scales)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.clip(blocks * (np.float32(1) / scales), -limit, limit)
    values = np.where(finite, scaled, np.nan).astype(dtype)
    return values.reshape(r, c)[: x.shape[0], : x.shape[1]], scales[:, 0, :, 0]


def quantize_groups(x, group_sizes, dtype, power_of_two=False):
    """Quantises x [m, c] to values [b, c, 128] and scales [b, c], transposed blocks of groups."""
    m, c = x.shape
    blocks = -(-m // BLOCK) + min(len(group_sizes), m)
    values, scales = np.zeros((blocks, c, BLOCK), dtype), np.ones((blocks, c), np.float32)
    block = 0
    for group_start, end in oracle.group_rows(group_sizes, 0, len(group_sizes), m):
        for start in range(group_start, end, BLOCK):
            rows = x[start : min(start + BLOCK, end)]
            part, scales[block : block + 1] = quantize(rows, (BLOCK, 1), dtype, power_of_two)
            values[block, :, : len(rows)] = part.T
            block += 1
    return values, scales


def dequantize_groups(values, scales):
    """Returns values [b, c, 128] with scales [b, c] as [128 b, c] in float64."""
    values, scales = np.asarray(values), np.asarray(scales, np.float64)
    rows = values.astype(np.float64) * scales[:, :, None]
    return rows.swapaxes(1, 2).reshape(-1, values.shape[1])


def dequantize(values, scales):
    """Returns values [..., r, c] times their scales in float64.

    Scales are [..., r or r / 128 or 1, c or c / 128 or 1].
    """
    values, scales = np.asarray(values).astype(np.float64), np.asarray(scales, np.float64)
    for axis in (-2, -1):
        size, count = values.shape[axis], scales.shape[axis]
        index = np.arange(size) // (1 if count == size else BLOCK if count > 1 else size)
        scales = np.take(scales, index, axis)
    return values * scales


def noncontracting(lhs, lhs_scale, rhs, rhs_scale, group_sizes, group_offset=0):
    """Returns the exact product of lhs [m, k] and rhs [g, k, n]."""
    operands = dequantize(lhs, lhs_scale), dequantize(rhs, rhs_scale)
    return oracle.ragged_noncontracting(*operands, group_sizes, group_offset)


def contracting(lhs, lhs_scale, rhs, rhs_scale, group_sizes, m, group_offset=0, num_groups=None):
    """Returns the exact product of transposed blocks of rows [b, k, 128] and [b, n, 128]."""
    lhs, rhs = dequantize_groups(lhs, lhs_scale), dequantize_groups(rhs, rhs_scale)
    sizes = [end - start for start, end in oracle.group_rows(group_sizes, 0, len(group_sizes), m)]
    padded = [-(-size // BLOCK) * BLOCK for size in sizes]
    return oracle.ragged_contracting(lhs, rhs, padded, group_offset, num_groups=num_groups)


def relative_error(actual, exact) -> float:
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    return np.linalg.norm(actual - exact) / np.linalg.norm(exact)


def cosine_distance(actual, exact) -> float:
    actual, exact = np.asarray(actual, np.float64).ravel(), np.asarray(exact, np.float64).ravel()
    return 1 - actual @ exact / np.linalg.norm(actual) / np.linalg.norm(exact)


def check(actual, exact: oracle.Exact, *, tolerance=1e-3) -> None:
    """Asserts that a result is close to the exact product of the dequantised operands.

    Elements that accumulate nothing must be zero, and the same elements must be finite in both. The
    relative error of the whole result may be `tolerance`, and that of each group twice as large.
    The error of rounding the result is added to both bounds.
    """
    actual = np.asarray(actual)
    assert actual.shape == exact.value.shape, (actual.shape, exact.value.shape)
    out = actual.astype(np.float64)
    finite = np.isfinite(exact.value)
    np.testing.assert_array_equal(np.isfinite(out), finite)
    assert not out[(exact.depth == 0)].any()
    rounding = float(ml_dtypes.finfo(actual.dtype).eps) / 2
    out, value = np.where(finite, out, 0), np.where(finite, exact.value, 0)
    if value.any():
        assert relative_error(out, value) <= tolerance + rounding / 2
    for block in exact.blocks:
        if value[block].any():
            assert relative_error(out[block], value[block]) <= 2 * tolerance + rounding, block
    magnitude = np.where(finite, exact.magnitude, 1)
    assert np.all(np.abs(out - value) <= (tolerance + rounding) * magnitude + 1e-30)
