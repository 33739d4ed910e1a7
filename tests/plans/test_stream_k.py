"""Where the last wave of tiles of 16-bit products is cut."""

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.sixteen_bits import (
    NARROW_STREAM_K_TILE,
    NARROW_TILE,
    STREAM_K_TILE,
)

# Groups, rows of each, contracted dimension and columns, and how many times the uncut product's
# time the cut one took on an H200 (h200_never_slower.json), all in tiles of 256 columns.
MEASURED = [
    ((2, 64, 4928, 440), 0.48),
    ((2, 2, 6640, 896), 0.51),
    ((1, 512, 5312, 1600), 0.54),
    ((1, 32, 4488, 5696), 0.60),
    ((16, 128, 6512, 448), 0.68),
    ((2, 512, 2816, 576), 0.73),
    ((8, 512, 3992, 104), 0.78),
    ((2, 1024, 3160, 88), 0.78),
    ((1, 1024, 2816, 5040), 0.79),
    ((4, 256, 2240, 64), 0.82),
    ((8, 32, 2552, 576), 0.83),
    ((1, 16, 2176, 576), 0.84),
    ((8, 256, 2752, 320), 0.86),
    ((4, 2, 4032, 5120), 1.07),
    ((16, 2, 1152, 1248), 1.07),
    ((8, 256, 1184, 192), 1.07),
    ((4, 1024, 1408, 96), 1.08),
    ((128, 1, 1792, 192), 1.09),
    ((16, 128, 256, 256), 1.12),
    ((4, 16, 1600, 1600), 1.16),
    ((2, 1024, 144, 80), 1.17),
]


def tile(sizes, multiprocessors=132):
    g, r, k, n = sizes
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((g * r, k), (g, k, n)))
    groups = jax.ShapeDtypeStruct((g,), jnp.int32)

    def product(x, w, groups):
        return jgg.ragged_dot(x, w, groups, implementation="cuda")

    (plan,) = jgg.explain(product, x, w, groups, multiprocessors=multiprocessors).plans
    return plan.tile


@pytest.mark.parametrize("sizes, ratio", MEASURED)
def test_what_was_measured_to_be_faster(sizes, ratio):
    narrow = sizes[-1] <= NARROW_TILE.tile_n
    cut, whole = (NARROW_STREAM_K_TILE, NARROW_TILE) if narrow else (STREAM_K_TILE, DEFAULT_TILE)
    assert tile(sizes) == (cut if ratio < 1 else whole)


def test_a_full_wave_is_not_cut():
    """66 clusters of two tiles each, and half of it on a chip of half the size."""
    assert tile((66, 256, 4032, 256)) == DEFAULT_TILE
    assert tile((33, 256, 4032, 256)) == STREAM_K_TILE
    assert tile((33, 256, 4032, 256), multiprocessors=66) == DEFAULT_TILE
