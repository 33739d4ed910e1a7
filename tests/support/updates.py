"""Rank-k and rank-2k updates through the public API, and their exact results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import oracle


@dataclass(frozen=True)
class Update:
    """One of the update functions."""

    name: str
    hermitian: bool
    two_operands: bool
    one_product: bool = False

    def __repr__(self) -> str:
        return self.name

    def __call__(self, a, b, c=None, **options):
        """Calls the update, with `beta` only if there is a c."""
        if c is None:
            options.pop("beta", None)
        function = getattr(jgg, f"grouped_{self.name}")
        return function(a, b, c, **options) if self.two_operands else function(a, c, **options)

    def exact(self, a, b, *, alpha=1.0, transpose=False) -> np.ndarray:
        """Returns both triangles of the update of float64 or complex128 operands [..., n, k]."""
        a, b = (_swap(x) if transpose else x for x in (a, b))
        if not self.two_operands:
            return alpha * a @ self.flip(a)
        if self.one_product:
            return alpha * a @ _swap(b)
        other = np.conj(alpha) if self.hermitian else alpha
        return alpha * a @ self.flip(b) + other * b @ self.flip(a)

    def flip(self, x):
        return _swap(np.conj(x)) if self.hermitian else _swap(x)


SYRK = Update("syrk", hermitian=False, two_operands=False)
HERK = Update("herk", hermitian=True, two_operands=False)
SYR2K = Update("syr2k", hermitian=False, two_operands=True)
HER2K = Update("her2k", hermitian=True, two_operands=True)
UPDATES = (SYRK, HERK, SYR2K, HER2K)
SYMM = Update("symm_product", hermitian=False, two_operands=True, one_product=True)
FORMS = pytest.mark.parametrize(
    "uplo, transpose", [(u, t) for u in ("lower", "upper") for t in (False, True)]
)


def _swap(x):
    return np.swapaxes(x, -1, -2)


def triangle(n: int, uplo: str) -> np.ndarray:
    """Returns the mask of the computed triangle, bool [n, n]."""
    return np.tri(n, dtype=bool) if uplo == "lower" else np.tri(n, dtype=bool).T


def full(update: Update, inside: np.ndarray, outside, uplo: str, symmetrize: bool) -> np.ndarray:
    """Returns `inside` in its computed triangle, and the mirror image or `outside` in the other."""
    if symmetrize:
        outside = update.flip(inside)
    return np.where(triangle(inside.shape[-1], uplo), inside, outside)


def check_real(
    update,
    out,
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=0.0,
    diagonal=0.0,
    uplo="lower",
    symmetrize=False,
    transpose=False,
    product_error=0.0,
) -> None:
    """Asserts that a result [g, n, n] of real operands is right, in both triangles.

    The computed triangle may have the errors of an accumulation in float32, of products that may
    have the relative error `product_error`. The other triangle has to be exactly c's, zero, or the
    mirror image.
    """
    out = np.asarray(out)
    inside = triangle(out.shape[-1], uplo)
    _check_other_triangle(update, out, c, inside, symmetrize)

    a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
    alpha, beta = (np.asarray(x, np.float64).reshape(-1, 1, 1) for x in (alpha, beta))
    value = alpha * update.exact(a, b, transpose=transpose)
    magnitude = np.abs(alpha) * update.exact(np.abs(a), np.abs(b), transpose=transpose)
    if c is not None:
        c = np.where(beta == 0, 0, np.asarray(c).astype(np.float64))
        value, magnitude = value + beta * c, magnitude + np.abs(beta * c)
    added = np.reshape(diagonal, (-1, 1, 1)) * np.eye(value.shape[-1])
    value, magnitude = value + added, magnitude + np.abs(added)
    k = a.shape[-2 if transpose else -1]
    products = 2 if update.two_operands and not update.one_product else 1
    depth = np.full_like(value, products * k + 2)
    pick = [np.where(inside, x, 0) for x in (out, value, magnitude, depth)]
    # Leave out the diagonal, whose squares would outweigh everything else.
    n = out.shape[-1]
    off_diagonal = inside & ~np.eye(n, dtype=bool)
    blocks = [(i, off_diagonal) for i in range(len(out))] if n >= 32 else []
    oracle.check(pick[0], oracle.Exact(*pick[1:], blocks), product_error=product_error)


def check_double(
    update,
    out,
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=0.0,
    uplo="lower",
    symmetrize=False,
    transpose=False,
) -> None:
    """Asserts that a result [g, n, n] was accumulated in float64 and rounded to its dtype.

    The other triangle has to be exactly c's, zero, or the mirror image. Hermitian diagonals have to
    be real.
    """
    out = np.asarray(out)
    inside = triangle(out.shape[-1], uplo)
    _check_other_triangle(update, out, c, inside, symmetrize)
    if update.hermitian:
        assert not np.diagonal(out, axis1=-2, axis2=-1).imag.any()

    wide = np.complex128 if np.iscomplexobj(out) else np.float64
    a, b = (np.asarray(x).astype(wide) for x in (a, b))
    alpha, beta = (np.asarray(x, wide).reshape(-1, 1, 1) for x in (alpha, beta))
    value = update.exact(a, b, alpha=alpha, transpose=transpose)
    magnitude = np.abs(alpha) * update.exact(np.abs(a), np.abs(b), transpose=transpose)
    if c is not None:
        c = np.where(beta == 0, 0, np.asarray(c).astype(wide))
        if update.hermitian:
            c = np.where(np.eye(out.shape[-1], dtype=bool), c.real, c)
        value, magnitude = value + beta * c, magnitude + np.abs(beta * c)

    depth = (2 if update.two_operands else 1) * a.shape[-2 if transpose else -1] + 2
    unit, rounding = np.finfo(np.float64).eps / 2, np.finfo(out.dtype).eps / 2
    error = np.abs(out.astype(wide) - value)
    assert (error <= rounding * np.abs(value) * 2 + 4 * unit * depth * magnitude)[..., inside].all()
    # Errors of the result and of the exact value have random signs and add up to far less, unless
    # there are only a few elements, which may all be small.
    if out.shape[-1] < 32:
        return
    for one, right in zip(error[..., inside], value[..., inside], strict=True):
        allowed = (rounding + 4 * unit * (2 + np.sqrt(depth))) * np.linalg.norm(right)
        assert np.linalg.norm(one) <= allowed, (np.linalg.norm(one), allowed)


def _check_other_triangle(update, out, c, inside, symmetrize) -> None:
    """Asserts that the other triangle is exactly c's, zero, or the mirror image."""
    expected = np.zeros_like(out) if c is None else np.asarray(c)
    if symmetrize:
        expected = update.flip(out)
    assert out[..., ~inside].tobytes() == expected[..., ~inside].tobytes()
