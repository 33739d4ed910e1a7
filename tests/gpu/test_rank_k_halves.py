"""Updates in which both CTAs of a cluster compute half of a narrow tile's steps each."""

from functools import partial

import jax
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan
from tests.support.dtypes import BF16, F32
from tests.support.families import OTHER, SIXTEEN_BITS, check_update, label, run_update
from tests.support.updates import SYR2K, SYRK

BFLOAT16, FLOAT16 = SIXTEEN_BITS


def takes_halves(update, uplo, shape) -> bool:
    """Returns whether both CTAs of a cluster compute half of a narrow tile's steps each."""
    a = jax.ShapeDtypeStruct(shape, BF16)
    (plan,) = jgg.explain(partial(update, uplo=uplo, implementation="cuda"), a, a).plans
    wide, problem = plan.tile == rank_k_plan.RANK_K_TILE, plan.kernel_problem
    return wide and rank_k_plan.gains_by_halves(problem, problem.stacks, H200)


@OTHER
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    "family, result", [(BFLOAT16, None), (FLOAT16, F32)], ids=label, indirect=["family"]
)
@pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
def test_narrow_tiles_in_halves(family, update, result, transpose, other, rng):
    """All tiles are narrow, because the lower triangle of each matrix is one tile."""
    for shape in ((40, 120, 1032), (9, 40, 2056)):
        assert takes_halves(update, "lower", shape)
        options = dict(result=result, transpose=transpose, other=other)
        check_update(family, update, rng, shape, **options)


@pytest.mark.parametrize("other", [None, "mirror c"])
@pytest.mark.parametrize("uplo", ["lower", "upper"])
@pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
def test_halves_behind_other_tiles(update, uplo, other, rng):
    """Clusters have several tiles, and still store the previous tile when sums arrive."""
    shape = (100, 136, 2056)
    assert takes_halves(update, uplo, shape)
    options = dict(uplo=uplo, transpose=bool(rng.integers(2)), other=other)
    check_update(BFLOAT16, update, rng, shape, **options)


@pytest.mark.parametrize("update", [SYRK, SYR2K], ids=repr)
def test_halves_repeat_bitwise(update, rng):
    assert takes_halves(update, "lower", (100, 136, 2056))
    a, b = BFLOAT16.draw(rng, (100, 136, 2056)), BFLOAT16.draw(rng, (100, 136, 2056))
    first = np.asarray(run_update(BFLOAT16, update, a, b))
    for _ in range(20):
        np.testing.assert_array_equal(run_update(BFLOAT16, update, a, b), first)
