"""The contracting kernel, out[i] = lhs[rows of i].T @ rhs[rows of i], against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.ops import CONTRACTING, NONCONTRACTING, contracting, random, swap

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
# Three by three output tiles for each group, none of the last ones full.
M, K, N, G = 776, 264, 520, 8

MAJORS = pytest.mark.parametrize(
    "transpose_lhs, transpose_rhs", [(a, b) for a in (False, True) for b in (False, True)]
)


def operands(rng, m=M, k=K, n=N, g=G, dtype=BF16):
    return [random(rng, shape, dtype) for shape in CONTRACTING.shapes(m, k, n, g)]


def check(lhs, rhs, sizes, offset=None, *, transpose_lhs=False, transpose_rhs=False, **options):
    """Runs the kernel on operands stored in the given majors."""
    out = contracting(
        swap(lhs, transpose_lhs),
        swap(rhs, transpose_rhs),
        sizes,
        offset,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        implementation="cuda",
        **options,
    )
    exact = oracle.ragged_contracting(lhs, rhs, sizes, 0 if offset is None else offset)
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
        d_lhs, d_rhs = CONTRACTING.cotangents(
            *stored, sizes, cotangent, implementation="cuda", **majors
        )
        exact_lhs, exact_rhs = oracle.contracting_cotangents(lhs, rhs, sizes, cotangent)
        oracle.check(swap(d_lhs, transpose_lhs), exact_lhs)
        oracle.check(swap(d_rhs, transpose_rhs), exact_rhs)


@MAJORS
def test_any_group_sizes(transpose_lhs, transpose_rhs, tile, rng):
    """Each pair of majors ends a group's rows in its own way, so each sees many sizes."""
    lhs, rhs, _ = operands(rng, k=72, n=136)
    for _ in range(75):
        sizes = sizes_of.any_kind(rng, M, G)
        check(lhs, rhs, sizes, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, tile=tile)


@MAJORS
@pytest.mark.parametrize("first", [0, 1, 7, 63])
def test_every_group_length_up_to_two_steps(first, transpose_lhs, transpose_rhs, tile, rng):
    """Groups of 1 to 130 rows, from every alignment of their first row that `first` gives."""
    m = 1320
    lhs, rhs, _ = operands(rng, m=m, k=64, n=64, g=18)
    lengths = rng.permutation(np.arange(1, 131))
    for some in lengths.reshape(-1, 10):
        sizes = np.concatenate([[first], some, [0, 0, 1, 0, 5, 64, 3]]).astype(np.int32)
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


@pytest.mark.parametrize("groups", [1, 8, 70])
def test_group_offset(groups, tile, rng):
    """Slice i of the result is group offset + i, zero where there is no such group."""
    lhs, rhs, _ = operands(rng, k=64, n=72, g=groups)
    far = [-(2**31), 2**31 - 1]
    for offset in (*far, -groups - 1, -groups, -1, 0, 1, groups - 1, groups, groups + 1):
        for sizes in (sizes_of.multinomial(rng, M, groups), sizes_of.any_kind(rng, M, groups)):
            check(lhs, rhs, sizes, np.int32(offset), tile=tile)


@pytest.mark.parametrize("local", [3, 40])
def test_gradient_of_a_window_of_groups(local, rng):
    """The weights' cotangent has the window's groups only, of the 70 that there are."""
    groups = 70
    lhs, rhs, cotangent = (random(rng, s, BF16) for s in NONCONTRACTING.shapes(M, 64, 72, local))
    for offset in (-local, -2, 0, 1, 29, 31, groups - local, groups - 1, groups):
        sizes = sizes_of.any_kind(rng, M, groups)
        got = NONCONTRACTING.cotangents(
            lhs, rhs, sizes, cotangent, np.int32(offset), implementation="cuda"
        )
        oracle.check_all(got, oracle.noncontracting_cotangents(lhs, rhs, sizes, cotangent, offset))


@MAJORS
@pytest.mark.parametrize("k, n", [(8, 8), (40, 136), (136, 40), (2880, 264), (64, 2880)])
def test_dimensions_off_the_tile(k, n, transpose_lhs, transpose_rhs, tile, rng):
    lhs, rhs, _ = operands(rng, k=k, n=n)
    sizes = sizes_of.multinomial(rng, M - 100, G)
    check(lhs, rhs, sizes, transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs, tile=tile)


@MAJORS
@pytest.mark.parametrize("m, k, n", [(333, 37, 51), (333, 1, 64), (333, 64, 1), (1, 40, 40)])
def test_rows_off_16_bytes(m, k, n, transpose_lhs, transpose_rhs, tile, rng):
    lhs, rhs, _ = operands(rng, m=m, k=k, n=n)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    for _ in range(3):
        check(
            lhs, rhs, sizes_of.any_kind(rng, m, G), preferred_element_type=F32, **majors, tile=tile
        )


def test_no_rows(tile, rng):
    lhs, rhs, _ = operands(rng, m=0)
    check(lhs, rhs, np.full(G, 3, np.int32), tile=tile)


# Every way in which lhs, rhs, group_sizes and group_offset can be batched.
@pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2) if any(b)])
@pytest.mark.parametrize("transpose", [False, True])
def test_batches(batched, transpose, tile, rng):
    batch, groups = 3, 6
    shapes = (M, 72), (M, 136), (groups,), ()
    shapes = [(batch, *s) if b else s for b, s in zip(batched, shapes, strict=True)]
    lhs, rhs = (random(rng, shape, BF16) for shape in shapes[:2])
    sizes = rng.integers(-20, 2 * M // groups, shapes[2], dtype=np.int32)
    offset = rng.integers(-2, groups + 1, shapes[3], dtype=np.int32)
    majors = dict(transpose_lhs=transpose, transpose_rhs=transpose)

    @jax.jit
    def run(*operands):
        call = partial(contracting, implementation="cuda", tile=tile, **majors)
        return jax.vmap(call, in_axes=[0 if b else None for b in batched])(*operands)

    out = run(swap(lhs, transpose), swap(rhs, transpose), sizes, offset)
    oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes, offset))


def test_many_tiles_for_each_processor(tile, rng):
    m, k, n = 2048, 1100, 2048
    lhs, rhs, _ = operands(rng, m=m, k=k + 4, n=n)
    for sizes in (sizes_of.multinomial(rng, m, G), sizes_of.zipf(rng, m - 300, G)):
        check(lhs, rhs, sizes, tile=tile)


@MAJORS
@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_tiles_of_any_length_follow_one_another(out_dtype, transpose_lhs, transpose_rhs, tile, rng):
    """From none to dozens of steps, so that a processor's tiles begin in every stage."""
    m, groups = 8192, 85
    lhs, rhs, _ = operands(rng, m=m)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    lengths = np.array([0, 0, 1, 3, 20, 64, 65, 130, 320, 700], np.int32)
    for sizes in (
        rng.choice(lengths, groups, p=[0.2, 0.3, *[0.06] * 7, 0.08]),
        sizes_of.zipf(rng, m, groups),
    ):
        check(lhs, rhs, sizes, preferred_element_type=out_dtype, **majors, tile=tile)


def test_results_past_two_to_the_31_elements(tile, rng):
    """Addresses must not be counted in 32 bits; the last group shows it."""
    m, k, n, groups = 300, 2**13, 2**13, 33
    lhs, rhs = random(rng, (m, k), BF16), random(rng, (m, n), BF16)
    sizes = np.zeros(groups, np.int32)
    sizes[0], sizes[-1] = 100, 150
    out = contracting(lhs, rhs, sizes, implementation="cuda", tile=tile)
    part = slice(0, 512)
    exact = oracle.ragged_contracting(lhs[:, part], rhs[:, part], [100, 150])
    oracle.check(jnp.stack([out[0, part, part], out[-1, part, part]]), exact)
    end = slice(-512, None)
    exact = oracle.ragged_contracting(lhs[:, end], rhs[:, end], [100, 150])
    oracle.check(jnp.stack([out[0, end, end], out[-1, end, end]]), exact)
    assert not jnp.any(out[1:-1])
