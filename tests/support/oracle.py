"""Exact ragged matmuls in float64 NumPy, and the error a correct result may have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass
class Exact:
    """An exact result and the inputs of its error bound, all of the result's shape.

    Attributes:
      value: the float64 result.
      magnitude: the contraction of the operands' absolute values. Rounding errors of an
        accumulation scale with it. It is zero exactly where no product is accumulated.
      depth: the number of accumulated products.
      blocks: indices of the parts (one for each non-empty group) whose error is judged together.
    """

    value: np.ndarray
    magnitude: np.ndarray
    depth: np.ndarray
    blocks: list[tuple]


def group_rows(group_sizes, group_offset: int, num_groups: int, m: int) -> list[tuple[int, int]]:
    """Returns the row range of each local group. Negative sizes count as zero; groups end at m."""
    ends = [0]
    for size in group_sizes:
        ends.append(min(ends[-1] + max(int(size), 0), m))
    windows = []
    for index in range(int(group_offset), int(group_offset) + num_groups):
        inside = 0 <= index < len(group_sizes)
        windows.append((ends[index], ends[index + 1]) if inside else (0, 0))
    return windows


def ragged_noncontracting(
    lhs, rhs, group_sizes, group_offset=0, *, transpose_lhs=False, transpose_rhs=False
) -> Exact:
    """Returns out[r] = lhs[r] @ rhs[group of r]. Operands may have a leading batch dimension."""
    lhs, rhs = _as_float64(lhs, transpose_lhs), _as_float64(rhs, transpose_rhs)

    def one(lhs, rhs, group_sizes, group_offset):
        m, (g, _, n) = lhs.shape[0], rhs.shape
        out = _empty((m, n))
        for group, (start, end) in enumerate(group_rows(group_sizes, group_offset, g, m)):
            if end > start:
                _accumulate(out, (slice(start, end),), lhs[start:end], rhs[group])
        return out

    return _map_batch(one, (lhs, 2), (rhs, 3), (group_sizes, 1), (group_offset, 0))


def ragged_contracting(
    lhs,
    rhs,
    group_sizes,
    group_offset=0,
    *,
    num_groups=None,
    transpose_lhs=False,
    transpose_rhs=False,
) -> Exact:
    """Returns out[i] = lhs[rows of i].T @ rhs[rows of i]. Operands may have a batch dimension."""
    lhs, rhs = _as_float64(lhs, transpose_lhs), _as_float64(rhs, transpose_rhs)
    num_groups = np.shape(group_sizes)[-1] if num_groups is None else num_groups

    def one(lhs, rhs, group_sizes, group_offset):
        (m, k), (_, n) = lhs.shape, rhs.shape
        out = _empty((num_groups, k, n))
        for group, (start, end) in enumerate(group_rows(group_sizes, group_offset, num_groups, m)):
            if end > start:
                _accumulate(out, (group,), lhs[start:end].T, rhs[start:end])
        return out

    return _map_batch(one, (lhs, 2), (rhs, 2), (group_sizes, 1), (group_offset, 0))


def accumulated(accumulator, product: Exact) -> Exact:
    """Returns the sum of an accumulator and a product."""
    accumulator = np.asarray(accumulator).astype(np.float64)
    return dataclasses.replace(
        product,
        value=accumulator + product.value,
        magnitude=np.abs(accumulator) + product.magnitude,
        depth=product.depth + 1,
    )


def noncontracting_cotangents(lhs, rhs, group_sizes, cotangent, group_offset=0):
    """Returns the cotangents of ragged_noncontracting's lhs [m, k] and rhs [g, k, n]."""
    num_groups = np.shape(rhs)[-3]
    return (
        ragged_noncontracting(cotangent, rhs, group_sizes, group_offset, transpose_rhs=True),
        ragged_contracting(lhs, cotangent, group_sizes, group_offset, num_groups=num_groups),
    )


def contracting_cotangents(lhs, rhs, group_sizes, cotangent, group_offset=0):
    """Returns the cotangents of ragged_contracting's lhs [m, k] and rhs [m, n]."""
    return (
        ragged_noncontracting(rhs, cotangent, group_sizes, group_offset, transpose_rhs=True),
        ragged_noncontracting(lhs, cotangent, group_sizes, group_offset),
    )


def check(actual, exact: Exact, *, accumulator=np.float32, product_error=0.0) -> None:
    """Asserts that `actual` is `exact` accumulated in `accumulator` and rounded once.

    Each accumulated product may have the relative error `product_error`.

    Element by element, the error may be one rounding to the result's dtype plus the worst case of
    an accumulation that truncates each partial sum, as tensor cores do. An element that accumulates
    nothing must be zero, and an element must be infinite or NaN exactly if the exact one is. The
    error of each group as a whole may be as large as rounding errors are on average. This bound is
    several times tighter, and detects an accumulation in too narrow a type.
    """
    actual = np.asarray(actual)
    unit, accumulator_unit = _unit_roundoff(actual.dtype), _unit_roundoff(accumulator)
    assert actual.shape == exact.value.shape, (actual.shape, exact.value.shape)
    out = actual.astype(np.float64)

    finite = np.isfinite(exact.value)
    np.testing.assert_array_equal(out[~finite], exact.value[~finite])
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(out - exact.value), 0)
        smallest = float(ml_dtypes.finfo(actual.dtype).smallest_subnormal)
        tolerance = (
            unit * np.abs(exact.value)
            + (2 * accumulator_unit * exact.depth + product_error) * exact.magnitude
            + smallest * (exact.magnitude > 0)
        )
        wrong = finite & ~(error <= tolerance)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements are wrong, the first at {at}: "
            f"{out[at]} for {exact.value[at]}, allowed error {tolerance[at]}"
        )

    for block in exact.blocks:
        value, depth = exact.value[block], exact.depth[block].max()
        norm = np.linalg.norm(value)
        if not np.isfinite(norm) or norm == 0:
            continue
        # Rounding a random value costs 0.38 of the unit roundoff on average, and more in blocks
        # whose norm is that of a few values. The hardware may truncate after every 16 products,
        # always downwards.
        concentration = np.linalg.norm((value / norm) ** 2)  # 1 / sqrt(size) if all are equal
        rounding = unit * min(1, 0.5 + 2 * concentration)
        bound = rounding + 2 * accumulator_unit * (1 + depth / 4) + product_error
        # This bounds the sum of errors of random sign, and the rounding of subnormal results.
        random = 2 * product_error * np.linalg.norm(exact.magnitude[block]) / np.sqrt(depth)
        bound += (random + smallest * np.sqrt(value.size)) / norm
        relative = np.linalg.norm(error[block]) / norm
        assert relative <= bound, f"group {block}: relative error {relative:.3g} > {bound:.3g}"


def check_all(actual, exact, **options) -> None:
    """Calls `check` for each of several results."""
    assert len(actual) == len(exact)
    for one, want in zip(actual, exact, strict=True):
        check(one, want, **options)


def _as_float64(operand, transpose: bool) -> np.ndarray:
    operand = np.asarray(operand).astype(np.float64)
    return np.swapaxes(operand, -1, -2) if transpose else operand


def _empty(shape) -> Exact:
    return Exact(np.zeros(shape), np.zeros(shape), np.zeros(shape), [])


def _accumulate(out: Exact, block: tuple, lhs: np.ndarray, rhs: np.ndarray) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        out.value[block] = lhs @ rhs
        out.magnitude[block] = np.abs(lhs) @ np.abs(rhs)
    out.depth[block] = lhs.shape[1]
    out.blocks.append(block)


def _map_batch(function, *operands_and_ranks) -> Exact:
    """Maps `function` over the leading dimension of the operands that have one."""
    operands = [(np.asarray(x), rank) for x, rank in operands_and_ranks]
    sizes = {x.shape[0] for x, rank in operands if x.ndim > rank}
    if not sizes:
        return function(*(x for x, _ in operands))
    (size,) = sizes
    results = [
        function(*(x[b] if x.ndim > rank else x for x, rank in operands)) for b in range(size)
    ]
    return Exact(
        np.stack([r.value for r in results]),
        np.stack([r.magnitude for r in results]),
        np.stack([r.depth for r in results]),
        [(b, *block) for b, r in enumerate(results) for block in r.blocks],
    )


def _unit_roundoff(dtype) -> float:
    return float(ml_dtypes.finfo(dtype).eps) / 2
