"""Weight gradients added to float32 accumulators in place, against float64 and bit by bit."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import call as ragged_call
from jax_grouped_gemm._src.ragged.tiles import PINGPONG_TILE
from tests.support import group_sizes as sizes_of
from tests.support import oracle
from tests.support.dtypes import BF16, F16, F32
from tests.support.float32_errors import PRECISIONS, PRODUCT_ERROR
from tests.support.ops import CONTRACTING, MAJORS, contracting, random, swap

# Each group has three by three output tiles, of which the last ones are not full.
M, K, N, G = 776, 264, 520, 8
CUT_M = 9000  # From 4096 rows on, tiles of unequal groups are cut.

# The plan may choose these tiles if the rows of neither operand are contiguous.
EVERY_TILE = pytest.mark.parametrize("tile", (DEFAULT_TILE,) + (PINGPONG_TILE,), ids=str)


@partial(
    jax.jit,
    static_argnames=("transpose_lhs", "transpose_rhs", "precision", "tile"),
    donate_argnums=0,
)
def accumulate(accumulator, lhs, rhs, sizes, offset=None, *, tile=None, **options):
    with jgg.use_tiles(wgrad=tile):
        return jgg.ragged_dot_accumulate(
            accumulator, lhs, rhs, sizes, group_offset=offset, implementation="cuda", **options
        )


def operands(rng, m=M, k=K, n=N, g=G, dtype=BF16):
    """Returns an accumulator and two factors."""
    lhs, rhs, accumulator = CONTRACTING.shapes(m, k, n, g)
    accumulator = 10 * rng.standard_normal(accumulator, np.float32)
    return accumulator, random(rng, lhs, dtype), random(rng, rhs, dtype)


def check(accumulator, lhs, rhs, sizes, offset=None, **options):
    """Runs the kernel on operands stored in the given majors."""
    transpose_lhs, transpose_rhs = (
        options.get(name, False) for name in ("transpose_lhs", "transpose_rhs")
    )
    donated = jnp.asarray(accumulator)
    address = donated.unsafe_buffer_pointer()
    out = accumulate(
        donated, swap(lhs, transpose_lhs), swap(rhs, transpose_rhs), sizes, offset, **options
    )
    assert out.unsafe_buffer_pointer() == address
    product = oracle.ragged_contracting(
        lhs, rhs, sizes, 0 if offset is None else offset, num_groups=len(accumulator)
    )
    oracle.check(out, oracle.accumulated(accumulator, product))
    assert_untouched(out, accumulator, product)
    return out


def assert_untouched(out, accumulator, product):
    """Checks that no bit changes where nothing is added."""
    alone = product.depth == 0
    bits = (np.asarray(x).view(np.uint32) for x in (out, accumulator))
    np.testing.assert_array_equal(*(x[alone] for x in bits))


@MAJORS
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_dtypes_and_majors(dtype, transpose_lhs, transpose_rhs, tile, rng):
    arrays = operands(rng, dtype=dtype)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    for sizes in sizes_of.typical(rng, M, G):
        check(*arrays, sizes, **majors, tile=tile)


def test_is_the_rounded_sum_of_accumulator_and_product(tile, rng):
    """Results are exact to the last bit if no tile is cut."""
    accumulator, lhs, rhs = operands(rng)
    for sizes in (sizes_of.uniform(M, G), *(sizes_of.any_kind(rng, M, G) for _ in range(20))):
        product = contracting(
            lhs, rhs, sizes, preferred_element_type=F32, tile=tile, implementation="cuda"
        )
        out = accumulate(jnp.asarray(accumulator), lhs, rhs, sizes, tile=tile)
        np.testing.assert_array_equal(out, accumulator + np.asarray(product))


def test_any_group_sizes(tile, rng):
    arrays = operands(rng, k=72, n=136)
    for _ in range(75):
        check(*arrays, sizes_of.any_kind(rng, M, G), tile=tile)


@MAJORS
def test_any_group_sizes_of_other_majors(transpose_lhs, transpose_rhs, rng):
    arrays = operands(rng, k=72, n=136)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    for _ in range(40):
        check(*arrays, sizes_of.any_kind(rng, M, G), **majors)


def test_groups_without_rows_keep_every_bit(tile, rng):
    """Accumulators hold -0, subnormals and NaN, whose bits an addition of zero may change."""
    accumulator, lhs, rhs = operands(rng, k=72, n=136)
    odd = np.array([0x80000000, 1, 0x807FFFFF, 0x7F800001, 0xFFC12345], np.uint32).view(np.float32)
    for sizes in sizes_of.zero_patterns(rng, M, G):
        for group in np.flatnonzero(sizes == 0):
            accumulator[group] = rng.choice(odd, accumulator.shape[1:])
        for group in np.flatnonzero(sizes):
            accumulator[group] = rng.standard_normal(accumulator.shape[1:], np.float32)
        product = oracle.ragged_contracting(lhs, rhs, sizes)
        out = np.asarray(accumulate(jnp.asarray(accumulator), lhs, rhs, sizes, tile=tile))
        assert_untouched(out, accumulator, product)
        exact = oracle.accumulated(np.where(product.depth > 0, accumulator, 0), product)
        oracle.check(np.where(product.depth > 0, out, 0), exact)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poisoned_neighbours(poison, tile, rng):
    """Rows of other groups, and rows of no group, never reach an accumulator."""
    accumulator, lhs, rhs = operands(rng)
    sizes = np.array([129, 0, 70, 1, 150, 63, 0, 200], np.int32)
    clean = np.asarray(check(accumulator, lhs, rhs, sizes, tile=tile))
    ends = np.cumsum(sizes)
    for group in (0, 2, 3, 7):
        dirty = [x.copy() for x in (lhs, rhs)]
        for x in dirty:
            x[ends[group] - sizes[group] : ends[group]] = poison
            x[ends[-1] :] = poison
        out = np.asarray(accumulate(jnp.asarray(accumulator), *dirty, sizes, tile=tile))
        others = np.arange(G) != group
        np.testing.assert_array_equal(out[others], clean[others])
        assert not np.isfinite(out[group]).any()


@MAJORS
@pytest.mark.parametrize("k, n", [(8, 8), (40, 136), (136, 40), (2880, 264), (64, 2880)])
def test_dimensions_off_the_tile(k, n, transpose_lhs, transpose_rhs, rng):
    arrays = operands(rng, k=k, n=n)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    check(*arrays, sizes_of.multinomial(rng, M - 100, G), **majors)


@MAJORS
@pytest.mark.parametrize("m, k, n", [(333, 37, 51), (333, 1, 64), (333, 64, 1), (333, 64, 40)])
def test_rows_off_16_bytes(m, k, n, transpose_lhs, transpose_rhs, rng):
    accumulator, lhs, rhs = operands(rng, m=m, k=k, n=n)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
    for _ in range(3):
        sizes = sizes_of.any_kind(rng, m, G)
        out = accumulate(jnp.asarray(accumulator), *stored, sizes, **majors)
        product = oracle.ragged_contracting(lhs, rhs, sizes)
        oracle.check(out, oracle.accumulated(accumulator, product))


@pytest.mark.parametrize("offset", [-9, -2, 0, 3, 7, 20])
@pytest.mark.parametrize("local", [3, G])
def test_group_offset(offset, local, rng):
    accumulator, lhs, rhs = operands(rng)
    sizes = sizes_of.multinomial(rng, M, G)
    check(accumulator[:local], lhs, rhs, sizes, np.int32(offset))


@pytest.mark.parametrize(
    "sizes", [[9000], [40, 8900, 60], [0, 0, 8192, 0], [3000, 0, 1, 6000], [0] * 30 + [9000]]
)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_unequal_groups(sizes, dtype, tile, rng):
    """Only one piece of a cut tile adds the accumulator."""
    sizes = np.array(sizes, np.int32)
    arrays = operands(rng, m=CUT_M, k=520, n=776, g=len(sizes), dtype=dtype)
    check(*arrays, sizes, tile=tile)


def test_any_unequal_groups(tile, rng):
    m = 8192
    arrays = operands(rng, m=m, k=264, n=520)
    for _ in range(40):
        check(*arrays, sizes_of.any_kind(rng, m, G), tile=tile)


def test_many_tiles_and_groups(tile, rng):
    """Clusters compute several tiles, and use each stage and each slot several times."""
    m, groups = 20000, 40
    arrays = operands(rng, m=m, k=1160, n=1400, g=groups)
    for sizes in (sizes_of.multinomial(rng, m, groups), sizes_of.zipf(rng, m - 77, groups)):
        check(*arrays, sizes, tile=tile)


@PRECISIONS
@MAJORS
def test_float32_operands(precision, transpose_lhs, transpose_rhs, rng):
    """XLA adds products of float32 operands to the accumulator."""
    accumulator, lhs, rhs = operands(rng, dtype=F32)
    majors = dict(transpose_lhs=transpose_lhs, transpose_rhs=transpose_rhs)
    stored = swap(lhs, transpose_lhs), swap(rhs, transpose_rhs)
    for sizes in (sizes_of.multinomial(rng, M, G), *sizes_of.zero_patterns(rng, M, G)[::51]):
        out = accumulate(jnp.asarray(accumulator), *stored, sizes, precision=precision, **majors)
        product = oracle.ragged_contracting(lhs, rhs, sizes)
        exact = oracle.accumulated(accumulator, product)
        oracle.check(out, exact, product_error=PRODUCT_ERROR[precision])


def test_same_inputs_give_the_same_bits(tile, rng):
    m, groups = 16384, 16
    accumulator, lhs, rhs = operands(rng, m=m, k=768, n=1024, g=groups)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    for sizes in (
        sizes_of.one_hot(m, groups, 5),
        np.array([13000, *[7] * 14, 3000], np.int32),
        sizes_of.multinomial(rng, m, groups),
    ):
        results = {
            np.asarray(accumulate(jnp.asarray(accumulator), lhs, rhs, sizes, tile=tile)).tobytes()
            for _ in range(30)
        }
        assert len(results) == 1


def test_an_accumulator_that_is_not_donated_is_kept(rng):
    accumulator, lhs, rhs = operands(rng)
    sizes = sizes_of.multinomial(rng, M, G)
    kept = jnp.asarray(accumulator)
    run = jax.jit(partial(jgg.ragged_dot_accumulate, implementation="cuda"))
    for _ in range(2):
        out = run(kept, lhs, rhs, sizes)
        product = oracle.ragged_contracting(lhs, rhs, sizes)
        oracle.check(out, oracle.accumulated(accumulator, product))
    np.testing.assert_array_equal(kept, accumulator)


def test_microbatches(rng):
    """A scan adds up products in the memory of the accumulator that it began with."""
    steps = 4
    accumulator, lhs, rhs = operands(rng, m=steps * M)
    sizes = np.stack([sizes_of.any_kind(rng, M, G) for _ in range(steps)])
    shaped = lhs.reshape(steps, M, K), rhs.reshape(steps, M, N)

    @partial(jax.jit, donate_argnums=0)
    def run(accumulator, lhs, rhs, sizes):
        def step(accumulator, batch):
            return jgg.ragged_dot_accumulate(accumulator, *batch, implementation="cuda"), None

        return jax.lax.scan(step, accumulator, (lhs, rhs, sizes))[0]

    out = run(jnp.asarray(accumulator), *shaped, sizes)
    products = oracle.ragged_contracting(*shaped, sizes)
    total = oracle.Exact(
        products.value.sum(0), products.magnitude.sum(0), products.depth.sum(0), []
    )
    oracle.check(out, oracle.accumulated(accumulator, total))


@pytest.mark.parametrize("batched", [b for b in np.ndindex(2, 2, 2, 2, 2) if any(b)])
def test_batches(batched, rng):
    """The operands are batched in every possible way."""
    batch, groups = 3, 6
    shapes = (groups, 72, 136), (M, 72), (M, 136), (groups,), ()
    shapes = [(batch, *s) if b else s for b, s in zip(batched, shapes, strict=True)]
    accumulator = 10 * rng.standard_normal(shapes[0], np.float32)
    lhs, rhs = (random(rng, shape, BF16) for shape in shapes[1:3])
    sizes = rng.integers(-20, 2 * M // groups, shapes[3], dtype=np.int32)
    offset = rng.integers(-2, groups + 1, shapes[4], dtype=np.int32)

    @jax.jit
    def run(*operands):
        def call(accumulator, lhs, rhs, sizes, offset):
            return jgg.ragged_dot_accumulate(
                accumulator, lhs, rhs, sizes, group_offset=offset, implementation="cuda"
            )

        return jax.vmap(call, in_axes=[0 if b else None for b in batched])(*operands)

    out = run(accumulator, lhs, rhs, sizes, offset)
    product = oracle.ragged_contracting(lhs, rhs, sizes, offset)
    if any(batched[1:]):
        oracle.check(out, oracle.accumulated(accumulator, product))
    else:
        for one, start in zip(out, accumulator, strict=True):
            oracle.check(one, oracle.accumulated(start, product))


def test_gradients(rng):
    accumulator, lhs, rhs = operands(rng)
    sizes = sizes_of.multinomial(rng, M - 50, G)
    cotangent = rng.standard_normal(accumulator.shape, np.float32)

    @jax.jit
    def run(accumulator, lhs, rhs, cotangent):
        def of_operands(*operands):
            return jgg.ragged_dot_accumulate(*operands, sizes, implementation="cuda")

        return jax.vjp(of_operands, accumulator, lhs, rhs)[1](cotangent)

    d_accumulator, *factors = run(accumulator, lhs, rhs, cotangent)
    np.testing.assert_array_equal(d_accumulator, cotangent)
    rounded = cotangent.astype(BF16)
    oracle.check_all(factors, oracle.contracting_cotangents(lhs, rhs, sizes, rounded))


@partial(jax.jit, donate_argnums=(0, 4), keep_unused=True)
def with_workspace(accumulator, lhs, rhs, sizes, memory):
    """Returns the result and the workspace, which takes over the bytes of the donated `memory`."""
    call = jax.ffi.ffi_call(
        ragged_call.ACCUMULATE_TARGET,
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (accumulator, memory)],
        input_output_aliases={0: 0},
    )
    tile = {name: np.int32(size) for name, size in DEFAULT_TILE.sizes().items()}
    flags = dict(transpose_lhs=False, transpose_rhs=False)
    return call(accumulator, lhs, rhs, sizes, jnp.zeros(1, jnp.int32), **flags, **tile)


@pytest.mark.parametrize("size", [16, 3_000_000, 40_000_000])
def test_workspace_of_any_size_and_contents(size, rng):
    """No tile is cut if there is no room for sums, and stale sums and hints do no harm."""
    groups = 4
    accumulator, lhs, rhs = operands(rng, m=CUT_M, k=520, n=776, g=groups)
    memory = jnp.asarray(rng.integers(0, 256, size, dtype=np.uint8))
    address = memory.unsafe_buffer_pointer()
    for hot in range(groups):
        sizes = sizes_of.one_hot(CUT_M - hot, groups, hot)
        out, memory = with_workspace(jnp.asarray(accumulator), lhs, rhs, sizes, memory)
        assert memory.unsafe_buffer_pointer() == address
        product = oracle.ragged_contracting(lhs, rhs, sizes)
        oracle.check(out, oracle.accumulated(accumulator, product))
        assert_untouched(out, accumulator, product)


def test_accumulators_past_two_to_the_31_elements(tile, rng):
    """Addresses need more than 32 bits, which the last group shows."""
    m, k, n, groups = 300, 2**13, 2**13, 33
    lhs, rhs = random(rng, (m, k), BF16), random(rng, (m, n), BF16)
    sizes = np.zeros(groups, np.int32)
    sizes[0], sizes[-1] = 100, 150
    out = accumulate(jnp.ones((groups, k, n), F32), lhs, rhs, sizes, tile=tile)
    for part in (slice(0, 512), slice(-512, None)):
        product = oracle.ragged_contracting(lhs[:, part], rhs[:, part], [100, 150])
        got = jnp.stack([out[0, part, part], out[-1, part, part]])
        oracle.check(got, oracle.accumulated(np.ones((2, 512, 512)), product))
    # Check group by group, because a copy of all groups would take another 8 GB.
    assert all(jnp.all(out[group] == 1) for group in range(1, groups - 1))
