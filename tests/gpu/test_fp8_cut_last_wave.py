"""FP8 products whose last wave is cut along K, so that thread blocks exchange sums.

Most of these products are smaller than one wave, so that all of their tiles are cut.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.tiles import STREAM_K_TILE
from tests.support import fp8_oracle
from tests.support import group_sizes as sizes_of
from tests.support.fp8_products import OUTPUTS, check, fp8, noncontracting, scales

TILE = STREAM_K_TILE
M, N, G = 1500, 776, 6


def is_cut(schedules, sizes, k, m=M, n=N) -> bool:
    partials = schedules.scaled_ragged_noncontracting_pieces(
        np.ascontiguousarray(np.atleast_2d(sizes), np.int32),
        np.zeros(1, np.int32),
        batches=1,
        local_groups=len(sizes),
        m=m,
        k=k,
        n=n,
        clusters=H200.multiprocessors // TILE.cluster,
        **TILE.sizes(),
    )[:, 12]
    return bool((partials < 0).any())


def operands_of(rng, k, lhs_shape=None, rhs_shape=None, n=N):
    kb, nb = -(-k // 128), -(-n // 128)
    lhs, rhs = fp8(rng, (M, k)), fp8(rng, (G, n, k))
    lhs_scale = scales(rng, (M, kb) if lhs_shape is None else lhs_shape)
    return lhs, lhs_scale, rhs, scales(rng, rhs_shape or (G, nb, kb))


# The kernel reads scales one step at a time, or four steps at a time. In the second case, pieces
# begin in the middle of four steps.
@pytest.mark.parametrize("k", [128 * 43 - 16, 128 * 44, 128 * 62 - 32])
@pytest.mark.parametrize("shapes", [(None, None), ((M, 1), (G, N))], ids=["blocks", "rows"])
@OUTPUTS
def test_any_group_sizes(out_dtype, shapes, k, schedules, rng):
    operands = operands_of(rng, k, *shapes)
    num_cut = 0
    for _ in range(8):
        sizes = sizes_of.any_kind(rng, M, G)
        num_cut += is_cut(schedules, sizes, k)
        check(*operands, sizes, tile=TILE, preferred_element_type=out_dtype)
    assert num_cut > 0


@pytest.mark.parametrize("lhs_shape", [(M, 44), (M, 1), (), (44, M + 4)], ids=str)
@pytest.mark.parametrize("rhs_shape", [(G, 7, 44), (G, N), (G,)], ids=str)
def test_scale_shapes(lhs_shape, rhs_shape, schedules, rng):
    """Some of these scales are constant along K."""
    operands = operands_of(rng, 128 * 44, lhs_shape, rhs_shape)
    sizes = np.array([300, 200, 1, 500, 0, 300])
    assert is_cut(schedules, sizes, 128 * 44)
    check(*operands, sizes, tile=TILE)


# A unit of the last wave has 4, 3, 2, 3/2 or 4/3 clusters, or is not cut. These numbers of units
# are the limits between the cases.
@pytest.mark.parametrize("units", [1, 16, 17, 22, 33, 34, 44, 45, 49, 50, 66, 67, 83])
def test_number_of_units(units, schedules, rng):
    m, k, n = 256, 128 * 65, 256 * units
    assert is_cut(schedules, [m], k, m, n) == (units % 66 not in (0, 50))
    lhs, rhs = fp8(rng, (m, k)), fp8(rng, (1, n, k))
    operands = lhs, scales(rng, (m, 65)), rhs, scales(rng, (1, 2 * units, 65))
    check(*operands, np.array([m], np.int32), tile=TILE)


@pytest.mark.parametrize("shapes", [(None, None), ((M, 1), (G, N))], ids=["blocks", "rows"])
def test_same_inputs_give_the_same_bits(shapes, schedules, rng):
    k = 128 * 44
    operands = operands_of(rng, k, *shapes)
    sizes = np.array([300, 200, 1, 500, 0, 300])
    assert is_cut(schedules, sizes, k)
    first = np.float32(noncontracting(*operands, sizes, tile=TILE))
    for _ in range(30):
        again = np.float32(noncontracting(*operands, sizes, tile=TILE))
        np.testing.assert_array_equal(again, first)


def test_chosen_by_the_plan_at_full_size(rng):
    """Compares whole waves and a cut wave with the kernel that cuts nothing."""
    m, k, n, groups = 4096, 128 * plan_fp8.FP8_STREAM_K_LEAST_STEPS, 4096, 8
    sizes = sizes_of.multinomial(rng, m - 9, groups)
    lhs, rhs = fp8(rng, (m, k)), fp8(rng, (groups, n, k))
    kb = k // 128
    operands = lhs, scales(rng, (m, kb)), rhs, scales(rng, (groups, 32, kb))
    options = dict(preferred_element_type=jnp.float32)
    call = partial(jgg.scaled_ragged_dot, transpose_rhs=True)
    assert jgg.explain(call, *operands, sizes).plans[0].tile == TILE
    whole = noncontracting(*operands, sizes, tile=DEFAULT_TILE, **options)
    out = noncontracting(*operands, sizes, **options)
    assert fp8_oracle.relative_error(np.float64(out), np.float64(whole)) < 1e-5
