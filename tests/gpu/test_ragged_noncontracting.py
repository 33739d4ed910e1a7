"""The non-contracting kernel, out[r] = lhs[r] @ rhs[group of r], against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.ops import NONCONTRACTING, noncontracting, random, swap

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Three tiles of columns, five steps of k and seven tiles of rows, none of them full.
M, K, N, G = 776, 264, 520, 8

MAJORS = pytest.mark.parametrize(
    "transpose_lhs, transpose_rhs", [(a, b) for a in (False, True) for b in (False, True)]
)


def operands(rng, m=M, k=K, n=N, g=G, dtype=BF16):
    return [random(rng, shape, dtype) for shape in NONCONTRACTING.shapes(m, k, n, g)]


def check(lhs, rhs, sizes, offset=None, *, transpose_lhs=False, transpose_rhs=False, **options):
    """Runs the kernel on operands stored in the given majors."""
    out = noncontracting(
        swap(lhs, transpose_lhs),
        swap(rhs, transpose_rhs),
        sizes,
        offset,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        implementation="cuda",
        **options,
    )
    exact = oracle.ragged_noncontracting(lhs, rhs, sizes, 0 if offset is None else offset)
    oracle.check(out, exact)
    return out


@MAJORS
@pytest.mark.parametrize("out_dtype", [None, BF16, F16, F32])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dtypes_and_majors(dtype, out_dtype, transpose_lhs, transpose_rhs, tile, rng):
    lhs, rhs, _ = operands(rng, dtype=dtype)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    for sizes in sizes_of.typical(rng, M, G):
        out = check(lhs, rhs, sizes, preferred_element_type=out_dtype, **majors, tile=tile)
        assert out.dtype == (out_dtype or dtype)


@MAJORS
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_gradients(dtype, transpose_lhs, transpose_rhs, rng):
    lhs, rhs, cotangent = operands(rng, dtype=dtype)
    stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    for sizes in (sizes_of.multinomial(rng, M, G), sizes_of.tile_edges(rng, M, G)):
        d_lhs, d_rhs = NONCONTRACTING.cotangents(
            *stored, sizes, cotangent, implementation="cuda", **majors
        )
        exact_lhs, exact_rhs = oracle.noncontracting_cotangents(lhs, rhs, sizes, cotangent)
        oracle.check(swap(d_lhs, transpose_lhs), exact_lhs)
        oracle.check(swap(d_rhs, transpose_rhs), exact_rhs)


@MAJORS
def test_any_group_sizes(transpose_lhs, transpose_rhs, tile, rng):
    lhs, rhs, _ = operands(rng, n=136)
    for _ in range(75):
        sizes = sizes_of.any_kind(rng, M, G)
        check(lhs, rhs, sizes, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, tile=tile)


def test_all_patterns_of_empty_groups(tile, rng):
    lhs, rhs, _ = operands(rng, k=72, n=136)
    for sizes in sizes_of.zero_patterns(rng, M, G):
        check(lhs, rhs, sizes, tile=tile)


@pytest.mark.parametrize("hot", range(G))
def test_one_hot_group(hot, tile, rng):
    lhs, rhs, _ = operands(rng, n=136)
    check(lhs, rhs, sizes_of.one_hot(M, G, hot), tile=tile)


@pytest.mark.parametrize("groups", [1, 2, 31, 32, 33, 64, 65, 129, 512])
def test_number_of_groups(groups, tile, rng):
    """Groups are looked up a warp's width at a time: the counts step over its multiples."""
    lhs, rhs, _ = operands(rng, k=64, n=72, g=groups)
    for _ in range(6):
        check(lhs, rhs, sizes_of.any_kind(rng, M, groups), tile=tile)
    check(lhs, rhs, sizes_of.one_hot(M - 1, groups, groups - 1), tile=tile)


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("local, groups", [(3, 8), (3, 70), (40, 70), (1, 1)])
def test_group_offset(local, groups, transpose_rhs, tile, rng):
    """rhs holds `local` of the groups; windows start before, among and behind them."""
    lhs, rhs, _ = operands(rng, k=64, n=72, g=local)
    far = [-(2**31), -(2**31) + 1, 2**31 - 1]
    near = np.unique(np.concatenate([np.arange(-local - 1, 3), groups + np.arange(-local - 1, 2)]))
    for offset in (*far, *near, *rng.integers(0, groups, 8)):
        for sizes in (sizes_of.multinomial(rng, M, groups), sizes_of.any_kind(rng, M, groups)):
            check(lhs, rhs, sizes, np.int32(offset), transpose_rhs=transpose_rhs, tile=tile)


@pytest.mark.parametrize("m", [0, 1, 7, 64, 127, 129, 257])
def test_number_of_rows(m, tile, rng):
    lhs, rhs, _ = operands(rng, m=m, k=72, n=264)
    for sizes in (sizes_of.uniform(m, G), sizes_of.any_kind(rng, m, G), sizes_of.one_hot(m, G, 3)):
        check(lhs, rhs, sizes, tile=tile)


@MAJORS
@pytest.mark.parametrize("k, n", [(8, 8), (40, 136), (136, 40), (2880, 264), (64, 2880)])
def test_dimensions_off_the_tile(k, n, transpose_lhs, transpose_rhs, tile, rng):
    lhs, rhs, _ = operands(rng, k=k, n=n)
    sizes = sizes_of.multinomial(rng, M - 100, G)
    check(lhs, rhs, sizes, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, tile=tile)


@MAJORS
@pytest.mark.parametrize("m, k, n", [(333, 37, 51), (333, 1, 64), (333, 64, 1), (256, 129, 300)])
def test_rows_off_16_bytes(m, k, n, transpose_lhs, transpose_rhs, tile, rng):
    lhs, rhs, cotangent = operands(rng, m=m, k=k, n=n)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    for sizes in (sizes_of.multinomial(rng, m, G), sizes_of.any_kind(rng, m, G)):
        check(lhs, rhs, sizes, preferred_element_type=F32, **majors, tile=tile)
    stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
    got = NONCONTRACTING.cotangents(*stored, sizes, cotangent, implementation="cuda", **majors)
    exact = oracle.noncontracting_cotangents(lhs, rhs, sizes, cotangent)
    oracle.check(swap(got[0], transpose_lhs), exact[0])
    oracle.check(swap(got[1], transpose_rhs), exact[1])


# Every way in which lhs, rhs, group_sizes and group_offset can be batched.
@pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2) if any(b)])
def test_batches(batched, tile, rng):
    batch, local, groups = 3, 4, 6
    shapes = (M, 72), (local, 72, 136), (groups,), ()
    shapes = [(batch, *s) if b else s for b, s in zip(batched, shapes, strict=True)]
    lhs, rhs = (random(rng, shape, BF16) for shape in shapes[:2])
    sizes = rng.integers(-20, 2 * M // groups, shapes[2], dtype=np.int32)
    offset = rng.integers(-2, groups + 1, shapes[3], dtype=np.int32)

    @jax.jit
    def run(lhs, rhs, sizes, offset):
        call = partial(noncontracting, implementation="cuda", tile=tile)
        return jax.vmap(call, in_axes=[0 if b else None for b in batched])(lhs, rhs, sizes, offset)

    oracle.check(
        run(lhs, rhs, sizes, offset), oracle.ragged_noncontracting(lhs, rhs, sizes, offset)
    )


def test_many_tiles_for_each_processor(tile, rng):
    """1024 and more tiles on 132 processors: each one walks over several, and over tails."""
    m, k, n = 8192, 200, 4096
    lhs, rhs, _ = operands(rng, m=m, k=k, n=n)
    for sizes in (sizes_of.multinomial(rng, m, G), sizes_of.zipf(rng, m - 1000, G)):
        check(lhs, rhs, sizes, tile=tile)


@MAJORS
@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_tiles_of_zeros_among_others(out_dtype, transpose_lhs, transpose_rhs, tile, rng):
    """Each processor has tiles of groups in the window, before and behind it, and past them all."""
    m, groups, local = 8192, 200, 90
    lhs, rhs, _ = operands(rng, m=m, g=local)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    for sizes in (
        sizes_of.multinomial(rng, m - 700, groups),
        sizes_of.zipf(rng, m - 700, groups),
    ):
        offset = rng.integers(1, groups - local, dtype=np.int32)
        check(lhs, rhs, sizes, offset, preferred_element_type=out_dtype, **majors, tile=tile)


def test_results_past_two_to_the_31_elements(tile, rng):
    """Addresses must not be counted in 32 bits; the last rows show it."""
    m, k, n = 2**18 + 2**15, 64, 2**13
    lhs, rhs, _ = operands(rng, m=m, k=k, n=8)
    rhs = random(rng, (2, k, n), BF16)
    sizes = np.array([m - 300, 200], np.int32)
    out = noncontracting(lhs, rhs, sizes, implementation="cuda", tile=tile)
    last = 512
    exact = oracle.ragged_noncontracting(lhs[-last:], rhs, [last - 300, 200])
    oracle.check(out[-last:], exact)
    oracle.check(out[:last], oracle.ragged_noncontracting(lhs[:last], rhs, [last, 0]))
