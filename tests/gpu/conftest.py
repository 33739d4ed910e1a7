"""What the GPU tests have in common."""

import pytest

from jax_grouped_gemm._src import tile_config
from jax_grouped_gemm._src.lists.grouped_gemm import plan as grouped_gemm_plan


@pytest.fixture(params=[tile_config.DEFAULT_TILE], ids=str)
def tile(request) -> tile_config.TileConfig:
    """Each configuration that is compiled for products of 16-bit operands."""
    return request.param


@pytest.fixture
def only_tile(monkeypatch):
    """Leaves the plan of lists of products no other tile than the one it is called with."""

    def choose(tile):
        monkeypatch.setattr(grouped_gemm_plan, "TILES", (tile,))
        grouped_gemm_plan._simulated.cache_clear()

    yield choose
    grouped_gemm_plan._simulated.cache_clear()
