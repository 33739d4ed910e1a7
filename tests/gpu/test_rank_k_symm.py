"""Symmetric products that compute one triangle, add diagonals, or take a factor as C."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import F32
from tests.support.families import (
    OTHER,
    SIXTEEN_BITS,
    TENSOR_FLOAT,
    check_update,
    each,
    label,
    rank_k_tile,
    run_update,
)
from tests.support.updates import FORMS, SYMM, SYR2K, SYRK

EVERY = pytest.mark.parametrize(
    "family, update",
    [(family, update) for family in TENSOR_FLOAT for update in (SYRK, SYR2K, SYMM)],
    ids=label,
    indirect=["family"],
)


@OTHER
@FORMS
class TestProducts:
    @each(*SIXTEEN_BITS)
    @pytest.mark.parametrize("result", [None, F32])
    def test_dtypes(self, family, result, uplo, transpose, other, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other, result=result)
        check_update(family, SYMM, rng, (3, 456, 200), **options)

    @each(*TENSOR_FLOAT)
    def test_sizes(self, family, uplo, transpose, other, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other)
        for n in (8, 64, 120, 128, 136, 256, 264, 384, 392, 520, 1032):
            check_update(family, SYMM, rng, (2, n, int(8 * rng.integers(1, 40))), **options)

    @each(*TENSOR_FLOAT)
    def test_off_16_bytes(self, family, uplo, transpose, other, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other, result=F32)
        for n, k in ((1, 1), (37, 51), (129, 7), (255, 333), (132, 36)):
            check_update(family, SYMM, rng, (3, n, k), **options)


@pytest.mark.parametrize("tile", ["wide", "fine"])
@OTHER
@FORMS
@EVERY
def test_diagonals(family, update, tile, uplo, transpose, other, rng):
    """Both tiles add diagonals. Only 16-bit updates have fine tiles."""
    has_fine = family in SIXTEEN_BITS
    options = dict(uplo=uplo, transpose=transpose, other=other, has_diagonal=True)
    with rank_k_tile(tile if has_fine else None):
        for n in (8, 64, 120, 136, 264, 392, 520):
            check_update(family, update, rng, (2, n, int(8 * rng.integers(1, 40))), **options)
        if has_fine:
            check_update(family, update, rng, (2, 136, 72), result=F32, **options)


@EVERY
def test_many_tiles_for_each_processor(family, update, rng):
    check_update(family, update, rng, (3, 2600, 200), other="mirror c", has_diagonal=True)


@EVERY
def test_lists(family, update, rng):
    """The list is longer than a launch takes, and each matrix has scales of its own."""
    sizes = 8 * rng.integers(1, 40, (70, 2))
    a, b = ([family.draw(rng, (2, *size)) for size in sizes] for _ in "ab")
    c = [family.draw(rng, (2, n, n)) for n, _ in sizes]
    alpha, beta, diagonal = (list(family.scales(rng, (70, 2))) for _ in range(3))
    options = dict(alpha=alpha, beta=beta, diagonal=diagonal)
    outs = run_update(family, update, a, b, c, symmetrize_output=True, **options)
    for i, out in enumerate(outs):
        scales = {name: values[i] for name, values in options.items()}
        family.check_update(update, out, a[i], b[i], c[i], symmetrize=True, **scales)


@EVERY
def test_a_factor_may_be_c(family, update, rng):
    """The factor does not change, because the result has its own memory."""
    for n in (136, 520):
        a, b = family.draw(rng, (3, n, n)), family.draw(rng, (3, n, n))
        kept = jnp.asarray(a)
        call = partial(update, **family.options, beta=0.5, symmetrize_output=True)
        out, after = jax.jit(lambda a, b, call=call: (call(a, b, a), a + 0))(kept, b)
        family.check_update(update, out, a, b, a, beta=0.5, symmetrize=True)
        np.testing.assert_array_equal(after, a)
        np.testing.assert_array_equal(kept, a)


@each(*TENSOR_FLOAT)
def test_repeats_bitwise(family, rng):
    a, b = family.draw(rng, (5, 520, 1032)), family.draw(rng, (5, 520, 1032))
    first = np.asarray(run_update(family, SYMM, a, b))
    for _ in range(20):
        np.testing.assert_array_equal(run_update(family, SYMM, a, b), first)


@each(*TENSOR_FLOAT)
def test_square_of_a_matrix(family, rng):
    """The product of a symmetric matrix with itself is its update, up to the order of sums."""
    a = family.draw(rng, (3, 392, 392))
    a = (a + np.swapaxes(a, 1, 2)).astype(family.dtype)
    square = run_update(family, SYRK, a, a, symmetrize_output=True)
    product = run_update(family, SYMM, a, jnp.array(a), symmetrize_output=True)
    np.testing.assert_allclose(
        np.asarray(product, np.float64), np.asarray(square, np.float64), rtol=2e-2, atol=2e-2
    )


@each(*TENSOR_FLOAT)
def test_gradients(family, rng):
    operands = tuple(family.draw(rng, (2, 136, 136)).astype(F32) for _ in range(3))
    weights = family.draw(rng, (2, 136, 136)).astype(F32)

    def loss(options, dtype, operands, scales):
        a, b, c = (x.astype(dtype) for x in operands)
        alpha, beta, diagonal = scales
        out = jgg.grouped_symm_product(
            a, b, c, alpha=alpha, beta=beta, diagonal=diagonal, symmetrize_output=True,
            preferred_element_type=F32, **dict(options),
        )  # fmt: skip
        return jnp.vdot(weights, out)

    gradient = jax.jit(jax.grad(loss, (2, 3)), static_argnums=(0, 1))
    reference = family.options | dict(implementation="reference")
    with jax.default_matmul_precision("highest"):
        got = gradient(tuple(family.options.items()), family.dtype, operands, (0.5, -2.0, 3.0))
        want = gradient(tuple(reference.items()), F32, operands, (0.5, -2.0, 3.0))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert np.linalg.norm(x - y) <= 2e-2 * np.linalg.norm(y)
