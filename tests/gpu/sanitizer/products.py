"""Ragged products of operands that are not FP8."""

from itertools import product

import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged import primitive as ragged
from jax_grouped_gemm._src.ragged.tiles import (
    NARROW_STREAM_K_TILE,
    NARROW_TILE,
    PINGPONG_TILE,
    STREAM_K_TILE,
    SWAPPED_FLOAT32_TILE,
)
from tests.gpu.sanitizer import OFFSETS, SIZES, G, K, M, N
from tests.support import (
    oracle,
)
from tests.support.float32_errors import PRODUCT_ERROR
from tests.support.ops import (
    CONTRACTING,
    NONCONTRACTING,
    OPS,
    contracting,
    noncontracting,
    random,
    swap,
)


def ragged_products(rng) -> int:
    launches = 0
    for op, transpose_lhs, transpose_rhs in product(OPS, (False, True), (False, True)):
        lhs, rhs, _ = (random(rng, shape, jnp.bfloat16) for shape in op.shapes(M, K, N, G))
        outputs = zip((jnp.bfloat16, jnp.float32, jnp.bfloat16), OFFSETS, strict=True)
        for tile, (out_dtype, offset) in product((DEFAULT_TILE, NARROW_TILE), outputs):
            for sizes in np.array(SIZES, np.int32):
                out = op.call(
                    swap(lhs, transpose_lhs),
                    swap(rhs, transpose_rhs),
                    sizes,
                    offset,
                    tile=tile,
                    transpose_lhs=transpose_lhs,
                    transpose_rhs=transpose_rhs,
                    preferred_element_type=out_dtype,
                    implementation="cuda",
                )
                oracle.check(out, op.exact(lhs, rhs, sizes, offset or 0))
                launches += 1
        lhs, rhs, _ = (random(rng, shape, jnp.float32) for shape in op.shapes(M, K, N, G))
        for precision, offset in zip(("default", "highest", "highest"), OFFSETS, strict=True):
            for sizes in np.array(SIZES, np.int32):
                out = op.call(
                    swap(lhs, transpose_lhs),
                    swap(rhs, transpose_rhs),
                    sizes,
                    offset,
                    transpose_lhs=transpose_lhs,
                    transpose_rhs=transpose_rhs,
                    precision=precision,
                    implementation="cuda",
                )
                exact = op.exact(lhs, rhs, sizes, offset or 0)
                oracle.check(out, exact, product_error=2.0**-10)
                launches += 1
    return launches


def gradients_of_consumers_in_turn(rng) -> int:
    """Computes float32 weight gradients of groups whose last step is full, and of other groups."""
    launches = 0
    for dtype in (jnp.bfloat16, jnp.float16):
        lhs, rhs = (random(rng, shape, dtype) for shape in ((M, K), (M, N)))
        for sizes, offset in product(np.array(SIZES, np.int32), OFFSETS):
            out = contracting(
                lhs,
                rhs,
                sizes,
                offset,
                preferred_element_type=jnp.float32,
                tile=PINGPONG_TILE,
                implementation="cuda",
            )
            oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes, offset or 0))
            launches += 1
    return launches


def products_added_in_place(rng) -> int:
    launches = 0
    for transpose_lhs, transpose_rhs in product((False, True), repeat=2):
        lhs, rhs, accumulator = (
            random(rng, shape, jnp.bfloat16) for shape in CONTRACTING.shapes(M, K, N, G)
        )
        accumulator = accumulator.astype(np.float32)
        for sizes, offset in zip(np.array(SIZES, np.int32), OFFSETS, strict=True):
            out = jgg.ragged_dot_accumulate(
                accumulator,
                swap(lhs, transpose_lhs),
                swap(rhs, transpose_rhs),
                sizes,
                group_offset=offset,
                transpose_lhs=transpose_lhs,
                transpose_rhs=transpose_rhs,
                implementation="cuda",
            )
            exact = CONTRACTING.exact(lhs, rhs, sizes, offset or 0)
            oracle.check(out, oracle.accumulated(accumulator, exact))
            launches += 1
    return launches


def products_with_a_cut_last_wave(rng) -> int:
    """Multiplies at most ten units of work, and cuts each unit into four along K."""
    launches, k = 0, 1544
    lhs, rhs = (random(rng, shape, jnp.bfloat16) for shape in ((M, k), (G, k, N)))
    for sizes in np.array(SIZES, np.int32):
        for transpose_rhs, out_dtype, tile in product(
            (False, True), (jnp.bfloat16, jnp.float32), (STREAM_K_TILE, NARROW_STREAM_K_TILE)
        ):
            out = ragged.ragged_noncontracting(
                lhs,
                swap(rhs, transpose_rhs),
                sizes,
                np.zeros(1, np.int32),
                transpose_lhs=False,
                transpose_rhs=transpose_rhs,
                preferred_element_type=np.dtype(out_dtype),
                precision=None,
                implementation="cuda",
                tile=tile,
            )
            oracle.check(out, oracle.ragged_noncontracting(lhs, rhs, sizes))
            launches += 1
    return launches


def long_tiles(rng) -> int:
    """Computes long tiles, which all clusters begin together, in two turns and part of a third."""
    m, k, n, columns = 4500, 2568, 2056, slice(1000, 1016)
    lhs, rhs, _ = (random(rng, shape, jnp.bfloat16) for shape in NONCONTRACTING.shapes(m, k, n, 3))
    for sizes in np.array(((1300, 1921, 1279), (1, 4400, 0)), np.int32):
        out = noncontracting(lhs, rhs, sizes, implementation="cuda")
        oracle.check(out[:, columns], oracle.ragged_noncontracting(lhs, rhs[..., columns], sizes))
    return 2


def gradients_of_unequal_groups(rng) -> int:
    """One kernel computes tiles cut along their rows, zeros of empty groups, and whole tiles."""
    launches, m = 0, 4400
    lhs, rhs = (random(rng, shape, jnp.bfloat16) for shape in ((m, K), (m, N)))
    for sizes in np.array([[0, 4200, 100, 0, 0], [0, 0, 0, 0, m], [900, 900, 900, 900, 800]]):
        for out_dtype in (jnp.bfloat16, jnp.float32):
            out = contracting(
                lhs,
                rhs,
                sizes.astype(np.int32),
                preferred_element_type=out_dtype,
                implementation="cuda",
            )
            oracle.check(out, oracle.ragged_contracting(lhs, rhs, sizes))
            launches += 1
    return launches


def float32_products_of_few_rows(rng) -> int:
    """Runs both precisions, with weights in both majors. K and N are no multiples of the tile."""
    launches = 0
    tile = SWAPPED_FLOAT32_TILE
    for transpose_rhs, precision in product((False, True), PRODUCT_ERROR):
        for sizes, offset in zip(SIZES, OFFSETS, strict=True):
            shapes = NONCONTRACTING.shapes(M, K + 4, N + 4, G)
            lhs, rhs, _ = (random(rng, shape, jnp.float32) for shape in shapes)
            sizes = np.array(sizes, np.int32)
            out = noncontracting(
                lhs,
                swap(rhs, transpose_rhs),
                sizes,
                offset,
                transpose_rhs=transpose_rhs,
                precision=precision,
                implementation="cuda",
                tile=tile,
            )
            exact = oracle.ragged_noncontracting(lhs, rhs, sizes, offset or 0)
            oracle.check(out, exact, product_error=PRODUCT_ERROR[precision])
            launches += 1
    return launches
