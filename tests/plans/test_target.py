"""Plans for devices with other numbers of multiprocessors: an H20, an H100 PCIe and an H200."""

from __future__ import annotations

import importlib
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm._src.device import H200, Target
from jax_grouped_gemm._src.fp8.scaled.plan import SWAPPED_TILE
from jax_grouped_gemm._src.ragged.tiles import STREAM_K_TILE
from tests.support import aot
from tests.support.plans import contracting_plan

BF16, F32, F64 = jnp.bfloat16, jnp.float32, jnp.float64
COUNTS = pytest.mark.parametrize("count", [78, 114, 132])

array = jax.ShapeDtypeStruct


def operands(m=65536, k=2048, n=1536, g=8, dtype=BF16):
    return array((m, k), dtype), array((g, k, n), dtype), array((g,), jnp.int32)


def only(fn, *args, **kwargs) -> jgg.Plan:
    (plan,) = jgg.explain(fn, *args, **kwargs).plans
    return plan


@COUNTS
class TestGrid:
    @pytest.mark.parametrize("dtype", [BF16, F32])
    def test_of_a_ragged_product(self, count, dtype):
        assert only(jgg.ragged_dot, *operands(dtype=dtype), multiprocessors=count).grid == count

    def test_of_few_rows_in_fp8(self, count):
        m, k, n, g = 2048, 1024, 4096, 128
        e4m3 = partial(array, dtype=jnp.float8_e4m3fn)
        scales = array((m, k // 128), F32), array((g, n // 128, k // 128), F32)
        pairs = e4m3((m, k)), scales[0], e4m3((g, n, k)), scales[1]
        call = partial(jgg.scaled_ragged_dot, transpose_rhs=True)
        plan = only(call, *pairs, array((g,), jnp.int32), multiprocessors=count)
        assert plan.tile == SWAPPED_TILE and plan.grid == 3 * count

    def test_of_an_update(self, count):
        plan = only(jgg.grouped_syrk, array((8, 2048, 2048), BF16), multiprocessors=count)
        assert plan.grid == count

    def test_on_the_fp64_tensor_cores(self, count):
        with jax.enable_x64(True):
            x = array((8, 2048, 2048), F64)
            update = only(jgg.grouped_syrk, x, multiprocessors=count)
            product = only(jgg.grouped_gemm, [x], [x], multiprocessors=count)
        assert update.grid == product.grid == count

    @pytest.mark.parametrize("scheduler", ["device", "host_precomputed"])
    def test_of_a_list(self, count, scheduler):
        x = [array((1024, 1024), BF16)] * 40
        plan = only(jgg.grouped_gemm, x, x, scheduler=scheduler, multiprocessors=count)
        (launch,) = plan.launches
        assert launch.clusters * launch.tile.cluster == plan.grid == count
        assert 0 < launch.balance <= 1
        if scheduler == "host_precomputed":
            assert launch.schedule.shape[1] == launch.clusters

    def test_full_waves(self, count):
        """A full wave has a tile for each multiprocessor of the device."""
        full, over = (
            only(jgg.ragged_dot, *operands(x * 128, 512, 256, 1), multiprocessors=count)
            for x in (count, count + 1)
        )
        assert full.utilization == 1 and over.utilization < 0.6


@COUNTS
class TestWorkspace:
    """Plans have the workspace that kernels use on a grid that fills the device."""

    def test_of_a_cut_last_wave(self, count, schedules):
        with jgg.use_tiles(forward=STREAM_K_TILE):
            plan = only(jgg.ragged_dot, *operands(), multiprocessors=count)
        tile = plan.tile.tile_m, plan.tile.tile_n, plan.tile.cluster
        assert plan.workspace_bytes == schedules.stream_k_workspace_bytes(*tile, count)

    def test_of_tiles_cut_along_the_rows(self, count, schedules):
        for k, n in ((2048, 1536), (512, 512), (1024, 640)):
            plan = contracting_plan(65536, k, n, 8, multiprocessors=count)
            tile = plan.tile.tile_m, plan.tile.tile_n, plan.tile.cluster
            chains = -(-k // 256) * -(-n // 256)
            clusters = count // 2
            sums = schedules.most_chain_sums(chains % clusters, clusters)
            most = schedules.stream_k_workspace_bytes(*tile, 2 * sums)
            assert plan.workspace_bytes >= most


@COUNTS
def test_rules_count_waves_of_the_device(count):
    """The limit of 16 waves counts waves of the device, and a small device has more of them."""
    m, k, n = 8 * 128 * 32, 14336, 2048
    plan = only(jgg.ragged_dot, *operands(m, k, n), multiprocessors=count)
    assert plan.tile.stream_k == (256 * 8 / count <= 16)


@pytest.mark.parametrize("count", [0, -1])
def test_of_no_multiprocessors(count):
    with pytest.raises(ValueError, match=f"multiprocessors must be positive, got {count}"):
        jgg.explain(jgg.ragged_dot, *operands(), multiprocessors=count)


def test_default_without_a_device():
    if jax.default_backend() == "cpu":
        assert only(jgg.ragged_dot, *operands()).grid == H200.multiprocessors == 132


def test_of_a_device():
    class Device:
        core_count = 78

    assert Target.of(Device()) == Target(78)
    assert Target.of(object()) == H200


class TestFirstLine:
    """The first line says that this is a plan, for which device, and that nothing ran."""

    def line(self, **options) -> str:
        for function, arguments in ((jgg.ragged_dot, operands()), (jnp.sin, [1.0])):
            line, rest = str(jgg.explain(function, *arguments, **options)).split("\n", 1)
            assert rest.startswith("1. forward: ") or rest == "no grouped matmuls"
        return line

    @COUNTS
    def test_of_a_size_that_was_given(self, count):
        assert self.line(multiprocessors=count) == (
            f"A plan for a Hopper GPU of {count} multiprocessors with the clock and the memory of "
            "an H200; nothing ran."
        )

    @pytest.mark.parametrize(
        "kind, capability, count, words",
        [
            ("NVIDIA H200", "9.0", 132, "NVIDIA H200 of 132 multiprocessors;"),
            (
                *("NVIDIA H20", "9.0", 78),
                "NVIDIA H20 of 78 multiprocessors, taken with the clock and the memory of an H200;",
            ),
            (
                *("NVIDIA A100-SXM4-80GB", "8.0", 108),
                "an H200 of 132 multiprocessors (the default device, NVIDIA A100-SXM4-80GB, runs "
                "no kernel);",
            ),
        ],
    )
    def test_of_the_default_device(self, kind, capability, count, words, monkeypatch):
        device = SimpleNamespace(
            device_kind=kind, compute_capability=capability, core_count=count, platform="gpu"
        )
        module = importlib.import_module("jax_grouped_gemm._src.explain")
        monkeypatch.setattr(module, "default_device", lambda: device)
        assert self.line() == f"A plan for {words} nothing ran."


@COUNTS
def test_is_that_of_the_compile_target(count, extension):
    """A program compiled for a device that is only described has that device's workspace."""
    config = (Path(__file__).parents[1] / "data" / "h200_target_config.txtpb").read_text()
    assert "core_count: 132" in config
    target = aot.Target(config.replace("core_count: 132", f"core_count: {count}"))
    with jgg.use_tiles(forward=STREAM_K_TILE):
        program = target.compile(jgg.ragged_dot, *operands())
        plan = only(jgg.ragged_dot, *operands(), multiprocessors=count)
    sizes = [int(x) for call in program.calls for x in re.findall(r"u8\[(\d+)\]", call.type)]
    assert sizes == [plan.workspace_bytes]
    assert np.isclose(plan.workspace_bytes, count * 128 * 256 * 4, rtol=1e-3)
