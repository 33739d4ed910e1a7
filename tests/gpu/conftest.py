"""Fixtures that the GPU tests share."""

import pytest

from jax_grouped_gemm._src.plan import DEFAULT_TILE, TileConfig
from jax_grouped_gemm._src.ragged.tiles import NARROW_TILE
from tests.support import families


@pytest.fixture(params=[DEFAULT_TILE, NARROW_TILE], ids=str)
def tile(request) -> TileConfig:
    """The tiles of 16-bit products that both consumer warpgroups compute together."""
    return request.param


@pytest.fixture
def family(request):
    """The family of kernels for lists that `each` or `each_kernel` names."""
    with families.use(request.param) as family:
        yield family


@pytest.fixture
def rank_k_tile(request):
    """Makes 16-bit updates take the tiles that the plan has for many units, or for few units."""
    with families.rank_k_tile(request.param):
        yield
