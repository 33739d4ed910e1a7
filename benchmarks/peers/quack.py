"""QuACK's variable-length GEMM (CuTe DSL), where it is installed."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.cases import Problem
from benchmarks.harness.peer import Call, TorchCall, as_torch
from benchmarks.peers.sweep import SweptPeer


@dataclass(frozen=True)
class Config:
    """Tile and cluster in QuACK's own terms; two consumers take turns if ping-pong."""

    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int

    def __str__(self) -> str:
        schedule = "ping-pong" if self.pingpong else "cooperative"
        return f"{self.tile_m}x{self.tile_n} {schedule}, cluster {self.cluster_m}x{self.cluster_n}"


# QuACK's default for Hopper first, then the rest of its autotuner's space, likely ones first. The
# autotuner itself would try all of them for each problem and distribution.
CONFIGS = (
    Config(128, 192, True, 2, 1),
    Config(128, 256, False, 2, 1),
    Config(256, 128, False, 2, 1),
    Config(128, 128, True, 2, 1),
    Config(128, 256, False, 1, 2),
    Config(128, 192, True, 1, 2),
    Config(128, 128, True, 1, 2),
    Config(256, 192, False, 2, 1),
    Config(128, 160, True, 2, 1),
    Config(192, 128, True, 2, 1),
    Config(256, 160, False, 2, 1),
    Config(128, 224, False, 2, 1),
    Config(256, 128, False, 1, 2),
    Config(256, 192, False, 1, 2),
    Config(128, 160, True, 1, 2),
    Config(192, 128, True, 1, 2),
    Config(256, 160, False, 1, 2),
    Config(128, 224, False, 1, 2),
    Config(128, 208, True, 2, 1),
    Config(128, 208, True, 1, 2),
    Config(256, 208, False, 2, 1),
    Config(256, 208, False, 1, 2),
)

# Seconds that QuACK's worker processes get for what one sweep compiles.
COMPILE_SECONDS = 120


def candidates(problem: Problem) -> list[Config]:
    """All configurations, likely ones first."""
    # A cluster two tiles high is half idle in a group of fewer rows than one.
    small_groups = not problem.contracting and problem.m <= 64 * problem.groups
    return sorted(CONFIGS, key=lambda config: small_groups and config.cluster_m > 1)


@functools.cache
def gemm_config(config: Config) -> Any:
    """A configuration as QuACK has it, the same object each time: it keeps plans by their `id`."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(**{"is_dynamic_persistent": False} | asdict(config), device_capacity=9)


def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Compiles what the calls need in QuACK's processes: `QUACK_COMPILE_WORKERS` or one a core.

    Kernels go to the cache on disk, from where the calls then take them. A call that fails is left
    to fail again when it is made in earnest.
    """
    from quack.cache import CompilePending
    from quack.cache.async_compile import activate, deactivate

    def is_ready(call: Callable[[], object]) -> bool:
        try:
            call()
        except CompilePending:
            return False
        except Exception:
            pass
        return True

    deadline = time.monotonic() + COMPILE_SECONDS
    waiting = list(calls)
    activate(int(os.environ.get("QUACK_COMPILE_WORKERS", os.cpu_count() or 1)))
    try:
        while waiting := [call for call in waiting if not is_ready(call)]:
            if time.monotonic() > deadline:
                break  # The rest is compiled in this process.
            time.sleep(0.05)
    finally:
        # Before the end of this process, which would wait for its processes.
        deactivate()


class Quack(SweptPeer):
    """`gemm` with `cu_seqlens_m` for ragged rows and `cu_seqlens_k` for weight gradients.

    A sweep of one is its default configuration; more are what its own tuning might choose.
    """

    name = "quack"
    needs = ("torch", "quack", "GPU")

    def prepare(self, problem, lhs, rhs, group_sizes):
        import torch
        from quack.gemm_interface import gemm_tuned

        a, b = as_torch(lhs), as_torch(rhs)
        ends = torch.cumsum(as_torch(group_sizes), 0, dtype=torch.int32)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        if problem.contracting:
            a = a.mT
            ragged = {"cu_seqlens_k": offsets}
        else:
            b = b.mT if problem.transpose_rhs else b
            ragged = {"cu_seqlens_m": offsets}
        out_dtype = getattr(torch, problem.out_dtype)

        def call(config: Config) -> Call:
            # The plain function under the autotuner, as its public `gemm(tuned=False)` calls it.
            def run():
                out = torch.empty(problem.out_shape, dtype=out_dtype, device=a.device)
                gemm_tuned.fn(a, b, out, config=gemm_config(config), **ragged)
                return out

            prepared = TorchCall(run)
            prepared.wait(prepared.run())
            return prepared

        return self._sweep.best(problem, candidates(problem), call)
