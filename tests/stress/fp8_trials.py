"""Trials of FP8 products, and of their gradients."""

import jax
import numpy as np

import jax_grouped_gemm as jgg
from tests.stress.drawing import Rng, Trial, flip, pick, shape_of_product, sizes_and_offset
from tests.support import fp8_oracle
from tests.support import group_sizes as sizes_of
from tests.support.dtypes import BF16, E4M3, E5M2, F16, F32
from tests.support.fp8_products import fp8, scales
from tests.support.ops import OPS, random

# The relative error of products of normal values, rounded to the three bits of FP8 mantissas.
FP8_ERROR = 0.06


def scaled(rng: Rng, implementation: str, most: int) -> Trial:
    """A product of FP8 operands with random scales."""
    m, k, n, g = shape_of_product(rng, most)
    lhs_dtype, rhs_dtype = pick(rng, (E4M3, E5M2)), pick(rng, (E4M3, E5M2))
    out = pick(rng, (BF16, F16, F32))
    lhs, rhs = fp8(rng, (m, k), lhs_dtype), fp8(rng, (g, n, k), rhs_dtype)
    rowwise = flip(rng)
    k_blocks, n_blocks = -(-k // 128), -(-n // 128)
    # Divide by 8, so that float16 results stay in range.
    lhs_scale = scales(rng, (m, 1 if rowwise else k_blocks)) / 8
    rhs_scale = scales(rng, (g, n) if rowwise else (g, n_blocks, k_blocks)) / 8

    def function(*operands):
        *operands, sizes, offset = operands
        return jgg.scaled_ragged_dot(
            *operands,
            sizes,
            lhs_scaling="1xk" if rowwise else "1x128",
            transpose_rhs=True,
            preferred_element_type=out,
            group_offset=offset,
            implementation=implementation,
        )

    def judge(drawn, result):
        by_column = rhs_scale[:, :, None] if rowwise else rhs_scale
        swapped = rhs.swapaxes(1, 2), by_column.swapaxes(1, 2)
        fp8_oracle.check(result, fp8_oracle.noncontracting(lhs, lhs_scale, *swapped, *drawn))

    return Trial(
        f"scaled {np.dtype(lhs_dtype)} {np.dtype(rhs_dtype)} {(m, k, n, g)} rowwise={rowwise}",
        function,
        (lhs, lhs_scale, rhs, rhs_scale),
        lambda rng: sizes_and_offset(rng, m, g, True),
        judge,
    )


def scaled_gradient(rng: Rng, implementation: str, most: int) -> Trial:
    """A weight gradient of operands that `quantize_ragged` has quantised and transposed."""
    m, k, n, g = shape_of_product(rng, most)
    x, dy = (random(rng, shape, BF16) for shape in ((m, k), (m, n)))

    def function(x, dy, sizes):
        options = dict(implementation=implementation)
        rows, cotangents = (jgg.quantize_ragged(y, sizes, **options) for y in (x, dy))
        product = jgg.scaled_ragged_dot_contracting(
            *rows[2:], *cotangents[2:], sizes, num_rows=m, **options
        )
        return rows, cotangents, product

    def judge(drawn, results):
        (sizes,), (rows, cotangents, product) = drawn, results
        for source, quantized in ((x, rows), (dy, cotangents)):
            want = fp8_oracle.quantize(source, (1, 128), E4M3)
            want += fp8_oracle.quantize_groups(source, sizes, E4M3)
            for got, exact in zip(quantized, want, strict=True):
                np.testing.assert_array_equal(np.float32(got), np.float32(exact))
        columns = [np.asarray(y) for y in (*rows[2:], *cotangents[2:])]
        fp8_oracle.check(product, fp8_oracle.contracting(*columns, sizes, m))

    return Trial(
        f"scaled gradient {(m, k, n, g)}",
        function,
        (x, dy),
        lambda rng: (sizes_of.any_kind(rng, m, g),),
        judge,
    )


def fp8_training(rng: Rng, implementation: str, most: int) -> Trial:
    """`fp8_ragged_dot` and the cotangents of both operands, to FP8's accuracy."""
    m, k, n, g = shape_of_product(rng, most)
    op = OPS[0]
    lhs, rhs, cotangent = (random(rng, shape, BF16) for shape in op.shapes(m, k, n, g))

    def function(lhs, rhs, cotangent, sizes):
        out, vjp = jax.vjp(
            lambda lhs, rhs: jgg.fp8_ragged_dot(lhs, rhs, sizes, implementation=implementation),
            lhs,
            rhs,
        )
        return out, *vjp(cotangent)

    def judge(drawn, results):
        exact = op.exact(lhs, rhs, *drawn), *op.exact_cotangents(lhs, rhs, *drawn, cotangent)
        for result, want in zip(results, exact, strict=True):
            result = np.asarray(result).astype(np.float64)
            assert not result[want.magnitude == 0].any()
            # Compare with magnitudes, because errors of few products do not average out.
            error = np.linalg.norm(result - want.value)
            assert error <= FP8_ERROR * np.linalg.norm(want.magnitude), error

    return Trial(
        f"fp8_ragged_dot {(m, k, n, g)}",
        function,
        (lhs, rhs, cotangent),
        lambda rng: (sizes_of.any_kind(rng, m, g),),
        judge,
    )
