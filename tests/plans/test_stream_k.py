"""Which tile 16-bit products have, and where the last wave of tiles is cut."""

import math

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.tiles import (
    NARROW_STREAM_K_TILE,
    NARROW_TILE,
    STREAM_K_TILE,
)

TILES = DEFAULT_TILE, STREAM_K_TILE, NARROW_TILE, NARROW_STREAM_K_TILE

# Groups, rows of each, contracted dimension and columns of random products, and the microseconds of
# each tile on an H200 (h200_never_slower_ragged.json).
MEASURED = [
    ((1, 1, 184, 256), (6.7, 7.3, 5.7, 6.3)),
    ((1, 1, 192, 1024), (6.7, 7.4, 5.7, 6.4)),
    ((1, 4, 256, 192), (7.2, 7.6, 5.8, 6.4)),
    ((1, 4, 448, 72), (8.4, 8.6, 6.9, 7.5)),
    ((1, 16, 448, 320), (8.3, 8.9, 7.1, 7.9)),
    ((1, 16, 4416, 640), (32.2, 18.6, 27.5, 15.1)),
    ((1, 32, 768, 768), (10.0, 11.0, 8.7, 9.6)),
    ((1, 32, 4488, 1760), (40.8, 21.3, 27.9, 15.9)),
    ((1, 64, 1856, 2160), (16.9, 15.5, 14.5, 12.4)),
    ((1, 64, 2552, 96), (20.6, 15.3, 18.0, 12.6)),
    ((1, 128, 72, 448), (7.2, 8.2, 6.1, 6.9)),
    ((1, 128, 128, 2880), (7.1, 8.4, 6.3, 7.1)),
    ((1, 128, 176, 248), (8.3, 9.0, 6.6, 7.3)),
    ((1, 256, 3328, 5056), (36.5, 25.7, 27.6, 26.1)),
    ((1, 512, 752, 6976), (14.9, 15.6, 15.9, 16.8)),
    ((1, 512, 5312, 1600), (53.7, 29.0, 39.3, 28.3)),
    ((1, 1024, 1152, 3264), (18.0, 18.8, 21.3, 22.1)),
    ((1, 1024, 2816, 5040), (64.8, 52.7, 63.7, 58.4)),
    ((2, 1, 7408, 1856), (54.5, 28.8, 43.0, 26.3)),
    ((2, 2, 6640, 896), (46.8, 23.2, 39.6, 18.8)),
    ((2, 32, 104, 1472), (6.5, 7.5, 5.8, 6.7)),
    ((2, 64, 4160, 256), (42.6, 23.1, 29.4, 19.9)),
    ((2, 64, 4928, 440), (43.5, 21.9, 31.8, 16.6)),
    ((2, 256, 1024, 4416), (16.4, 17.3, 18.5, 19.5)),
    ((2, 512, 2816, 576), (31.6, 22.8, 23.9, 20.7)),
    ((2, 1024, 568, 576), (11.5, 12.6, 9.5, 10.3)),
    ((2, 1024, 3160, 88), (34.6, 27.4, 25.1, 22.1)),
    ((2, 1024, 5824, 1240), (60.0, 50.9, 83.5, 64.1)),
    ((4, 2, 200, 8000), (9.3, 10.0, 9.4, 10.0)),
    ((4, 2, 4032, 5120), (45.2, 49.5, 57.9, 49.4)),
    ((4, 16, 1600, 1600), (15.9, 18.6, 13.2, 14.0)),
    ((4, 1024, 1408, 96), (19.2, 22.2, 14.4, 21.6)),
    ((8, 8, 3904, 1808), (36.5, 38.9, 36.9, 37.9)),
    ((8, 16, 80, 3200), (7.7, 8.5, 7.5, 8.1)),
    ((8, 32, 72, 192), (6.4, 7.1, 5.5, 6.3)),
    ((8, 32, 6272, 1536), (50.8, 45.2, 38.8, 43.8)),
    ((8, 256, 144, 1920), (9.6, 10.6, 9.2, 9.8)),
    ((8, 512, 3992, 104), (44.8, 37.4, 31.7, 25.9)),
    ((16, 2, 472, 2696), (14.0, 14.5, 13.7, 14.4)),
    ((16, 2, 1152, 1248), (18.2, 18.3, 20.5, 21.8)),
    ((16, 64, 80, 1096), (8.7, 9.7, 7.6, 8.4)),
    ((16, 128, 6512, 448), (65.6, 44.4, 44.2, 44.1)),
    ((16, 512, 120, 264), (11.2, 11.8, 9.1, 9.8)),
    ((16, 512, 704, 392), (21.8, 22.8, 20.5, 21.6)),
    ((16, 1024, 2176, 1472), (163.8, 159.2, 199.7, 195.6)),
    ((32, 32, 88, 768), (8.0, 9.0, 7.6, 8.7)),
    ((32, 512, 192, 320), (14.4, 15.8, 12.5, 13.6)),
    ((64, 1, 192, 384), (8.2, 9.5, 7.6, 9.2)),
    ((64, 1, 832, 448), (12.2, 14.1, 10.2, 11.8)),
    ((64, 4, 256, 640), (12.6, 13.9, 11.4, 12.7)),
]


def tile(sizes, multiprocessors=132):
    g, r, k, n = sizes
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((g * r, k), (g, k, n)))
    groups = jax.ShapeDtypeStruct((g,), jnp.int32)

    def product(x, w, groups):
        return jgg.ragged_dot(x, w, groups, implementation="cuda")

    (plan,) = jgg.explain(product, x, w, groups, multiprocessors=multiprocessors).plans
    return plan.tile


def over_best(sizes, times):
    """How many times the fastest tile's time the one takes that is chosen."""
    return times[TILES.index(tile(sizes))] / min(times)


@pytest.mark.parametrize("sizes, times", MEASURED)
def test_is_never_much_slower_than_the_best(sizes, times):
    assert over_best(sizes, times) <= 1.25


def test_is_as_fast_as_the_best_in_the_mean():
    logarithms = [math.log(over_best(*measured)) for measured in MEASURED]
    assert math.exp(sum(logarithms) / len(logarithms)) <= 1.03


def test_a_full_wave_is_not_cut():
    """66 clusters of two tiles each, and half of it on a chip of half the size."""
    assert tile((66, 256, 4032, 256)) == DEFAULT_TILE
    assert tile((66, 256, 4032, 128)) == NARROW_TILE
    assert tile((11, 256, 4032, 384)) == NARROW_STREAM_K_TILE
    assert tile((33, 256, 4032, 512)) == DEFAULT_TILE
    assert tile((33, 256, 4032, 264), multiprocessors=66) == DEFAULT_TILE
