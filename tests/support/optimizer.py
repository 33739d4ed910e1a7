"""Steps of an optimiser in float64, and the exact bits of its FP8 forms."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src.optimizer.fused import Weights
from jax_grouped_gemm._src.optimizer.problem import AdamwScalars
from tests.support import fp8_oracle

HALF_ULP = 2.0**-24  # of float32, relative
ROUNDINGS = 8
"""The most roundings of operations that lead to a float32 result.

Each rounding may have an error of `HALF_ULP` times the sum of the magnitudes of the result's terms.
"""

# [matrices, k, n], with whole blocks, partial blocks, and rows that are not whole vectors.
SHAPES = [(3, 128, 256), (2, 300, 136), (1, 129, 1000), (2, 64, 13), (1, 257, 1), (4, 256, 384)]


def scalars(rng, *, applies=1.0, nesterov=False, eps_root=0.0) -> AdamwScalars:
    """Returns the scalars of a random step of AdamW."""
    b1, b2, count = rng.uniform(0.8, 0.95), rng.uniform(0.9, 0.999), int(rng.integers(1, 50))
    rate = 10.0 ** rng.uniform(-4, -1)
    ahead = b1 / (1 - b1 ** (count + 1)) if nesterov else 1 / (1 - b1**count)
    numbers = AdamwScalars(
        applies=applies,
        gradient_factor=rng.uniform(0.1, 2),
        mean_decay=b1,
        mean_share=1 - b1,
        square_decay=b2,
        square_share=1 - b2,
        square_factor=1 / (1 - b2**count),
        inner_epsilon=eps_root,
        epsilon=1e-8,
        mean_rate=rate * ahead,
        gradient_rate=rate * (1 - b1) / (1 - b1**count) if nesterov else 0.0,
        decay=rate * 0.1,
    )
    return AdamwScalars(*(np.float32(x) for x in numbers))


def matrices(rng, shape, dtype=np.float32):
    """Returns matrices of numbers of different magnitudes, of which some are zero."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, shape))
    return np.where(rng.random(shape) < 0.02, 0, x).astype(dtype)


def garbage(rng, shape, dtype):
    """Returns an array of random bits."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return rng.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def weights(rng, shape, dtype, parts=1, copy=None) -> list[Weights]:
    """Returns a matrix for each part. The parts share FP8 forms, which are filled with garbage."""
    g, k, n = shape
    rows, blocks = -(-k // 128), -(-n // 128)
    pitch = n if parts == 1 else parts * blocks * 128
    forms = (
        garbage(rng, (g, k, pitch), dtype),
        garbage(rng, (g, rows, parts * blocks), np.float32),
        garbage(rng, (g, pitch, k), dtype),
        garbage(rng, (g, parts * blocks, rows), np.float32),
    )
    return [
        Weights(matrices(rng, shape), forms, None if copy is None else garbage(rng, shape, copy))
        for _ in range(parts)
    ]


def adamw(s: AdamwScalars, gradient, mean, square, master):
    """Returns (exact, sum of magnitudes) of the new mean, square and weights, in float64."""
    s = AdamwScalars(*map(float, s))
    g, m, v, w = (np.asarray(x).astype(np.float64) for x in (gradient, mean, square, master))
    g = g * s.gradient_factor
    m = s.mean_share * g, s.mean_decay * m
    v = s.square_share * g * g, s.square_decay * v
    size = np.sqrt(sum(v) * s.square_factor + s.inner_epsilon) + s.epsilon
    change = s.mean_rate * m[0] / size, s.mean_rate * m[1] / size, s.gradient_rate * g / size
    w = w, *(-x for x in change), -s.decay * w
    return [(sum(x), sum(map(np.abs, x))) for x in (m, v, w)]


def assert_close(got, exact_and_terms, dtype=np.float32):
    """Asserts that `got` is exact up to rounding, first to float32, then to `dtype`."""
    exact, terms = exact_and_terms
    got = np.asarray(got)
    assert got.dtype == dtype
    bound = ROUNDINGS * HALF_ULP * terms + np.finfo(np.float32).tiny
    if dtype != np.float32:
        bound = bound + float(jnp.finfo(dtype).eps) / 2 * np.abs(exact) * 1.01
    error = np.abs(got.astype(np.float64) - exact)
    assert np.all(error <= bound), (error / bound).max()


def assert_same_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


def forms_of(masters, dtype, power_of_two=False):
    """Returns values and scales of joined matrices [g, k, n], and the transposes of both."""
    masters = [np.asarray(x) for x in masters]
    if len(masters) > 1:
        masters = [np.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 128))) for x in masters]
    pairs = [
        fp8_oracle.quantize(x, (128, 128), dtype, power_of_two)
        for x in np.concatenate(masters, axis=2)
    ]
    values, scales = (np.stack(x) for x in zip(*pairs, strict=True))
    return values, scales, np.swapaxes(values, 1, 2), np.swapaxes(scales, 1, 2)


def assert_forms(got: Weights, masters, dtype, power_of_two=False):
    """Asserts the exact bits of the forms of all masters, and that a copy is a rounded master."""
    for form, want in zip(got.forms, forms_of(masters, dtype, power_of_two), strict=True):
        assert_same_bits(form, want)
    if got.copy is not None:
        with np.errstate(over="ignore"):
            assert_same_bits(got.copy, np.asarray(got.master).astype(got.copy.dtype))
