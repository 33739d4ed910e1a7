"""Plans of FP8 products whose last wave is cut along K."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8.formats import IN_BLOCKS
from jax_grouped_gemm._src.fp8.scaled import plan as plan_fp8
from jax_grouped_gemm._src.plan import DEFAULT_TILE
from jax_grouped_gemm._src.ragged.plan import plan_product
from jax_grouped_gemm._src.ragged.problem import (
    LEAST_BYTES,
    sums_bytes,
)
from jax_grouped_gemm._src.ragged.tiles import STREAM_K_TILE

TILE = STREAM_K_TILE


class TestPlanOfFp8:
    def plan(self, tile=None, m=8 * 1024, k=14336, n=4096, g=8):
        operands = (
            ((m, k), jnp.float8_e4m3fn),
            ((m, -(-k // 128)), jnp.float32),
            ((g, n, k), jnp.float8_e4m3fn),
            ((g, -(-n // 128), -(-k // 128)), jnp.float32),
            ((g,), jnp.int32),
            ((1,), jnp.int32),
        )
        params = dict(
            transpose_rhs=True,
            **IN_BLOCKS,
            preferred_element_type=np.dtype(jnp.bfloat16),
            fast_accumulation=False,
            implementation=None,
            tile=tile,
        )
        return plan_product(
            plan_fp8.noncontracting,
            [jax.ShapeDtypeStruct(*operand) for operand in operands],
            params,
            H200,
        )

    def test_default_where_it_pays(self):
        found = self.plan()
        assert found.tile == TILE and found.chosen_by == "default"
        assert "stream-k, grid" in str(found)
        assert found.workspace_bytes == sums_bytes(
            found.tile.tile_m, found.tile.tile_n, H200.multiprocessors
        )

    @pytest.mark.parametrize(
        "options",
        [
            dict(m=8 * 200),  # few rows a group
            dict(k=128 * (plan_fp8.FP8_STREAM_K_LEAST_STEPS - 1)),  # few steps
            dict(m=8 * 4096),  # many waves
        ],
    )
    def test_off_elsewhere(self, options):
        found = self.plan(**options)
        assert found.tile == DEFAULT_TILE and found.workspace_bytes == LEAST_BYTES

    def test_steps_are_128_elements_long(self):
        # 136 units are two waves of 66 and one of 4, each cut into quarters.
        assert self.plan(m=8 * 256, n=17 * 256).utilization == pytest.approx(136 / (2.25 * 66))
        # A unit of 20 steps is too short to be cut. In steps of 64 elements it would have 40.
        tile = STREAM_K_TILE
        short = self.plan(tile, m=8 * 256, n=17 * 256, k=20 * 128)
        assert short.utilization == pytest.approx(136 / (3 * 66))

    def test_every_tile_is_compiled(self, schedules):
        op = "scaled_ragged_noncontracting_stream_k"
        compiled = [config for config in schedules.kernel_configs() if config["op"] == op]
        assert compiled == [dict(op=op, **tile.sizes()) for tile in (TILE,)]
