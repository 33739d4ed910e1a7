"""Kernels at the largest sizes that they count to, and past the grids of earlier versions.

Rows are copies of a few thousand random rows. Their number is prime, so that a kernel that reads a
wrong row gives a wrong result, whatever power of two the row is off by. Rows near the start, the
middle and the end, and some rows between, are compared with float64. Contracted rows are zero
except in these places.

Each test takes up to three quarters of a card of 80 GB, which no other process may hold.
"""

import gc
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.activations import ACTIVATIONS
from jax_grouped_gemm._src.fp8.quantize import primitive as fp8
from jax_grouped_gemm._src.mlp.fp8.hidden.layer import HiddenLayer
from jax_grouped_gemm._src.mlp.fp8.hidden.primitive import ragged_hidden_gradients
from jax_grouped_gemm._src.mlp.kernels import FORWARD_KERNELS
from jax_grouped_gemm._src.ragged import primitive as ragged
from jax_grouped_gemm._src.sizes import LARGEST_SIZE
from tests.support import fp8_oracle
from tests.support.dtypes import BF16, E4M3, F32

SIZE = LARGEST_SIZE
PAST_GRID = 65536  # more than the second and third dimensions of a grid have
KERNEL = dict(implementation="cuda")
ROWS = 4093
NEAR = 130  # rows of each sample: more than a tile

pytestmark = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="takes most of a card: run this file by itself"
)


@pytest.fixture(autouse=True)
def room():
    """Frees the memory of a test before the next test begins."""
    yield
    gc.collect()


def if_it_fits(test):
    """Skips `test` if the device runs out of memory."""

    def run(*arguments, **options):
        try:
            test(*arguments, **options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            pytest.skip(f"the card has too little memory: {str(error).splitlines()[0]}")

    run.__name__, run.__doc__, run.__wrapped__ = test.__name__, test.__doc__, test
    return run


def sample(rng, size):
    """Returns indices near the start, the middle and the end of `size`, and some between."""
    near = np.arange(min(NEAR, size))
    middle = np.clip(size // 2 - NEAR // 2 + near, 0, size - 1)
    return np.unique([*near, *middle, *(size - 1 - near), *rng.integers(0, size, NEAR)])


def random(rng, *shape, dtype=BF16):
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def copies(base, size):
    """Returns an array [size, ...] whose row i is row i % ROWS of `base`."""
    return jax.jit(lambda x: x[jnp.arange(size) % len(x)])(base)


def only_at(places, values, size):
    """Returns an array [size, ...] with `values` at `places` and zeros elsewhere."""
    make = jax.jit(lambda i, x: jnp.zeros((size, *x.shape[1:]), x.dtype).at[i].set(x))
    return make(places, values)


def rows_of(x, places):
    return np.asarray(jax.jit(lambda x, i: x[i])(x, places)).astype(np.float64)


def assert_close(got, *factors, error=2.0**-8):
    """Checks products of bf16 or wider numbers, rounded to bf16 or better."""
    exact = factors[0] @ factors[1]
    bound = error * (np.abs(factors[0]) @ np.abs(factors[1])) + 1e-30
    assert (np.abs(got - exact) <= bound).all()


def wide(x):
    return np.asarray(x).astype(np.float64)


def groups(size):
    """Returns sizes of short groups at both ends of a long group."""
    return np.array([NEAR, size - 3 * NEAR, 0, 2 * NEAR], np.int32)


def matrix_of(sizes, places):
    return np.searchsorted(np.cumsum(sizes), places, side="right")


def check_rows(rng, got, lhs, matrices, sizes):
    places = sample(rng, sizes.sum())
    out, owners = rows_of(got, places), matrix_of(sizes, places)
    for group in np.unique(owners):
        own = owners == group
        assert_close(out[own], wide(lhs)[places[own] % ROWS], wide(matrices)[group])


@pytest.mark.parametrize("dtype, precision", [(BF16, None), (F32, "default"), (F32, "highest")])
@if_it_fits
def test_ragged_dot(dtype, precision, rng):
    lhs, rhs = random(rng, ROWS, 8, dtype=dtype), random(rng, 4, 8, 8, dtype=dtype)
    x = copies(lhs, SIZE)
    call = partial(jgg.ragged_dot, precision=precision, **KERNEL)
    (plan,) = jgg.explain(call, x, rhs, groups(SIZE)).plans
    for tile in plan.candidates:
        for sizes in (groups(SIZE), np.array([SIZE, 0, 0, 0], np.int32)):
            with jgg.use_tiles(forward=tile):
                out = jax.jit(call)(x, rhs, sizes)
            check_rows(rng, out, lhs, rhs, sizes)
            del out


@pytest.mark.parametrize("dtype, precision", [(BF16, None), (F32, "default"), (F32, "highest")])
@if_it_fits
def test_weight_gradient(dtype, precision, rng):
    sizes = groups(SIZE)
    places = sample(rng, SIZE)
    rows = [random(rng, len(places), 8, dtype=dtype) for _ in range(2)]
    x, dy = (only_at(places, values, SIZE) for values in rows)
    call = partial(
        ragged.ragged_contracting,
        num_groups=4,
        preferred_element_type=jnp.dtype(F32),
        precision=precision and jax.lax.Precision(precision),
        transpose_lhs=False,
        transpose_rhs=False,
        **KERNEL,
    )
    offset = np.zeros(1, np.int32)
    (plan,) = jgg.explain(call, x, dy, sizes, offset).plans
    for tile in plan.candidates:
        out = wide(jax.jit(partial(call, tile=tile, product="forward"))(x, dy, sizes, offset))
        for group in range(4):
            own = matrix_of(sizes, places) == group
            assert_close(out[group], wide(rows[0])[own].T, wide(rows[1])[own], error=2.0**-9)


@pytest.mark.parametrize("side", ["k", "n"])
@if_it_fits
def test_long_rows(side, rng):
    sizes, places = np.array([8], np.int32), sample(rng, SIZE)
    call = jax.jit(partial(jgg.ragged_dot, **KERNEL))
    if side == "k":
        short = [random(rng, len(places), 8) for _ in range(2)]
        lhs, rhs = (only_at(places, x, SIZE) for x in short)
        out = call(jax.jit(jnp.transpose)(lhs), rhs[None], sizes)
        assert_close(wide(out), wide(short[0]).T, wide(short[1]))
    else:
        lhs, rhs = random(rng, 8, 8), random(rng, ROWS, 8)
        transposed = jax.jit(jnp.transpose)(copies(rhs, SIZE))
        out = call(lhs, transposed[None], sizes)
        columns = np.asarray(jax.jit(lambda x, i: x[:, i])(out, places))
        assert_close(wide(columns), wide(lhs), wide(rhs)[places % ROWS].T)


@if_it_fits
def test_fp8_product(rng):
    lhs, rhs = random(rng, ROWS, 16, dtype=E4M3), random(rng, 4, 16, 16, dtype=E4M3)
    scales = np.exp2(rng.integers(-3, 3, (ROWS, 1))).astype(np.float32)
    operands = copies(lhs, SIZE), copies(scales, SIZE), rhs, np.ones((4, 1, 1), np.float32)
    call = partial(jgg.scaled_ragged_dot, preferred_element_type=BF16, **KERNEL)
    sizes = groups(SIZE)
    (plan,) = jgg.explain(call, *operands, sizes).plans
    for tile in plan.candidates:
        with jgg.use_tiles(forward=tile):
            out = jax.jit(call)(*operands, sizes)
        check_rows(rng, out, wide(lhs) * scales, rhs, sizes)
        del out


@if_it_fits
def test_fp8_weight_gradient(rng):
    m = SIZE - 512
    sizes, places = groups(m), sample(rng, m)
    rows = [random(rng, len(places), 16) for _ in range(2)]
    options = dict(dtype=E4M3, power_of_two=True, plain=False, transposed=True, **KERNEL)
    quantize = jax.jit(partial(fp8.quantize_ragged, **options))
    operands = []
    for values in rows:
        operands += quantize(only_at(places, values, m), sizes)
    out = jax.jit(partial(jgg.scaled_ragged_dot_contracting, num_rows=m, **KERNEL))(
        *operands, sizes
    )
    for group in range(4):
        own = matrix_of(sizes, places) == group
        # Both factors are in FP8, and each is rounded by up to a sixteenth.
        assert_close(wide(out)[group], wide(rows[0])[own].T, wide(rows[1])[own], error=0.14)


def check_quantised_rows(rng, base, size, values, scales):
    places = sample(rng, size)
    want = fp8_oracle.quantize(base[places % ROWS], (1, 128), E4M3)
    for got, exact in zip((values, scales), want, strict=True):
        np.testing.assert_array_equal(rows_of(got, places), exact.astype(np.float64))


OPTIONS = dict(dtype=E4M3, power_of_two=False, **KERNEL)


@if_it_fits
def test_quantised_rows(rng):
    base = random(rng, ROWS, 8)
    got = jax.jit(partial(fp8.quantize_rows, **OPTIONS))(copies(base, SIZE))
    check_quantised_rows(rng, base, SIZE, *got)


@pytest.mark.parametrize("size, columns", [(PAST_GRID * 128 + 300, 128), (SIZE - 512, 8)])
@if_it_fits
def test_quantised_groups(size, columns, rng):
    base, sizes = random(rng, ROWS, columns), groups(size)
    quantize = jax.jit(partial(fp8.quantize_ragged, plain=True, transposed=True, **OPTIONS))
    values, scales, values_t, scales_t = quantize(copies(base, size), sizes)
    check_quantised_rows(rng, base, size, values, scales)
    starts = np.cumsum(sizes) - sizes
    first_blocks = np.cumsum(-(-sizes // 128)) - -(-sizes // 128)
    for group in (0, 1, 3):
        for block in {0, sizes[group] // 256, -(-sizes[group] // 128) - 1}:
            rows = np.arange(128 * block, min(128 * block + 128, sizes[group]))
            want = fp8_oracle.quantize(base[(starts[group] + rows) % ROWS], (128, 1), E4M3)
            at = first_blocks[group] + np.array([block])
            np.testing.assert_array_equal(rows_of(values_t, at)[0, :, : len(rows)], wide(want[0]).T)
            np.testing.assert_array_equal(rows_of(scales_t, at), wide(want[1]))


@pytest.mark.parametrize("shape", [(PAST_GRID + 3, 128, 8), (1, PAST_GRID * 128 + 300, 8)])
@if_it_fits
def test_quantised_matrices(shape, rng):
    count, rows, columns = shape
    base = random(rng, ROWS, columns)
    x = copies(base, count * rows).reshape(shape)
    values, scales = jax.jit(partial(fp8.quantize_blocks, plain=True, transposed=False, **OPTIONS))(
        x
    )
    blocks = -(-rows // 128)
    for block in sample(rng, count * blocks)[:: NEAR // 4]:
        matrix, first = block // blocks, block % blocks * 128
        numbers = np.arange(first, min(first + 128, rows))
        own = base[(matrix * rows + numbers) % ROWS]
        want, scale = fp8_oracle.quantize(own, (128, 128), E4M3)
        at = matrix * rows + numbers
        np.testing.assert_array_equal(rows_of(values.reshape(-1, columns), at), wide(want))
        np.testing.assert_array_equal(rows_of(scales.reshape(-1, 1), np.array([block])), scale)


@pytest.mark.parametrize("count, columns", [(PAST_GRID + 4464, 64), (1, (PAST_GRID + 1) * 64)])
@if_it_fits
def test_unpacked_matrices(count, columns, rng):
    """There are more matrices, or strips of 64 columns, than a grid has blocks in y or z."""
    base = random(rng, ROWS, 64)
    x = copies(base, count * columns).reshape(count, columns, 64).swapaxes(1, 2)
    places = sample(rng, max(count, columns))[:: NEAR // 8]
    axis = 0 if count > 1 else 2
    take = jax.jit(lambda x: jnp.take(x, places, axis=axis))
    quantize = jax.jit(partial(jgg.quantize, format="mxfp4"))
    q = quantize(x)
    (plan,) = jgg.explain(jgg.dequantize, q).plans
    assert plan.kernel.name == "unpack"
    out = take(jax.jit(jgg.dequantize)(q))
    # Compare with float32, which no kernel writes. MXFP4 is exact in float32 and in bfloat16.
    want = jax.jit(partial(jgg.dequantize, dtype=F32))(quantize(take(x)))
    np.testing.assert_array_equal(wide(out), wide(want))


@if_it_fits
def test_column_maxima(rng):
    size = PAST_GRID * 256 + 300
    base = random(rng, ROWS, 8)
    window = np.array([0, size], np.int32)
    maxima = jax.jit(partial(fp8.column_maxima, **KERNEL))(copies(base, size), window)
    chunks = sample(rng, len(maxima))
    rows = chunks[:, None] * 256 + np.arange(256)
    exists = (rows < size)[..., None]
    want = np.where(exists, np.abs(wide(base))[rows % ROWS], 0).max(axis=1)
    np.testing.assert_array_equal(rows_of(maxima, chunks), want)


@if_it_fits
def test_quantised_copies_of_tokens(rng):
    """There are so many tokens, with two rows each, that tokens are quantised before copying."""
    tokens = PAST_GRID * 64 + 100
    base, sizes = random(rng, ROWS, 16), np.array([2 * tokens], np.int32)
    rows = jax.jit(lambda: (jnp.arange(2 * tokens) // 2).astype(jnp.int32))()
    call = partial(fp8.quantize_gathered, dtype=E4M3, power_of_two=False, **KERNEL)
    values = jax.jit(call)(copies(base, tokens), rows, jnp.ones(16, F32), sizes)
    blocks = sample(rng, 2 * tokens // 128)
    numbers = (blocks[:, None] * 128 + np.arange(128)) // 2 % ROWS
    want = wide(base.astype(E4M3))[numbers].swapaxes(1, 2)
    np.testing.assert_array_equal(rows_of(values, blocks), want)


@if_it_fits
def test_quantised_gradients_of_hidden(rng):
    size = PAST_GRID * 128 + 300
    layer = HiddenLayer(ACTIVATIONS["silu"], 128, True, jgg.Recipe())
    base = [random(rng, ROWS, columns) for columns in (256, 128)]
    weights = random(rng, ROWS, dtype=F32)
    run = partial(ragged_hidden_gradients, layer)
    got = jax.jit(partial(run, **KERNEL))(
        *(copies(x, size) for x in (*base, weights)), np.array([size], np.int32)
    )
    # Other tests compare the same kernel on few rows with float64.
    for first in (0, size // 256 * 128, size // 128 * 128):
        rows = np.arange(first, min(first + 128, size))
        few = jax.jit(partial(run, **KERNEL))(
            *(x[rows % ROWS] for x in (*base, weights)), np.array([len(rows)], np.int32)
        )
        for name in ("projections", "gate", "up", "hidden"):
            for large, small in zip(getattr(got, name), getattr(few, name), strict=True):
                at = rows if name == "projections" else np.array([first // 128])
                np.testing.assert_array_equal(rows_of(large, at), wide(small)[: len(at)])
        np.testing.assert_array_equal(rows_of(got.weights, rows), wide(few.weights))


@pytest.mark.parametrize("tile", [choice.tile for choice in FORWARD_KERNELS], ids=str)
@if_it_fits
def test_hidden_layer(tile, rng):
    tokens, sizes = SIZE, groups(SIZE)
    x, gate, up = random(rng, ROWS, 8), *(random(rng, 4, 8, 8) for _ in range(2))
    with jgg.use_tiles(forward=tile):
        call = jax.jit(partial(jgg.gated_ragged_dot, activation="relu", **KERNEL))
        out = call(copies(x, tokens), gate, up, sizes)
    places = sample(rng, tokens)
    got, owners = rows_of(out, places), matrix_of(sizes, places)
    for group in np.unique(owners):
        own = owners == group
        rows = wide(x)[places[own] % ROWS]
        g, u = (rows @ wide(w)[group] for w in (gate, up))
        bounds = (np.abs(rows) @ np.abs(wide(w)[group]) for w in (gate, up))
        bound = 2.0**-6 * np.prod(list(bounds), axis=0)
        assert (np.abs(got[own] - np.maximum(g, 0) * u) <= bound).all()


@if_it_fits
def test_sorted_pairs(rng):
    base = rng.integers(0, 7, ROWS).astype(np.int32)
    experts = copies(base, SIZE)
    order, inverse, sizes = moe.sort_by_expert(experts.reshape(-1, 1), 7, **KERNEL)
    counts = np.bincount(base, minlength=7) * (SIZE // ROWS)
    counts += np.bincount(base[: SIZE % ROWS], minlength=7)
    np.testing.assert_array_equal(sizes, counts)
    places = sample(rng, SIZE)
    pairs = rows_of(order, places).astype(np.int64)
    np.testing.assert_array_equal(base[pairs % ROWS], matrix_of(counts, places))
    np.testing.assert_array_equal(rows_of(inverse.reshape(-1), pairs), places)


@if_it_fits
def test_moved_rows(rng):
    base = random(rng, ROWS, 8)
    x = copies(base, SIZE)
    rows = jax.jit(lambda: (SIZE - 1 - jnp.arange(SIZE)).astype(jnp.int32))()
    places = sample(rng, SIZE)
    for inverse in (None, rows.reshape(-1, 1)):
        y = jax.jit(partial(moe.gather_rows, **KERNEL))(x, rows, inverse=inverse)
        np.testing.assert_array_equal(rows_of(y, places), wide(base)[(SIZE - 1 - places) % ROWS])
        del y
    y = jax.jit(partial(moe.combine, **KERNEL))(x, rows.reshape(-1, 1))
    np.testing.assert_array_equal(rows_of(y, places), wide(base)[(SIZE - 1 - places) % ROWS])


@pytest.mark.parametrize("dtype", [BF16, F32, jnp.float64])
@if_it_fits
def test_list(dtype, rng):
    with jax.enable_x64(True):
        side = 8 if dtype is not jnp.float64 else 2
        size = SIZE if dtype is not F32 else SIZE // 2  # there is no room for more parts
        lhs, rhs = random(rng, ROWS, side, dtype=dtype), random(rng, 1, side, 8, dtype=dtype)
        call = jax.jit(lambda a, b: jgg.grouped_gemm([a], [b], **KERNEL))
        (out,) = call(copies(lhs, size)[None], rhs)
        places = sample(rng, size)
        assert_close(rows_of(out[0], places), wide(lhs)[places % ROWS], wide(rhs)[0])


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("function", [jgg.grouped_syrk, jgg.grouped_syr2k])
@if_it_fits
def test_update(function, dtype, rng):
    operands = 1 if function is jgg.grouped_syrk else 2
    k = SIZE // operands
    places = sample(rng, k)
    short = [random(rng, len(places), 8, dtype=dtype) for _ in range(operands)]
    long = [only_at(places, x, k)[None] for x in short]
    call = partial(function, transpose=True, symmetrize_output=True, **KERNEL)
    out = wide(jax.jit(call)(*long))[0]
    first, second = wide(short[0]), wide(short[-1])
    if operands == 1:
        return assert_close(out, first.T, first)
    both = np.concatenate([first, second]), np.concatenate([second, first])
    assert_close(out, both[0].T, both[1])


def test_one_row_more():
    """Kernels refuse larger sizes before anything runs."""
    x = jax.ShapeDtypeStruct((LARGEST_SIZE + 8, 8), BF16)
    call = partial(jgg.ragged_dot, **KERNEL)
    refused = rf"count to 2\^29, got rows \(m\) = {LARGEST_SIZE + 8}"
    with pytest.raises(NotImplementedError, match=refused):
        jax.jit(call).lower(x, jnp.zeros((1, 8, 8), BF16), jnp.zeros(1, jnp.int32))
