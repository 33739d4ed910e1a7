"""The products that are computed in tiles of 128 columns."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.tiles import (
    NARROW_STREAM_K_TILE,
    NARROW_TILE,
    PINGPONG_TILE,
    STREAM_K_TILE,
)
from tests.support.dtypes import BF16, F16, F32
from tests.support.plans import contracting_plan, how

ROWS, GROUPS = 8192, 8


def noncontracting_plan(k, n, dtype=BF16, rows=ROWS, **options) -> jgg.Plan:
    """Returns the plan for weights [g, k, n], or [g, n, k] if rhs is transposed."""
    weights = (GROUPS, n, k) if options.get("transpose_rhs") else (GROUPS, k, n)
    product = partial(jgg.ragged_dot, implementation="cuda", **options)
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, k), weights))
    (plan,) = jgg.explain(product, x, w, jax.ShapeDtypeStruct((GROUPS,), jnp.int32)).plans
    return plan


gradient_plan = partial(contracting_plan, ROWS, 1024, groups=GROUPS)

# With eight groups of 1024 rows, 256 columns are one wave of narrow tiles, and more are two.
COLUMNS = pytest.mark.parametrize(
    "n, tile",
    [(8, NARROW_TILE), (128, NARROW_TILE), (136, NARROW_TILE), (256, NARROW_TILE)]
    + [(264, DEFAULT_TILE), (512, DEFAULT_TILE), (4096, DEFAULT_TILE)],
    ids=str,
)


@COLUMNS
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("result", [None, F32])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_of_rows_that_stay(n, tile, dtype, result, transpose_rhs):
    options = dict(preferred_element_type=result, transpose_rhs=transpose_rhs)
    plan = noncontracting_plan(1024, n, dtype, **options)
    assert plan.tile == tile and plan.chosen_by == "default"
    assert f"128x{tile.tile_n}" in str(plan)


@pytest.mark.parametrize("n, tile", [(64, NARROW_TILE), (768, NARROW_TILE), (776, DEFAULT_TILE)])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_of_weight_gradients(n, tile, dtype):
    """Weight gradients take narrow tiles if there are at most three waves of narrow tiles."""
    assert gradient_plan(n=n, dtype=dtype).tile == tile


@pytest.mark.parametrize("n, tile", [(128, NARROW_TILE), (136, PINGPONG_TILE)], ids=str)
def test_of_float32_results(n, tile):
    """With many rows, narrow tiles pay only up to 128 columns: ping-pong kernels hide stores."""
    assert gradient_plan(n=n, out_dtype=F32).tile == tile
    gradient = partial(contracting_plan, 128 * GROUPS, 1024, groups=GROUPS)
    assert gradient(n=n, out_dtype=F32).tile == NARROW_TILE


@pytest.mark.parametrize("n, tile", [(768, NARROW_TILE), (776, DEFAULT_TILE)], ids=str)
def test_of_accumulated_gradients(n, tile):
    shapes = ((GROUPS, 1024, n), F32), ((ROWS, 1024), BF16), ((ROWS, n), BF16)
    arrays = [jax.ShapeDtypeStruct(*x) for x in (*shapes, ((GROUPS,), jnp.int32))]
    (plan,) = jgg.explain(jgg.ragged_dot_accumulate, *arrays).plans
    assert plan.tile == tile


def test_of_all_three_products():
    """Forward and wgrad have n columns, and dgrad has k. Few columns have narrow tiles."""

    def loss(x, w, sizes):
        return jnp.sum(jgg.ragged_dot(x, w, sizes).astype(F32))

    sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
    for k, n in ((64, 16384), (16384, 64), (64, 64)):
        x, w = (jax.ShapeDtypeStruct(s, BF16) for s in ((ROWS, k), (GROUPS, k, n)))
        plans = jgg.explain(jax.grad(loss, (0, 1)), x, w, sizes).plans
        narrow = {plan.product: plan.tile.tile_n == NARROW_TILE.tile_n for plan in plans}
        assert narrow == dict(forward=n == 64, dgrad=k == 64, wgrad=n == 64)


@pytest.mark.parametrize("n, tile", [(136, NARROW_STREAM_K_TILE), (1032, STREAM_K_TILE)], ids=str)
def test_with_a_cut_last_wave(n, tile):
    plan = noncontracting_plan(8192, n, rows=2048)
    assert plan.tile == tile


@pytest.mark.parametrize("majors", [(True, False), (False, True), (True, True)])
def test_of_contiguous_rows_that_xla_transposes(majors):
    options = dict(zip(("transpose_lhs", "transpose_rhs"), majors, strict=True))
    plan = gradient_plan(n=64, **options)
    assert (plan.tile, how(plan)) == (NARROW_TILE, "copies")


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_is_not_for_float32_operands(precision):
    assert gradient_plan(n=64, dtype=F32, precision=precision).tile == DEFAULT_TILE
    plan = noncontracting_plan(1024, 64, F32, precision=precision)
    assert NARROW_TILE not in plan.candidates


@pytest.mark.parametrize("asked", [DEFAULT_TILE, STREAM_K_TILE, NARROW_STREAM_K_TILE], ids=str)
def test_others_can_be_asked_for(asked):
    with jgg.use_tiles(forward=asked):
        plan = noncontracting_plan(1024, 64)
    assert (plan.tile, plan.chosen_by) == (asked, "override")
    with jgg.use_tiles(forward=NARROW_TILE):
        assert noncontracting_plan(1024, 2048).tile == NARROW_TILE


def test_has_half_the_room_for_sums_and_twice_the_utilization():
    narrow, wide = (gradient_plan(n=64, tile=tile) for tile in (NARROW_TILE, DEFAULT_TILE))
    assert narrow.grid == wide.grid
    assert 1.9 < wide.workspace_bytes / narrow.workspace_bytes < 2
    assert narrow.utilization == pytest.approx(2 * wide.utilization)
    assert narrow.prediction.tensor_seconds < wide.prediction.tensor_seconds


@pytest.mark.parametrize("hidden", [64, 128, 136])
def test_of_layers_gate_and_up_are_one_wide_product(hidden):
    """Gate and up are one product, so they take a default tile even if each is narrow."""

    def loss(x, wi_0, wi_1, wo, sizes):
        return jnp.sum(jgg.ragged_mlp(x, wi_0, wi_1, wo, sizes).astype(F32))

    shapes = (ROWS, 1024), *[(GROUPS, 1024, hidden)] * 2, (GROUPS, hidden, 1024)
    arrays = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    plans = jgg.explain(jax.grad(loss, (0, 1, 2, 3)), *arrays, jnp.full(GROUPS, 9)).plans
    tiles = {plan.problem.op: (how(plan), plan.tile) for plan in plans}
    assert tiles["paired_weight_gradients"] == ("kernel", DEFAULT_TILE)
    assert tiles["paired_ragged_dot"] == ("kernel", DEFAULT_TILE)
    assert tiles["gated_ragged_dot"] == ("kernel", DEFAULT_TILE)
