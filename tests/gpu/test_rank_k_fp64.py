"""Rank-k and rank-2k updates on the FP64 tensor cores against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support.updates import HER2K, HERK, SYR2K, SYRK, UPDATES, check_double, triangle

F64, C64, C128 = np.float64, np.complex64, np.complex128

EVERY = pytest.mark.parametrize("update", UPDATES, ids=repr)
DTYPES = pytest.mark.parametrize("dtype", [F64, C64, C128], ids=lambda dtype: dtype.__name__)
FORMS = pytest.mark.parametrize(
    "uplo, transpose", [(u, t) for u in ("lower", "upper") for t in (False, True)]
)
# None: zeros; "c": kept; "mirror": symmetric.
OTHER = pytest.mark.parametrize("other", [None, "c", "mirror", "mirror c"])


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def random(rng, shape, dtype):
    x = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


def run(update, a, b, c, **options):
    """The kernel under jit."""
    return jax.jit(partial(update, implementation="cuda", **options))(a, b, c)


def scales(rng, update, g, dtype):
    """alpha and beta, complex where they may be, rounded to what the kernel takes."""
    dtype = np.dtype(dtype)
    alpha, beta = random(rng, g, dtype), random(rng, g, dtype)
    if dtype.kind == "c" and update.hermitian:
        beta = beta.real
        alpha = alpha if update.two_operands else alpha.real
    return alpha, beta


def check(update, rng, g, n, k, dtype, *, other=None, uplo="lower", transpose=False):
    """One stack with random alphas and betas; what must not be read is NaN."""
    shape = (g, k, n) if transpose else (g, n, k)
    a, b = random(rng, shape, dtype), random(rng, shape, dtype)
    symmetrize = other is not None and other.startswith("mirror")
    c = random(rng, (g, n, n), dtype) if other in ("c", "mirror c") else None
    alpha, beta = scales(rng, update, g, dtype)
    if c is not None:
        if symmetrize:
            c[:, ~triangle(n, uplo)] = np.nan
        if g > 1:
            beta[0] = 0
    poisoned = c
    if c is not None and g > 1:
        poisoned = c.copy()
        poisoned[0, triangle(n, uplo)] = np.nan
    options = dict(alpha=alpha, beta=beta, uplo=uplo, transpose=transpose)
    out = run(update, a, b, poisoned, symmetrize_output=symmetrize, **options)
    assert out.dtype == dtype
    check_double(update, out, a, b, c, symmetrize=symmetrize, **options)


# Around the edges of both tiles, even and odd.
SIZES = (1, 2, 7, 16, 63, 64, 65, 127, 128, 129, 191, 256, 258, 389)
# Less than a step, fewer steps than stages, and many, odd and even.
DEPTHS = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 48, 64, 100, 511, 1024)


@OTHER
@FORMS
@EVERY
@DTYPES
def test_stacks(dtype, update, uplo, transpose, other, rng):
    """A few sizes each: every combination is compiled anew."""
    options = dict(uplo=uplo, transpose=transpose, other=other)
    for n, k in zip(rng.choice(SIZES, 3), rng.choice(DEPTHS, 3), strict=True):
        check(update, rng, int(rng.integers(1, 4)), int(n), int(k), dtype, **options)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("transpose", [False, True])
def test_every_size(dtype, transpose, rng):
    for n in SIZES:
        check(HER2K, rng, 2, n, int(rng.integers(1, 90)), dtype, transpose=transpose)
    for k in DEPTHS:
        check(HER2K, rng, 3, int(rng.integers(60, 140)), k, dtype, transpose=transpose)


@DTYPES
@EVERY
def test_more_tiles_than_blocks(update, dtype, rng):
    for transpose, other in ((False, "mirror c"), (True, "c")):
        check(update, rng, 3, 1500, 70, dtype, other=other, transpose=transpose)


@DTYPES
@FORMS
@EVERY
@pytest.mark.parametrize("count", [1, 24, 70])
def test_lists(update, uplo, transpose, count, dtype, rng):
    """Problems of unequal shapes, in the manner of CUTLASS's tests, empty ones among them."""
    sizes = 8 * rng.integers(0, 64 if count < 50 else 8, (count, 2)) + 24
    sizes[0] = (16, 8)
    if count > 4:
        sizes[4] = sizes[4] - 1  # not a multiple of 16 bytes
    shapes = [(k, n) if transpose else (n, k) for n, k in sizes]
    a, b = ([random(rng, shape, dtype) for shape in shapes] for _ in "ab")
    c = [random(rng, (n, n), dtype) for n, _ in sizes]
    if count > 1:
        for operand in (a, b):
            operand[1] = random(rng, (3, *shapes[1]), dtype)  # a stack
            operand[2] = operand[2][:, :0] if not transpose else operand[2][:0]  # nothing to add
            operand[3] = operand[3][:0] if not transpose else operand[3][:, :0]  # an empty result
        c[1], c[3] = random(rng, (3, *c[1].shape), dtype), np.zeros((0, 0), dtype)
    alpha = 0.5 - 0.25j if update is HER2K and dtype != F64 else 0.5
    options = dict(alpha=alpha, beta=-2.0, uplo=uplo, transpose=transpose)
    outs = run(update, a, b, c, **options)
    assert [out.shape for out in outs] == [x.shape for x in c]
    for out, x, y, z in zip(outs, a, b, c, strict=True):
        if z.size:
            out, x, y, z = (v if v.ndim == 3 else v[None] for v in (out, x, y, z))
            check_double(update, out, x, y, z, **options)


@DTYPES
@EVERY
def test_nothing_outside_of_a_matrix_is_read(update, dtype, rng):
    """A stack's neighbours are NaN: no tile may load across the ends of a matrix."""
    for transpose in (False, True):
        shape = (3, 21, 77) if transpose else (3, 77, 21)
        a, b = random(rng, shape, dtype), random(rng, shape, dtype)
        a[0] = a[2] = b[0] = b[2] = np.nan
        out = run(update, a, b, None, transpose=transpose, symmetrize_output=True)
        check_double(update, out[1:2], a[1:2], b[1:2], transpose=transpose, symmetrize=True)
        assert np.isnan(np.asarray(out)[[0, 2]]).all()


@pytest.mark.parametrize("dtype", [C64, C128])
@pytest.mark.parametrize("alpha", [0, 1, -1, 1j, -1j, 0.6 - 0.8j, 1e-30 + 1e-25j, -1e25j + 1e30])
def test_complex_alpha(alpha, dtype, rng):
    a, b = random(rng, (2, 130, 40), dtype), random(rng, (2, 130, 40), dtype)
    for update in (SYRK, SYR2K, HER2K):
        out = run(update, a, b, None, alpha=alpha, symmetrize_output=True)
        check_double(update, out, a, b, alpha=dtype(alpha), symmetrize=True)


def test_alpha_zero_is_beta_c(rng):
    a, c = random(rng, (2, 130, 40), C128), random(rng, (2, 130, 130), C128)
    out = np.asarray(run(HER2K, a, a, c, alpha=0.0, beta=3.0))
    expected = np.where(np.eye(130, dtype=bool), (3 * c).real, 3 * c)
    np.testing.assert_array_equal(np.tril(out), np.tril(expected))


def test_symmetry_is_exact(rng):
    for update, dtype in ((SYR2K, F64), (HERK, C128), (HER2K, C128), (HER2K, C64)):
        a, b = random(rng, (2, 333, 222), dtype), random(rng, (2, 333, 222), dtype)
        out = np.asarray(run(update, a, b, None, symmetrize_output=True))
        np.testing.assert_array_equal(out, update.flip(out))


def test_donated_c_is_updated_in_place(rng):
    a, c = random(rng, (2, 136, 73), C128), random(rng, (2, 136, 136), C128)
    update = jax.jit(partial(jgg.grouped_herk, beta=0.5, implementation="cuda"), donate_argnums=1)
    donated = jnp.asarray(c)
    pointer = donated.unsafe_buffer_pointer()
    out = update(a, donated)
    assert out.unsafe_buffer_pointer() == pointer
    check_double(HERK, out, a, a, c, beta=0.5)


@DTYPES
@EVERY
def test_repeats_bitwise(update, dtype, rng):
    a, b = random(rng, (5, 300, 517), dtype), random(rng, (5, 300, 517), dtype)
    first = np.asarray(run(update, a, b, None))
    for _ in range(20):
        np.testing.assert_array_equal(run(update, a, b, None), first)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("symmetrize", [False, True])
@pytest.mark.parametrize("dtype", [F64, C128])
@EVERY
def test_gradients(update, dtype, symmetrize, transpose, rng):
    """Those of the kernel against those of the reference."""
    a, b, c, weights = (random(rng, (2, 70, 70), dtype) for _ in range(4))

    def loss(implementation, a, b, c, alpha, beta):
        out = update(
            a, b, c, alpha=alpha, beta=beta, symmetrize_output=symmetrize, transpose=transpose,
            implementation=implementation,
        )  # fmt: skip
        return jnp.vdot(weights, out).real

    gradient = jax.jit(jax.grad(loss, (1, 2, 3, 4, 5)), static_argnums=0)
    got = jax.tree.leaves(gradient("cuda", a, b, c, 0.5, -2.0))
    want = jax.tree.leaves(gradient("reference", a, b, c, 0.5, -2.0))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11 * max(np.abs(y).max(), 1))


@EVERY
def test_vmap(update, rng):
    a, b = random(rng, (2, 3, 136, 72), C128), random(rng, (3, 136, 72), C128)

    @jax.jit
    def mapped(a, b):
        return jax.vmap(lambda a: update(a, b, None, implementation="cuda"))(a)

    for i, out in enumerate(mapped(a, b)):
        check_double(update, out, a[i], b)
