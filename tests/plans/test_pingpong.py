"""The weight gradients that ping-pong consumers compute."""

from __future__ import annotations

from functools import partial

import pytest

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.tiles import (
    NARROW_TILE,
    PINGPONG_LEAST_ROWS,
    PINGPONG_MOST_ROWS,
    PINGPONG_TILE,
)
from tests.support.dtypes import BF16, F16, F32
from tests.support.plans import contracting_plan, how

TILE = PINGPONG_TILE


planned = partial(contracting_plan, m=65536, k=2048, n=1536, groups=128, out_dtype=F32)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("rows", [PINGPONG_LEAST_ROWS, 1024, PINGPONG_MOST_ROWS])
def test_is_taken_for_float32_results(rows, dtype):
    found = planned(m=8 * rows, groups=8, dtype=dtype)
    assert found.tile == TILE and found.chosen_by == "default"
    assert "128x192" in str(found)


def test_is_taken_for_results_that_xla_converts():
    """For a result of the other 16-bit type, the kernel writes float32, which XLA converts."""
    assert planned(out_dtype=F16).tile == planned(out_dtype=F16, tile=TILE).tile == TILE


@pytest.mark.parametrize("options", [dict(transpose_lhs=True), dict(transpose_rhs=True)])
def test_is_taken_for_operands_that_xla_transposes(options):
    found = planned(**options)
    assert (found.tile, how(found)) == (TILE, "copies")


@pytest.mark.parametrize(
    "options",
    [
        dict(out_dtype=BF16),
        dict(dtype=F16, out_dtype=F16),
        dict(dtype=F32),
        dict(m=128 * PINGPONG_LEAST_ROWS - 1),
        dict(m=128 * PINGPONG_MOST_ROWS + 1),
    ],
)
def test_is_not_taken(options):
    assert planned(**options).tile == DEFAULT_TILE


@pytest.mark.parametrize("rows", [1, 128, 512, 8192])
def test_can_be_asked_for_and_measured_for_any_rows(rows):
    found = planned(m=4 * rows, groups=4, tile=TILE)
    assert found.tile == TILE and found.chosen_by == "override"
    assert found.candidates == (DEFAULT_TILE, TILE, NARROW_TILE)


@pytest.mark.parametrize(
    "options",
    [dict(out_dtype=BF16), dict(dtype=F32)],
)
def test_is_not_compiled_for_others(options):
    with pytest.raises(ValueError, match="not compiled"):
        planned(tile=TILE, **options)
    assert TILE not in planned(**options).candidates


@pytest.mark.parametrize("m", [4095, 4096, 65536])
def test_has_the_workspace_and_the_grid_of_tiles_that_are_cut(m):
    """Both kernels cut tiles of unequal groups into the same pieces, so their plans agree."""
    turns, halves = (planned(m=m, groups=8, tile=tile) for tile in (TILE, DEFAULT_TILE))
    assert turns.workspace_bytes == halves.workspace_bytes
    if m >= 4096:
        assert turns.grid == halves.grid == H200.multiprocessors
