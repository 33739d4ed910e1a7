"""Trials of ragged products, of experts' MLPs, and of functions that move rows."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from tests.stress.drawing import (
    Rng,
    Trial,
    flip,
    pick,
    shape_of_product,
    side,
    sizes_and_offset,
)
from tests.support import group_sizes as sizes_of
from tests.support import mlp, oracle
from tests.support import rows as rows_oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.ops import CONTRACTING, OPS, random, swap

# Dtypes of the operands of ragged products, and the precision if they are float32.
RAGGED_DTYPES = ((BF16, None), (F16, None), (F32, "default"), (F32, "highest"))


def ragged(rng: Rng, implementation: str, most: int) -> Trial:
    """A contracting or noncontracting ragged product, with operands in any layout."""
    op, (dtype, precision) = pick(rng, OPS), pick(rng, RAGGED_DTYPES)
    m, k, n, g = shape_of_product(rng, most)
    lhs, rhs, _ = (random(rng, shape, dtype) for shape in op.shapes(m, k, n, g))
    transposes = dict(transpose_lhs=flip(rng), transpose_rhs=flip(rng))
    shifted, out = flip(rng), pick(rng, (None, F32))

    def function(lhs, rhs, sizes, offset):
        return op.call(
            lhs,
            rhs,
            sizes,
            offset,
            preferred_element_type=out,
            precision=precision,
            implementation=implementation,
            **transposes,
        )

    def judge(drawn, result):
        oracle.check(
            result, op.exact(lhs, rhs, *drawn), product_error=PRODUCT_ERROR.get(precision, 0.0)
        )

    return Trial(
        f"{op} {np.dtype(dtype)} {precision} {(m, k, n, g)} {transposes} {out}",
        function,
        (swap(lhs, transposes["transpose_lhs"]), swap(rhs, transposes["transpose_rhs"])),
        lambda rng: sizes_and_offset(rng, m, g, shifted),
        judge,
    )


def gradient(rng: Rng, implementation: str, most: int) -> Trial:
    """Both cotangents of a ragged product of 16-bit operands."""
    op, dtype = pick(rng, OPS), pick(rng, (BF16, F16))
    m, k, n, g = shape_of_product(rng, most)
    lhs, rhs, cotangent = (random(rng, shape, dtype) for shape in op.shapes(m, k, n, g))

    def function(lhs, rhs, cotangent, sizes, offset):
        return op.cotangents(lhs, rhs, sizes, cotangent, offset, implementation=implementation)

    def judge(drawn, results):
        sizes, offset = drawn
        oracle.check_all(results, op.exact_cotangents(lhs, rhs, sizes, cotangent, offset))

    return Trial(
        f"gradient of {op} {np.dtype(dtype)} {(m, k, n, g)}",
        function,
        (lhs, rhs, cotangent),
        lambda rng: sizes_and_offset(rng, m, g, False),
        judge,
    )


def accumulate(rng: Rng, implementation: str, most: int) -> Trial:
    """A weight gradient that is added to a float32 array."""
    dtype = pick(rng, (BF16, F16))
    m, k, n, g = shape_of_product(rng, most)
    lhs, rhs, total = (random(rng, shape, dtype) for shape in CONTRACTING.shapes(m, k, n, g))
    total = total.astype(np.float32)

    def function(total, lhs, rhs, sizes, offset):
        return jgg.ragged_dot_accumulate(
            total, lhs, rhs, sizes, group_offset=offset, implementation=implementation
        )

    def judge(drawn, result):
        oracle.check(result, oracle.accumulated(total, CONTRACTING.exact(lhs, rhs, *drawn)))

    return Trial(
        f"accumulate {np.dtype(dtype)} {(m, k, n, g)}",
        function,
        (total, lhs, rhs),
        lambda rng: sizes_and_offset(rng, m, g, True),
        judge,
    )


def expert_mlp(rng: Rng, implementation: str, most: int) -> Trial:
    """An MLP of experts, with or without `rows`, and with or without `weights`."""
    dtype = pick(rng, (BF16, F16))
    activation = pick(rng, mlp.ACTIVATIONS)
    experts, tokens = int(rng.integers(1, 9)), side(rng, min(most // 2, 150))
    case = mlp.case(
        rng,
        tokens=tokens,
        embed=side(rng, most, 8),
        hidden=side(rng, most, 8),
        experts=experts,
        dtype=dtype,
        with_rows=flip(rng),
        with_weights=flip(rng),
    )
    m = len(case.on_rows)

    def function(*operands):
        *factors, sizes = operands
        options = dict(rows=case.rows, activation=activation, implementation=implementation)
        weights = dict(weights=factors[4]) if case.weights is not None else {}
        return jgg.ragged_mlp(*factors[:4], sizes, **options, **weights)

    def judge(drawn, result):
        exact = dataclasses.replace(case, sizes=drawn[0]).exact(activation)
        result = np.asarray(result).astype(np.float64)
        assert not result[~exact.any(axis=1)].any()
        error = np.linalg.norm(result - exact)
        assert error <= 8 * float(jnp.finfo(dtype).eps) * np.linalg.norm(exact), error

    return Trial(
        f"mlp {activation} {np.dtype(dtype)} {m} rows, {case.wi_0.shape}",
        function,
        tuple(case.factors),
        lambda rng: (sizes_of.any_kind(rng, m, experts),),
        judge,
    )


def moved_rows(rng: Rng, implementation: str, most: int) -> Trial:
    """A sort by expert, a gather and a weighted sum of rows."""
    tokens, choices = side(rng, most // 2), int(rng.integers(1, 9))
    experts, width = int(rng.integers(1, 65)), side(rng, most)
    dtype = pick(rng, (BF16, F16, F32))
    pairs = rows_oracle.Pairs.random(rng, tokens, choices, tokens * choices)
    x, y = (random(rng, (size, width), dtype) for size in (tokens, tokens * choices))

    def function(x, y, weights, experts_of_pairs):
        options = dict(implementation=implementation)
        rows = moe.gather_rows(x, pairs.token_of_row(), inverse=pairs.row_of_pair, **options)
        total = moe.combine(
            y, pairs.row_of_pair, weights=weights, order=pairs.pair_of_row, **options
        )
        return moe.sort_by_expert(experts_of_pairs, experts, **options), rows, total

    def judge(drawn, results):
        order, rows, total = results
        rows_oracle.check_sorted(order, *drawn, experts)
        want = rows_oracle.gather(x, pairs.token_of_row(), len(pairs.pair_of_row))
        np.testing.assert_array_equal(np.float32(rows), np.float32(want))
        exact = rows_oracle.combine(y, pairs, pairs.weights)
        magnitude = rows_oracle.combine_magnitude(y, pairs, pairs.weights)
        limits = jnp.finfo(dtype)
        allowed = float(limits.eps) * np.abs(exact) + 1e-6 * choices * magnitude
        allowed += float(limits.smallest_subnormal)
        assert (np.abs(np.asarray(total, np.float64) - exact) <= allowed).all()

    return Trial(
        f"rows {np.dtype(dtype)} {(tokens, choices, experts, width)}",
        function,
        (x, y, pairs.weights),
        lambda rng: (rng.integers(-2, experts + 2, tokens * choices).astype(np.int32),),
        judge,
    )
