"""Weight gradients of unequal groups, whose tiles are cut along their rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import call as ragged_call
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.ops import CONTRACTING, NONCONTRACTING, contracting, random

CLUSTERS = H200.multiprocessors // DEFAULT_TILE.cluster


def operands(rng, m, k, n, groups, dtype=BF16):
    return [random(rng, shape, dtype) for shape in CONTRACTING.shapes(m, k, n, groups)[:2]]


def units_of(k, n, tile):
    pairs, odd = divmod(-(-k // tile.tile_m), 2)
    columns = -(-n // tile.tile_n)
    return pairs * columns + odd * -(-columns // 2)


def is_cut(
    schedules, sizes, m, k, n, out_dtype=BF16, offset=0, groups=None, tile=DEFAULT_TILE
) -> bool:
    """Returns whether the kernel cuts tiles on a device with as many processors as an H200."""
    units = units_of(k, n, tile)
    sizes = np.ascontiguousarray(np.atleast_2d(sizes), np.int32)
    length = schedules.worthwhile_chain_length(
        sizes,
        np.full(1, offset, np.int32),
        batches=sizes.shape[0],
        local_groups=groups or sizes.shape[1],
        m=m,
        units=units,
        zeros_cost=7 if out_dtype == F32 else 4,
        most_sums=schedules.most_chain_sums(units, CLUSTERS),
        clusters=CLUSTERS,
    )
    return length > 0


def check(schedules, lhs, rhs, sizes, tile, out_dtype=None, cut=True):
    options = dict(preferred_element_type=out_dtype, implementation="cuda", tile=tile)
    out = contracting(lhs, rhs, sizes, **options)
    assert is_cut(schedules, sizes, *lhs.shape, rhs.shape[1], out.dtype, tile=tile) == cut
    oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes))
    return out


@pytest.mark.parametrize("dtype, out_dtype", [(BF16, None), (BF16, F32), (F16, None), (F16, F32)])
def test_one_hot_group(dtype, out_dtype, tile, schedules, rng):
    m, k, n, groups = 9000, 520, 776, 8
    lhs, rhs = operands(rng, m, k, n, groups, dtype)
    for hot in range(groups):
        check(schedules, lhs, rhs, sizes_of.one_hot(m - 5 * hot, groups, hot), tile, out_dtype)


# These numbers of units give one chain, several chains in as many pieces as clusters allow, chains
# with and without tails, and whole waves before chains (`csrc/scheduler/chains.h`).
@pytest.mark.parametrize("units", [1, 2, 7, 9, 16, 22, 24, 32, 33, 34, 48, 56, 65, 67, 90])
def test_number_of_units(units, tile, schedules, rng):
    m, k, n, groups = 16384 if units == 48 else 8192, 136, tile.tile_n * units, 3
    lhs, rhs = operands(rng, m, k, n, groups)
    sizes = np.array([40, m - 100, 60], np.int32)
    check(schedules, lhs, rhs, sizes, tile, cut=units not in (56, 65))


@pytest.mark.parametrize("k, n", [(8, 8), (64, 2056), (136, 40), (520, 264), (1160, 1032)])
def test_dimensions_off_the_tile(k, n, schedules, rng):
    m, groups = 12345, 5
    lhs, rhs = operands(rng, m, k, n, groups)
    for sizes in ([0, 12000, 0, 1, 0], [6000, 0, 0, 6001, 300], [100, 63, 65, 129, 11900]):
        out = contracting(lhs, rhs, np.array(sizes, np.int32), implementation="cuda")
        oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes))
    assert is_cut(schedules, sizes, m, k, n)


@pytest.mark.parametrize("n, tile", [(520, DEFAULT_TILE), (520, NARROW_TILE), (72, NARROW_TILE)])
def test_any_group_sizes(n, tile, schedules, rng):
    m, k, groups = 8192, 264, 8
    lhs, rhs = operands(rng, m, k, n, groups)
    num_cut = num_whole = 0
    # One list in six is cut.
    for _ in range(600):
        sizes = sizes_of.any_kind(rng, m, groups)
        cut = is_cut(schedules, sizes, m, k, n, tile=tile)
        num_cut, num_whole = num_cut + cut, num_whole + (not cut)
        out = contracting(lhs, rhs, sizes, implementation="cuda", tile=tile)
        oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes))
        if min(num_cut, num_whole) == 10:
            break
    assert min(num_cut, num_whole) == 10


def test_many_groups(tile, schedules, rng):
    """Chains pass through many groups, most of which have few rows."""
    m, k, n, groups = 20000, 264, 264, 300
    lhs, rhs = operands(rng, m, k, n, groups)
    for hot in (0, 31, 32, 200, 299):
        sizes = rng.integers(0, 3, groups, dtype=np.int32)
        sizes[hot] = 19000
        check(schedules, lhs, rhs, sizes, tile)


@pytest.mark.parametrize("k, n", [(104, 72), (264, 16)])
def test_few_tiles_of_many_groups(k, n, tile, schedules, rng):
    """Chains of few tiles are cut into many pieces, and some pieces have several groups."""
    m, groups = 20000, 64
    lhs, rhs = operands(rng, m, k, n, groups)
    for hot in (0, 40, 63):
        sizes = rng.integers(100, 260, groups, dtype=np.int32)
        sizes[hot] = 7000
        check(schedules, lhs, rhs, sizes, tile)


SIZES = np.array([50, 0, 8000, 0, 0, 100, 0, 500, 0], np.int32)


def test_group_offset(schedules, rng):
    m, k, n = 9000, 304, 520
    lhs, rhs = operands(rng, m, k, n, len(SIZES))
    for offset in range(-len(SIZES) - 1, len(SIZES) + 2):
        out = contracting(lhs, rhs, SIZES, np.int32(offset), implementation="cuda")
        oracle.check(out, oracle.ragged_contracting(lhs, rhs, SIZES, offset))
    assert is_cut(schedules, SIZES, m, k, n, offset=1)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_gradient_of_a_window_of_groups(offset, schedules, rng):
    m, k, n, local = 9000, 304, 520, 3
    lhs, rhs, cotangent = (random(rng, s, BF16) for s in NONCONTRACTING.shapes(m, k, n, local))
    got = NONCONTRACTING.cotangents(
        lhs, rhs, SIZES, cotangent, np.int32(offset), implementation="cuda"
    )
    oracle.check_all(got, oracle.noncontracting_cotangents(lhs, rhs, SIZES, cotangent, offset))
    assert is_cut(schedules, SIZES, m, k, n, offset=offset, groups=local) == (offset < 3)


def test_batches(schedules, rng):
    batch, m, k, n = 3, 6000, 136, 264
    lhs = random(rng, (batch, m, k), BF16)
    rhs = random(rng, (batch, m, n), BF16)
    sizes = np.array([[0, 5900, 0, 3], [0, 0, 0, 0], [6000, 0, 0, 0]], np.int32)
    call = jax.jit(jax.vmap(lambda *x: contracting(*x, implementation="cuda")))
    oracle.check(call(lhs, rhs, sizes), oracle.ragged_contracting(lhs, rhs, sizes))


def test_neighbours_do_not_leak(tile, schedules, rng):
    """NaN in unowned rows and in one group reaches no other result, not even through added sums."""
    m, k, n = 9000, 264, 520
    lhs, rhs = operands(rng, m, k, n, 4)
    sizes = np.array([100, 8001, 0, 300], np.int32)
    run = partial(contracting, implementation="cuda", tile=tile)
    clean = np.asarray(check(schedules, lhs, rhs, sizes, tile))
    poisoned = lhs.copy(), rhs.copy()
    for x in poisoned:
        x[sizes.sum() :] = np.nan
    np.testing.assert_array_equal(run(*poisoned, sizes), clean)
    for x in poisoned:
        x[:100] = np.nan
    out = np.asarray(run(*poisoned, sizes))
    assert np.isnan(out[0].astype(np.float32)).all()
    np.testing.assert_array_equal(out[1:], clean[1:])


def test_same_inputs_give_the_same_bits(tile, schedules, rng):
    m, k, n, groups = 16384, 768, 8 * tile.tile_n, 16
    lhs, rhs = (jnp.asarray(x) for x in operands(rng, m, k, n, groups))
    for sizes in (sizes_of.one_hot(m, groups, 5), np.array([13000, *[7] * 14, 3000], np.int32)):
        first = np.asarray(check(schedules, lhs, rhs, sizes, tile)).tobytes()
        run = partial(contracting, implementation="cuda", tile=tile)
        results = [run(lhs, rhs, sizes) for _ in range(40)]
        assert all(np.asarray(result).tobytes() == first for result in results)


@partial(jax.jit, static_argnames=("groups", "tile"), donate_argnums=3, keep_unused=True)
def with_workspace(lhs, rhs, sizes, memory, groups, tile):
    """Returns the result and the workspace, which takes over the bytes of the donated `memory`."""
    call = jax.ffi.ffi_call(
        ragged_call.CONTRACTING_TARGET,
        [
            jax.ShapeDtypeStruct((groups, lhs.shape[1], rhs.shape[1]), lhs.dtype),
            jax.ShapeDtypeStruct(memory.shape, memory.dtype),
        ],
    )
    attributes = {name: np.int32(size) for name, size in tile.sizes().items()}
    return call(
        lhs,
        rhs,
        sizes,
        jnp.zeros(1, jnp.int32),
        transpose_lhs=False,
        transpose_rhs=False,
        kind="cooperative",
        terms=np.int32(0),
        **attributes,
    )


@pytest.mark.parametrize("size", [16, 300_000, 3_000_000, 40_000_000])
def test_workspace_of_any_size_and_contents(size, tile, rng):
    """No tile is cut if there is no room for sums, and stale sums and hints do no harm."""
    m, k, n, groups = 9000, 520, 776, 4
    lhs, rhs = operands(rng, m, k, n, groups)
    memory = jnp.asarray(rng.integers(0, 256, size, dtype=np.uint8))
    address = memory.unsafe_buffer_pointer()
    for hot in range(groups):
        sizes = sizes_of.one_hot(m - hot, groups, hot)
        out, memory = with_workspace(lhs, rhs, sizes, memory, groups, tile)
        assert memory.unsafe_buffer_pointer() == address
        oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes))
