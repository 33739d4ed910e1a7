"""Fixtures that the GPU tests share."""

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.lists.rank_k import plan as rank_k_plan
from jax_grouped_gemm._src.plan import DEFAULT_TILE, TileConfig
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE
from tests.support import families


@pytest.fixture(params=[DEFAULT_TILE, NARROW_TILE], ids=str)
def tile(request) -> TileConfig:
    """Each configuration of products of 16-bit operands that consumers share."""
    return request.param


@pytest.fixture
def family(request):
    """The family of kernels for lists that `each` or `each_kernel` names."""
    with families.use(request.param) as family:
        yield family


@pytest.fixture
def rank_k_tile(request, monkeypatch):
    """Has updates of 16 bits take the tiles that the plan has for many units, or for few."""
    if request.param is None:
        return
    wide = request.param == "wide"
    monkeypatch.setattr(rank_k_plan, "most_fine_units", lambda target: 0 if wide else 2**31)
    a = jax.ShapeDtypeStruct((2, 1032, 72), jnp.bfloat16)
    tile = rank_k_plan.RANK_K_TILE if wide else rank_k_plan.FINE_TILE
    assert [plan.tile for plan in jgg.explain(jgg.grouped_syrk, a).plans] == [tile]
