"""The tiles of 16-bit products, and the cuts of their last wave."""

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

# Groups, rows of a group, K and N of random products, and the microseconds that a product took with
# each of `TILES` on an H200 (h200_never_slower_ragged.json).
MEASURED = [
    ((1, 1, 184, 256), (6.6, 7.3, 5.9, 6.5)),
    ((1, 1, 192, 1024), (6.7, 7.4, 5.8, 6.7)),
    ((1, 4, 256, 192), (7.0, 7.4, 5.9, 6.5)),
    ((1, 4, 448, 72), (8.0, 8.5, 7.0, 7.7)),
    ((1, 16, 448, 320), (8.2, 8.9, 7.2, 7.9)),
    ((1, 16, 4416, 640), (32.1, 18.5, 29.0, 15.5)),
    ((1, 32, 768, 768), (10.0, 11.1, 9.0, 9.8)),
    ((1, 32, 4488, 1760), (40.8, 21.2, 29.6, 16.1)),
    ((1, 64, 1856, 2160), (17.1, 16.1, 15.2, 12.7)),
    ((1, 64, 2552, 96), (20.2, 14.7, 18.6, 12.4)),
    ((1, 128, 72, 448), (7.2, 8.1, 6.1, 6.9)),
    ((1, 128, 128, 2880), (7.2, 8.6, 6.2, 7.1)),
    ((1, 128, 176, 248), (8.3, 8.9, 6.7, 7.3)),
    ((1, 256, 3328, 5056), (36.7, 25.7, 29.5, 27.3)),
    ((1, 512, 752, 6976), (14.9, 15.9, 16.5, 17.3)),
    ((1, 512, 5312, 1600), (54.1, 29.2, 41.0, 29.2)),
    ((1, 1024, 1152, 3264), (18.1, 19.1, 22.5, 23.2)),
    ((1, 1024, 2816, 5040), (65.3, 52.9, 68.7, 62.5)),
    ((2, 1, 7408, 1856), (54.7, 29.4, 45.8, 24.9)),
    ((2, 2, 6640, 896), (46.2, 23.6, 43.0, 19.8)),
    ((2, 32, 104, 1472), (6.7, 7.6, 5.9, 6.7)),
    ((2, 64, 4160, 256), (42.6, 23.0, 30.8, 22.0)),
    ((2, 64, 4928, 440), (42.9, 21.7, 34.1, 17.2)),
    ((2, 256, 1024, 4416), (16.6, 17.7, 19.6, 20.1)),
    ((2, 512, 2816, 576), (31.6, 23.0, 25.5, 21.5)),
    ((2, 1024, 568, 576), (11.8, 12.9, 9.9, 10.6)),
    ((2, 1024, 3160, 88), (34.8, 26.9, 26.1, 22.2)),
    ((2, 1024, 5824, 1240), (61.1, 51.0, 87.7, 67.2)),
    ((4, 2, 200, 8000), (9.4, 10.3, 9.8, 10.1)),
    ((4, 2, 4032, 5120), (46.7, 50.2, 61.2, 49.7)),
    ((4, 16, 1600, 1600), (16.2, 18.4, 14.0, 14.6)),
    ((4, 1024, 1408, 96), (19.2, 22.2, 15.0, 21.8)),
    ((8, 8, 3904, 1808), (37.5, 38.7, 34.7, 35.5)),
    ((8, 16, 80, 3200), (7.6, 8.6, 7.6, 8.1)),
    ((8, 32, 72, 192), (6.4, 7.3, 5.5, 6.4)),
    ((8, 32, 6272, 1536), (52.4, 45.2, 42.4, 44.1)),
    ((8, 256, 144, 1920), (9.7, 10.7, 9.4, 10.1)),
    ((8, 512, 3992, 104), (44.7, 38.0, 33.7, 25.6)),
    ((16, 2, 472, 2696), (13.9, 14.6, 14.0, 14.5)),
    ((16, 2, 1152, 1248), (17.6, 18.6, 21.8, 22.7)),
    ((16, 64, 80, 1096), (8.7, 9.7, 7.7, 8.5)),
    ((16, 128, 6512, 448), (66.2, 44.8, 46.6, 41.5)),
    ((16, 512, 120, 264), (11.4, 12.1, 9.1, 9.7)),
    ((16, 512, 704, 392), (21.8, 22.8, 21.6, 22.2)),
    ((16, 1024, 2176, 1472), (167.9, 162.3, 209.8, 205.8)),
    ((32, 32, 88, 768), (8.0, 9.1, 7.9, 8.7)),
    ((32, 512, 192, 320), (14.3, 15.8, 12.8, 14.0)),
    ((64, 1, 192, 384), (8.3, 9.8, 7.7, 9.2)),
    ((64, 1, 832, 448), (12.4, 14.3, 10.5, 11.8)),
    ((64, 4, 256, 640), (12.7, 14.4, 11.1, 12.3)),
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
    """Returns the time of the chosen tile, divided by that of the fastest tile."""
    return times[TILES.index(tile(sizes))] / min(times)


@pytest.mark.parametrize("sizes, times", MEASURED)
def test_is_never_much_slower_than_the_best(sizes, times):
    assert over_best(sizes, times) <= 1.2


def test_is_as_fast_as_the_best_in_the_mean():
    logarithms = [math.log(over_best(*measured)) for measured in MEASURED]
    assert math.exp(sum(logarithms) / len(logarithms)) <= 1.02


def test_a_full_wave_is_not_cut():
    """A full wave is 66 clusters of two tiles each, or half of that on a chip of half the size."""
    assert tile((66, 256, 4032, 256)) == DEFAULT_TILE
    assert tile((66, 256, 4032, 128)) == NARROW_TILE
    assert tile((11, 256, 4032, 384)) == NARROW_STREAM_K_TILE
    assert tile((33, 256, 4032, 512)) == DEFAULT_TILE
    assert tile((33, 256, 4032, 264), multiprocessors=66) == DEFAULT_TILE
