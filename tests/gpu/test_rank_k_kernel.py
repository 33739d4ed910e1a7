"""The kernel of rank-k and rank-2k updates against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan
from tests.support.ops import random, swap
from tests.support.updates import HER2K, SYR2K, SYRK, check_real

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

BOTH = pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
FORMS = pytest.mark.parametrize(
    "uplo, transpose", [(u, t) for u in ("lower", "upper") for t in (False, True)]
)
# None: zeros; "c": kept; "mirror": symmetric.
OTHER = pytest.mark.parametrize("other", [None, "c", "mirror", "mirror c"])


def run(update, a, b, c, **options):
    """The kernel under jit."""
    call = jax.jit(partial(update, implementation="cuda", **options))
    return call(a, b, c)


def starting_value(rng, other, g, n, dtype, uplo):
    """A c, whose other triangle is poison if nothing may read it."""
    if other is None or other == "mirror":
        return None
    c = random(rng, (g, n, n), dtype)
    if other == "mirror c":
        c[:, np.tri(n, k=-1, dtype=bool).T if uplo == "lower" else np.tri(n, k=-1, dtype=bool)] = (
            np.nan
        )
    return c


def check(
    update, rng, g, n, k, *, dtype=BF16, result=None, other=None, uplo="lower", transpose=False
):
    """One stack with random alphas and betas."""
    shape = (g, k, n) if transpose else (g, n, k)
    a, b = random(rng, shape, dtype), random(rng, shape, dtype)
    c = starting_value(rng, other, g, n, result or dtype, uplo)
    alpha, beta = rng.standard_normal((2, g), np.float32)
    symmetrize = other is not None and other.startswith("mirror")
    options = dict(alpha=alpha, beta=beta, uplo=uplo, transpose=transpose)
    out = run(
        update, a, b, c, symmetrize_output=symmetrize, preferred_element_type=result, **options
    )
    assert out.dtype == (result or dtype)
    check_real(update, out, a, b, c, symmetrize=symmetrize, **options)


@pytest.fixture(params=["wide", "fine"])
def rank_k_tile(request, monkeypatch):
    """Has every update take the tiles that the plan has for many units, or those for few."""
    most = 0 if request.param == "wide" else 2**31
    monkeypatch.setattr(rank_k_plan, "most_fine_units", lambda target: most)
    plan = rank_k_plan.RANK_K_TILE if request.param == "wide" else rank_k_plan.FINE_TILE
    a = jax.ShapeDtypeStruct((2, 1032, 72), BF16)
    assert [p.tile for p in jgg.explain(jgg.grouped_syrk, a).plans] == [plan]


@OTHER
@FORMS
@BOTH
@pytest.mark.usefixtures("rank_k_tile")
class TestStacks:
    @pytest.mark.parametrize("dtype, result", [(BF16, None), (BF16, F32), (F16, None), (F16, F32)])
    def test_dtypes(self, update, uplo, transpose, other, dtype, result, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other)
        check(update, rng, 3, 456, 200, dtype=dtype, result=result, **options)

    def test_sizes(self, update, uplo, transpose, other, rng):
        options = dict(uplo=uplo, transpose=transpose, other=other)
        for n in (8, 64, 120, 128, 136, 256, 264, 384, 512, 1032):
            check(update, rng, 2, n, int(8 * rng.integers(1, 40)), **options)

    def test_off_16_bytes(self, update, uplo, transpose, other, rng):
        """Sizes that TMA cannot address are padded."""
        options = dict(uplo=uplo, transpose=transpose, other=other)
        for n, k in ((1, 1), (37, 51), (129, 7), (255, 333)):
            check(update, rng, 2, n, k, result=F32, **options)


def takes_halves(update, uplo, shape) -> bool:
    """Whether both CTAs of a cluster compute one narrow tile, half of its steps each."""
    a = jax.ShapeDtypeStruct(shape, BF16)
    (plan,) = jgg.explain(partial(update, uplo=uplo), a, a).plans
    wide = plan.tile == rank_k_plan.RANK_K_TILE
    return wide and rank_k_plan.gains_by_halves(plan.kernel_problem, plan.kernel_problem.stacks)


@OTHER
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype, result", [(BF16, None), (F16, F32)])
@BOTH
def test_narrow_tiles_in_halves(update, dtype, result, transpose, other, rng):
    """Nothing but narrow tiles, of a matrix of one tile in the lower triangle."""
    for shape in ((40, 120, 1032), (9, 40, 2056)):
        assert takes_halves(update, "lower", shape)
        options = dict(dtype=dtype, result=result, transpose=transpose, other=other)
        check(update, rng, *shape, **options)


@pytest.mark.parametrize("other", [None, "mirror c"])
@pytest.mark.parametrize("uplo", ["lower", "upper"])
@BOTH
def test_halves_behind_other_tiles(update, uplo, other, rng):
    """Clusters have several tiles, and results of others still to be stored when sums come."""
    shape = (100, 136, 2056)
    assert takes_halves(update, uplo, shape)
    check(update, rng, *shape, uplo=uplo, transpose=bool(rng.integers(2)), other=other)


@BOTH
def test_halves_repeat_bitwise(update, rng):
    assert takes_halves(update, "lower", (100, 136, 2056))
    a, b = random(rng, (100, 136, 2056), BF16), random(rng, (100, 136, 2056), BF16)
    first = np.asarray(run(update, a, b, None))
    for _ in range(20):
        np.testing.assert_array_equal(run(update, a, b, None), first)


@pytest.mark.parametrize("traced", [False, True])
@BOTH
def test_one_scale_for_all_matrices(update, traced, rng):
    a, b = random(rng, (3, 264, 72), BF16), random(rng, (3, 264, 72), BF16)
    c = random(rng, (3, 264, 264), BF16)
    if traced:
        call = jax.jit(partial(update, implementation="cuda"))
        out = call(a, b, c, alpha=jnp.float32(0.5), beta=jnp.float32(-2.0))
    else:
        out = run(update, a, b, c, alpha=0.5, beta=-2.0)
    check_real(update, out, a, b, c, alpha=0.5, beta=-2.0)


@BOTH
def test_other_result_dtype(update, rng):
    check(update, rng, 2, 136, 72, dtype=BF16, result=F16, other="c")


@BOTH
def test_beta_zero_never_reads_c(update, rng):
    a, b = random(rng, (2, 200, 72), BF16), random(rng, (2, 200, 72), BF16)
    c = np.full((2, 200, 200), np.nan, BF16)
    out = run(update, a, b, c, beta=jnp.zeros(()), symmetrize_output=True)
    check_real(update, out, a, b, symmetrize=True)


@FORMS
@BOTH
@pytest.mark.parametrize("count", [1, 4, 24, 61])
def test_lists(update, uplo, transpose, count, rng):
    """Problems of unequal shapes, in the manner of CUTLASS's tests, empty ones among them."""
    sizes = 8 * rng.integers(1, 64, (count, 2)) + 24
    sizes[0] = (16, 8)
    shapes = [(k, n) if transpose else (n, k) for n, k in sizes]
    a, b = ([random(rng, shape, BF16) for shape in shapes] for _ in "ab")
    c = [random(rng, (n, n), BF16) for n, _ in sizes]
    if count > 1:
        for operand in (a, b):
            operand[1] = random(rng, (3, *shapes[1]), BF16)  # a stack
            operand[2] = operand[2][:, :0] if not transpose else operand[2][:0]  # nothing to add
            operand[3] = operand[3][:0] if not transpose else operand[3][:, :0]  # an empty result
        c[1], c[3] = random(rng, (3, *c[1].shape), BF16), np.zeros((0, 0), BF16)
    options = dict(alpha=0.5, beta=-2.0, uplo=uplo, transpose=transpose)
    outs = run(update, a, b, c, **options)
    assert [out.shape for out in outs] == [x.shape for x in c]
    for out, x, y, z in zip(outs, a, b, c, strict=True):
        if z.size:
            out, x, y, z = (v if v.ndim == 3 else v[None] for v in (out, x, y, z))
            check_real(update, out, x, y, z, **options)


def test_real_hermitian_updates_are_the_symmetric_ones(rng):
    a, b = random(rng, (2, 264, 136), BF16), random(rng, (2, 264, 136), BF16)
    check_real(HER2K, run(HER2K, a, b, None), a, b)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("symmetrize", [False, True])
@BOTH
def test_gradients(update, symmetrize, transpose, rng):
    """Those of the kernel against those of the reference."""
    a, b, c = (random(rng, shape, F32) for shape in ((2, 136, 136),) * 3)
    weights = random(rng, (2, 136, 136), F32)

    def loss(implementation, dtype, operands, alpha, beta):
        a, b, c = (x.astype(dtype) for x in operands)
        out = update(
            a, b, c, alpha=alpha, beta=beta, symmetrize_output=symmetrize, transpose=transpose,
            preferred_element_type=F32, implementation=implementation,
        )  # fmt: skip
        return jnp.vdot(out, weights)

    gradient = jax.jit(jax.grad(loss, (2, 3, 4)), static_argnums=(0, 1))
    operands = tuple(np.asarray(x.astype(BF16), F32) for x in (a, b, c))
    with jax.default_matmul_precision("highest"):
        got = jax.tree.leaves(gradient("cuda", BF16, operands, 0.5, -2.0))
        want = jax.tree.leaves(gradient("reference", F32, operands, 0.5, -2.0))
    for x, y in zip(got, want, strict=True):
        error = np.linalg.norm(np.float64(x) - np.float64(y)) / max(np.linalg.norm(y), 1e-30)
        assert error < 1e-2 or np.linalg.norm(y) == 0


@BOTH
def test_vmap(update, rng):
    a, b = random(rng, (2, 3, 136, 72), BF16), random(rng, (3, 136, 72), BF16)
    alpha = rng.standard_normal(2, np.float32)

    @jax.jit
    def mapped(a, b, alpha):
        call = partial(update, implementation="cuda")
        return jax.vmap(lambda a, alpha: call(a, b, alpha=alpha))(a, alpha)

    for i, out in enumerate(mapped(a, b, alpha)):
        check_real(update, out, a[i], b, alpha=alpha[i])


@BOTH
@pytest.mark.usefixtures("rank_k_tile")
def test_repeats_bitwise(update, rng):
    a, b = random(rng, (5, 520, 1032), BF16), random(rng, (5, 520, 1032), BF16)
    first = np.asarray(run(update, a, b, None))
    for _ in range(20):
        np.testing.assert_array_equal(run(update, a, b, None), first)


def test_donated_c_is_updated_in_place(rng):
    a, c = random(rng, (2, 136, 72), BF16), random(rng, (2, 136, 136), BF16)
    update = jax.jit(partial(jgg.grouped_syrk, beta=0.5, implementation="cuda"), donate_argnums=1)
    donated = jnp.asarray(c)
    pointer = donated.unsafe_buffer_pointer()
    out = update(a, donated)
    assert out.unsafe_buffer_pointer() == pointer
    check_real(SYRK, out, a, a, c, beta=0.5)


@pytest.mark.usefixtures("rank_k_tile")
def test_many_tiles_for_each_processor(rng):
    check(SYR2K, rng, 3, 2600, 200, other="mirror")


def test_stored_transposed(rng):
    a = random(rng, (2, 136, 72), BF16)
    plain = run(SYRK, a, a, None)
    np.testing.assert_array_equal(run(SYRK, swap(a, True), a, None, transpose=True), plain)
