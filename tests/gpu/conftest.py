"""What the GPU tests have in common."""

import pytest

from jax_grouped_gemm import plan


@pytest.fixture(params=plan.TILE_CONFIGS, ids=str)
def tile(request) -> plan.TileConfig:
    """Each configuration that is compiled for products of 16-bit operands."""
    return request.param
