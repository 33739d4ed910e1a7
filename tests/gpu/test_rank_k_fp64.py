"""Rank-k and rank-2k updates on the FP64 tensor cores: every size, and complex scales."""

import numpy as np
import pytest

from tests.support.families import DOUBLE, OTHER, check_update, each, label, run_update
from tests.support.updates import FORMS, HER2K, HERK, SYR2K, SYRK, UPDATES

EVERY = pytest.mark.parametrize("update", UPDATES, ids=repr)
# Sizes around the edges of both tiles, even and odd.
SIZES = (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 191, 256, 258, 389)
# Less than a step, fewer steps than stages, and many steps, odd and even.
DEPTHS = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 48, 64, 100, 511, 1024)


@OTHER
@FORMS
@EVERY
@each(*DOUBLE)
def test_stacks(family, update, uplo, transpose, other, rng):
    """Each case has only a few sizes, because every combination is compiled anew."""
    options = dict(uplo=uplo, transpose=transpose, other=other)
    for n, k in zip(rng.choice(SIZES, 3), rng.choice(DEPTHS, 3), strict=True):
        check_update(family, update, rng, (int(rng.integers(1, 4)), int(n), int(k)), **options)


@each(DOUBLE[0], DOUBLE[-1])
@pytest.mark.parametrize("transpose", [False, True])
def test_every_size(family, transpose, rng):
    for n in SIZES:
        check_update(family, HER2K, rng, (2, n, int(rng.integers(1, 90))), transpose=transpose)
    for k in DEPTHS:
        check_update(family, HER2K, rng, (3, int(rng.integers(60, 140)), k), transpose=transpose)


@each(*DOUBLE)
@EVERY
def test_more_tiles_than_blocks(family, update, rng):
    for transpose, other in ((False, "mirror c"), (True, "c")):
        check_update(family, update, rng, (3, 1500, 70), other=other, transpose=transpose)


@each(*DOUBLE[1:])
@pytest.mark.parametrize("alpha", [0, 1, -1, 1j, -1j, 0.6 - 0.8j, 1e-30 + 1e-25j, -1e25j + 1e30])
def test_complex_alpha(family, alpha, rng):
    a, b = family.draw(rng, (2, 130, 40)), family.draw(rng, (2, 130, 40))
    for update in (SYRK, SYR2K, HER2K):
        out = run_update(family, update, a, b, alpha=alpha, symmetrize_output=True)
        family.check_update(update, out, a, b, alpha=family.dtype(alpha), symmetrize=True)


@each(DOUBLE[-1])
def test_alpha_zero_is_beta_c(family, rng):
    a, c = family.draw(rng, (2, 130, 40)), family.draw(rng, (2, 130, 130))
    out = np.asarray(run_update(family, HER2K, a, a, c, alpha=0.0, beta=3.0))
    expected = np.where(np.eye(130, dtype=bool), (3 * c).real, 3 * c)
    np.testing.assert_array_equal(np.tril(out), np.tril(expected))


@pytest.mark.parametrize(
    "family, update",
    [(DOUBLE[0], SYR2K), (DOUBLE[-1], HERK), (DOUBLE[-1], HER2K), (DOUBLE[1], HER2K)],
    ids=label,
    indirect=["family"],
)
def test_symmetry_is_exact(family, update, rng):
    a, b = family.draw(rng, (2, 333, 222)), family.draw(rng, (2, 333, 222))
    out = np.asarray(run_update(family, update, a, b, symmetrize_output=True))
    np.testing.assert_array_equal(out, update.flip(out))
