"""What the GPU tests have in common."""

import pytest

from jax_grouped_gemm._src import tile_config
from tests.support import families


@pytest.fixture(params=tile_config.TILE_CONFIGS, ids=str)
def tile(request) -> tile_config.TileConfig:
    """Each configuration that is compiled for products of 16-bit operands."""
    return request.param


@pytest.fixture
def family(request):
    """The family of kernels for lists that `each` or `each_kernel` names."""
    with families.use(request.param) as family:
        yield family
