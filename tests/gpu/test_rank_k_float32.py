"""Rank-k and rank-2k updates of float32 operands: their range and their accuracy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.dtypes import F32
from tests.support.families import FLOAT32, Family, each, run_update
from tests.support.ops import random
from tests.support.updates import SYR2K, SYRK

BOTH = pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)


def check(family, update, a, b):
    family.check_update(update, run_update(family, update, a, b), a, b)


@each(*FLOAT32)
@BOTH
class TestOperands:
    def test_each_matrix_has_its_own_scale(self, family, update, rng):
        a, b = random(rng, (9, 136, 72), F32), random(rng, (9, 136, 72), F32)
        for x in (a, b):
            x[...] = np.ldexp(np.clip(x, -3, 3), rng.integers(-50, 50, (9, 1, 1)))
        check(family, update, a, b)

    @pytest.mark.parametrize("exponents", [(-140, 125), (125, -140), (60, 60), (-60, -80)])
    def test_extreme_scales(self, family, update, exponents, rng):
        if not update.two_operands and abs(2 * exponents[0]) > 126:
            pytest.skip("float32 cannot hold the result")
        a, b = (
            np.ldexp(np.clip(random(rng, (2, 136, 72), F32), -3, 3), e).astype(F32)
            for e in exponents
        )
        check(family, update, a, b)

    def test_magnitudes_within_a_matrix(self, family, update, rng):
        a, b = random(rng, (2, 136, 200), F32), random(rng, (2, 136, 200), F32)
        for x in (a, b):
            x[...] = np.copysign(2.0 ** rng.uniform(-13, 13, x.shape), x)
        check(family, update, a, b)

    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_non_finite_elements_reach_what_they_should(self, family, update, value, rng):
        """Non-finite elements reach exactly their rows and columns of their own matrix."""
        a, b = random(rng, (3, 264, 136), F32), random(rng, (3, 264, 136), F32)
        a[1].flat[rng.integers(0, a[1].size, 3)] = value
        out = np.asarray(run_update(family, update, a, b))
        with np.errstate(invalid="ignore"):
            want = np.tril(update.exact(np.float64(a), np.float64(b)))
        np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
        np.testing.assert_array_equal(out[~np.isfinite(out)], want[~np.isfinite(want)])
        family.check_update(update, out[::2], a[::2], b[::2])


class TestAccuracy:
    @BOTH
    @pytest.mark.parametrize("depth", [64, 1024, 4096])
    def test_no_worse_than_a_float32_dot(self, update, depth, rng):
        """Compares the mean square and the maximum of the error relative to |a| |b|.

        The bound of the maximum leaves room for chance. Sums of squares, on the diagonal of A A^T,
        may have larger errors, because tensor cores truncate, and these errors add up if all terms
        have one sign.
        """
        a, b = random(rng, (1, 1024, depth), F32), random(rng, (1, 1024, depth), F32)
        wide = np.float64(a), np.float64(b)
        value, magnitude = update.exact(*wide), update.exact(*map(np.abs, wide))
        options = dict(symmetrize_output=True)

        def errors(out):
            return (np.abs(np.asarray(out).astype(np.float64) - value) / magnitude)[0]

        ours = errors(run_update(FLOAT32[-1], update, a, b, **options))
        dot = errors(update(a, b, implementation="xla", precision="highest", **options))
        assert np.mean(ours**2) <= np.mean(dot**2)
        assert ours[~np.eye(1024, dtype=bool)].max() <= 1.2 * dot.max()
        assert np.diag(ours).max() <= 1.5 * dot.max()

    @BOTH
    def test_high_is_highest(self, update, rng):
        a, b = random(rng, (2, 264, 136), F32), random(rng, (2, 264, 136), F32)
        families = (Family(F32, precision) for precision in ("high", "highest"))
        high, highest = (run_update(family, update, a, b) for family in families)
        np.testing.assert_array_equal(high, highest)


@BOTH
def test_second_order(update, rng):
    """Forward-over-reverse derivatives agree with those of the reference."""
    a, b, da, db = (jnp.asarray(random(rng, (2, 136, 72), F32)) for _ in range(4))

    def product_of(implementation):
        def loss(a, b):
            out = update(a, b, precision="highest", implementation=implementation)
            return jnp.sum(jnp.sin(0.1 * out))

        return jax.jit(lambda: jax.jvp(jax.grad(loss, (0, 1)), (a, b), (da, db))[1])()

    for x, y in zip(product_of("cuda"), product_of("xla"), strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)


def test_exported(rng):
    a = random(rng, (2, 136, 72), F32)
    function = jax.jit(partial(jgg.grouped_syrk, precision="highest", implementation="cuda"))
    exported = jax.export.export(
        function, platforms=["cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(jax.ShapeDtypeStruct(a.shape, F32))
    out = jax.export.deserialize(exported.serialize()).call(a)
    np.testing.assert_array_equal(out, function(a))


def test_in_a_scan(rng):
    """A loop, which XLA may capture in a CUDA graph, gives the results of separate calls."""
    a, b = random(rng, (2, 136, 136), F32), random(rng, (2, 136, 136), F32)
    call = partial(SYR2K, alpha=0.1, **FLOAT32[-1].options)

    @jax.jit
    def powers(a, b):
        return jax.lax.scan(lambda x, _: (call(x, b), None), a, length=5)[0]

    x = a
    for _ in range(5):
        x = np.asarray(call(x, b))
    np.testing.assert_array_equal(powers(a, b), x)
