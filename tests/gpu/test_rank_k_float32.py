"""Rank-k and rank-2k updates of float32 operands on the tensor cores, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.float32_errors import PRECISIONS, PRODUCT_ERROR
from tests.support.ops import random, swap
from tests.support.updates import HER2K, SYR2K, SYRK, check_real, triangle

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

BOTH = pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
FORMS = pytest.mark.parametrize(
    "uplo, transpose", [(u, t) for u in ("lower", "upper") for t in (False, True)]
)
# None: zeros; "c": kept; "mirror": symmetric.
OTHER = pytest.mark.parametrize("other", [None, "c", "mirror", "mirror c"])


def run(update, a, b, c=None, **options):
    """The kernel under jit, whose results take over memory that holds NaN."""
    jax.block_until_ready(jnp.full(2**22, jnp.nan, F32))
    return jax.jit(partial(update, implementation="cuda", **options))(a, b, c)


def check(update, a, b, c=None, *, precision="highest", symmetrize=False, result=None, **options):
    """Runs the kernel, and asserts that its results are right."""
    out = run(
        update, a, b, c,
        precision=precision, symmetrize_output=symmetrize, preferred_element_type=result, **options,
    )  # fmt: skip
    assert out.dtype == (result or F32)
    errors = dict(product_error=PRODUCT_ERROR[precision])
    check_real(update, out, a, b, c, symmetrize=symmetrize, **options, **errors)
    return out


def check_random(update, rng, g, n, k, *, other=None, uplo="lower", transpose=False, **options):
    """One stack with random alphas and betas."""
    shape = (g, k, n) if transpose else (g, n, k)
    a, b = random(rng, shape, F32), random(rng, shape, F32)
    c = None
    if other in ("c", "mirror c"):
        c = random(rng, (g, n, n), F32)
        if other == "mirror c":
            c[:, ~triangle(n, uplo)] = np.nan  # nothing may read it
    alpha, beta = rng.standard_normal((2, g), np.float32)
    symmetrize = other is not None and other.startswith("mirror")
    options |= dict(alpha=alpha, beta=beta, uplo=uplo, transpose=transpose)
    check(update, a, b, c, symmetrize=symmetrize, **options)


@OTHER
@FORMS
@PRECISIONS
@BOTH
class TestStacks:
    def test_sizes(self, update, precision, uplo, transpose, other, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other, precision=precision)
        for n in (8, 136, 256, 392, 520):
            check_random(update, rng, 2, n, int(8 * rng.integers(1, 40)), **options)

    def test_rows_off_16_bytes(self, update, precision, uplo, transpose, other, rng):
        """Of the parts, whose rows TMA has to address: they are padded."""
        options = dict(uplo=uplo, transpose=transpose, other=other, precision=precision)
        for n, k in ((1, 1), (37, 51), (255, 333), (132, 36)):
            check_random(update, rng, 3, n, k, **options)


@PRECISIONS
@BOTH
class TestOperands:
    @pytest.mark.parametrize("result", [BF16, F16])
    def test_other_result_dtype(self, update, precision, result, rng):
        a, b = random(rng, (2, 136, 72), F32), random(rng, (2, 136, 72), F32)
        c = random(rng, (2, 136, 136), result)
        check(update, a, b, c, beta=0.5, result=result, precision=precision)

    def test_beta_zero_never_reads_c(self, update, precision, rng):
        a, b = random(rng, (2, 200, 72), F32), random(rng, (2, 200, 72), F32)
        c = np.full((2, 200, 200), np.nan, F32)
        out = run(update, a, b, c, beta=jnp.zeros(()), symmetrize_output=True, precision=precision)
        errors = dict(product_error=PRODUCT_ERROR[precision])
        check_real(update, out, a, b, symmetrize=True, **errors)

    @FORMS
    @pytest.mark.parametrize("count", [1, 24, 90, 180])
    def test_lists(self, update, precision, uplo, transpose, count, rng):
        """Of unequal shapes, empty ones among them, up to more than one launch or pass takes."""
        sizes = 8 * rng.integers(1, 40, (count, 2)) + 24
        sizes[0] = (16, 8)
        shapes = [(k, n) if transpose else (n, k) for n, k in sizes]
        a, b = ([random(rng, shape, F32) for shape in shapes] for _ in "ab")
        c = [random(rng, (n, n), F32) for n, _ in sizes]
        if count > 1:
            for operand in (a, b):
                operand[1] = random(rng, (3, *shapes[1]), F32)  # a stack
                operand[2] = operand[2][:, :0] if not transpose else operand[2][:0]  # no terms
                operand[3] = operand[3][:0] if not transpose else operand[3][:, :0]  # no result
            c[1], c[3] = random(rng, (3, *c[1].shape), F32), np.zeros((0, 0), F32)
        options = dict(alpha=0.5, beta=-2.0, uplo=uplo, transpose=transpose)
        outs = run(update, a, b, c, precision=precision, **options)
        assert [out.shape for out in outs] == [x.shape for x in c]
        for out, x, y, z in zip(outs, a, b, c, strict=True):
            if z.size:
                out, x, y, z = (v if v.ndim == 3 else v[None] for v in (out, x, y, z))
                errors = dict(product_error=PRODUCT_ERROR[precision])
                check_real(update, out, x, y, z, **options, **errors)

    def test_each_matrix_has_its_own_scale(self, update, precision, rng):
        a, b = random(rng, (9, 136, 72), F32), random(rng, (9, 136, 72), F32)
        for x in (a, b):
            x[...] = np.ldexp(np.clip(x, -3, 3), rng.integers(-50, 50, (9, 1, 1)))
        check(update, a, b, precision=precision)

    @pytest.mark.parametrize("exponents", [(-140, 125), (125, -140), (60, 60), (-60, -80)])
    def test_extreme_scales(self, update, precision, exponents, rng):
        if not update.two_operands and abs(2 * exponents[0]) > 126:
            pytest.skip("its result is no float32")
        a, b = (
            np.ldexp(np.clip(random(rng, (2, 136, 72), F32), -3, 3), e).astype(F32)
            for e in exponents
        )
        check(update, a, b, precision=precision)

    def test_magnitudes_within_a_matrix(self, update, precision, rng):
        a, b = random(rng, (2, 136, 200), F32), random(rng, (2, 136, 200), F32)
        for x in (a, b):
            x[...] = np.copysign(2.0 ** rng.uniform(-13, 13, x.shape), x)
        check(update, a, b, precision=precision)

    @pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
    def test_non_finite_elements_reach_what_they_should(self, update, precision, value, rng):
        """Exactly their rows and columns, of their matrix."""
        a, b = random(rng, (3, 264, 136), F32), random(rng, (3, 264, 136), F32)
        a[1].flat[rng.integers(0, a[1].size, 3)] = value
        out = np.asarray(run(update, a, b, precision=precision))
        with np.errstate(invalid="ignore"):
            want = np.tril(update.exact(np.float64(a), np.float64(b)))
        np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
        np.testing.assert_array_equal(out[~np.isfinite(out)], want[~np.isfinite(want)])
        errors = dict(product_error=PRODUCT_ERROR[precision])
        check_real(update, out[::2], a[::2], b[::2], **errors)

    def test_repeats_bitwise(self, update, precision, rng):
        a, b = random(rng, (5, 520, 1032), F32), random(rng, (5, 520, 1032), F32)
        first = np.asarray(run(update, a, b, precision=precision))
        for _ in range(10):
            np.testing.assert_array_equal(run(update, a, b, precision=precision), first)

    def test_many_tiles_for_each_processor(self, update, precision, rng):
        check_random(update, rng, 3, 2600, 200, other="mirror", precision=precision)


class TestAccuracy:
    @BOTH
    @pytest.mark.parametrize("depth", [64, 1024, 4096])
    def test_no_worse_than_a_float32_dot(self, update, depth, rng):
        """The mean square of the error relative to |a| |b|, and but for chance its maximum.

        Sums of squares, on the diagonal of A A^T, may be off by more: tensor cores truncate, which
        of terms of one sign adds up.
        """
        a, b = random(rng, (1, 1024, depth), F32), random(rng, (1, 1024, depth), F32)
        wide = np.float64(a), np.float64(b)
        value, magnitude = update.exact(*wide), update.exact(*map(np.abs, wide))
        options = dict(symmetrize_output=True, precision="highest")

        def errors(out):
            return (np.abs(np.asarray(out).astype(np.float64) - value) / magnitude)[0]

        ours = errors(run(update, a, b, **options))
        dot = errors(update(a, b, implementation="reference", **options))
        assert np.mean(ours**2) <= np.mean(dot**2)
        assert ours[~np.eye(1024, dtype=bool)].max() <= 1.2 * dot.max()
        assert np.diag(ours).max() <= 1.5 * dot.max()

    @BOTH
    def test_high_is_highest(self, update, rng):
        a, b = random(rng, (2, 264, 136), F32), random(rng, (2, 264, 136), F32)
        high, highest = (run(update, a, b, precision=p) for p in ("high", "highest"))
        np.testing.assert_array_equal(high, highest)


def test_real_hermitian_updates_are_the_symmetric_ones(rng):
    a, b = random(rng, (2, 264, 136), F32), random(rng, (2, 264, 136), F32)
    check(HER2K, a, b)


@PRECISIONS
def test_stored_transposed_gives_the_same_bits(precision, rng):
    a, b = random(rng, (2, 136, 72), F32), random(rng, (2, 136, 72), F32)
    plain = run(SYR2K, a, b, precision=precision)
    turned = run(SYR2K, swap(a, True), swap(b, True), transpose=True, precision=precision)
    np.testing.assert_array_equal(turned, plain)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("symmetrize", [False, True])
@BOTH
def test_gradients(update, symmetrize, transpose, rng):
    """Those of the kernel against those of the reference."""
    operands = [random(rng, (2, 136, 136), F32) for _ in range(3)]
    weights = random(rng, (2, 136, 136), F32)

    def loss(implementation, operands, alpha, beta):
        out = update(
            *operands, alpha=alpha, beta=beta, symmetrize_output=symmetrize, transpose=transpose,
            precision="highest", implementation=implementation,
        )  # fmt: skip
        return jnp.vdot(out, weights, precision="highest")

    gradient = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    got = jax.tree.leaves(gradient("cuda", operands, 0.5, -2.0))
    want = jax.tree.leaves(gradient("reference", operands, 0.5, -2.0))
    for x, y in zip(got, want, strict=True):
        norm = np.linalg.norm(np.float64(y))
        assert np.linalg.norm(np.float64(x) - np.float64(y)) <= 1e-4 * norm


@BOTH
def test_second_order(update, rng):
    """Forward over reverse, as the reference does it."""
    a, b, da, db = (jnp.asarray(random(rng, (2, 136, 72), F32)) for _ in range(4))

    def product_of(implementation):
        def loss(a, b):
            out = update(a, b, precision="highest", implementation=implementation)
            return jnp.sum(jnp.sin(0.1 * out))

        return jax.jit(lambda: jax.jvp(jax.grad(loss, (0, 1)), (a, b), (da, db))[1])()

    for x, y in zip(product_of("cuda"), product_of("reference"), strict=True):
        assert jnp.linalg.norm(x - y) <= 1e-5 * jnp.linalg.norm(y)


@PRECISIONS
@BOTH
def test_vmap(update, precision, rng):
    a, b = random(rng, (2, 3, 136, 72), F32), random(rng, (3, 136, 72), F32)
    alpha = rng.standard_normal(2, np.float32)

    @jax.jit
    def mapped(a, b, alpha):
        call = partial(update, implementation="cuda", precision=precision)
        return jax.vmap(lambda a, alpha: call(a, b, alpha=alpha))(a, alpha)

    for i, out in enumerate(mapped(a, b, alpha)):
        check_real(update, out, a[i], b, alpha=alpha[i], product_error=PRODUCT_ERROR[precision])


def test_exported(rng):
    a = random(rng, (2, 136, 72), F32)
    function = jax.jit(partial(jgg.grouped_syrk, precision="highest", implementation="cuda"))
    exported = jax.export.export(
        function, platforms=["cuda"], disabled_checks=jgg.EXPORT_DISABLED_CHECKS
    )(jax.ShapeDtypeStruct(a.shape, F32))
    out = jax.export.deserialize(exported.serialize()).call(a)
    np.testing.assert_array_equal(out, function(a))


def test_donated_c_is_updated_in_place(rng):
    a, c = random(rng, (2, 136, 72), F32), random(rng, (2, 136, 136), F32)
    options = dict(beta=0.5, precision="highest")
    call = jax.jit(partial(jgg.grouped_syrk, implementation="cuda", **options), donate_argnums=1)
    donated = jnp.asarray(c)
    pointer = donated.unsafe_buffer_pointer()
    out = call(a, donated)
    assert out.unsafe_buffer_pointer() == pointer
    check_real(SYRK, out, a, a, c, beta=0.5, product_error=PRODUCT_ERROR["highest"])


def test_in_a_scan(rng):
    """A loop that XLA may capture in a CUDA graph."""
    a, b = random(rng, (2, 136, 136), F32), random(rng, (2, 136, 136), F32)
    call = partial(SYR2K, alpha=0.1, precision="highest", implementation="cuda")

    @jax.jit
    def powers(a, b):
        return jax.lax.scan(lambda x, _: (call(x, b), None), a, length=5)[0]

    x = a
    for _ in range(5):
        x = np.asarray(call(x, b))
    np.testing.assert_array_equal(powers(a, b), x)
