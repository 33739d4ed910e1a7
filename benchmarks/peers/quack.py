"""QuACK's variable-length GEMM (CuTe DSL), if it is installed."""

import functools
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.cases import Problem
from benchmarks.harness.peer import Call, TorchCall, as_torch
from benchmarks.peers.sweep import SweptPeer


@dataclass(frozen=True)
class Config:
    """Tile, schedule and cluster under QuACK's own names."""

    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int

    def __str__(self) -> str:
        schedule = "ping-pong" if self.pingpong else "cooperative"
        return f"{self.tile_m}x{self.tile_n} {schedule}, cluster {self.cluster_m}x{self.cluster_n}"


# QuACK's default for Hopper, then the other configurations of its autotuner, likely ones first. The
# autotuner would try all of them for each problem and distribution.
CONFIGS = tuple(
    Config(*config)
    for config in (
        (128, 192, True, 2, 1), (128, 256, False, 2, 1), (256, 128, False, 2, 1),
        (128, 128, True, 2, 1), (128, 256, False, 1, 2), (128, 192, True, 1, 2),
        (128, 128, True, 1, 2), (256, 192, False, 2, 1), (128, 160, True, 2, 1),
        (192, 128, True, 2, 1), (256, 160, False, 2, 1), (128, 224, False, 2, 1),
        (256, 128, False, 1, 2), (256, 192, False, 1, 2), (128, 160, True, 1, 2),
        (192, 128, True, 1, 2), (256, 160, False, 1, 2), (128, 224, False, 1, 2),
        (128, 208, True, 2, 1), (128, 208, True, 1, 2), (256, 208, False, 2, 1),
        (256, 208, False, 1, 2),
    )
)  # fmt: skip


def candidates(problem: Problem) -> list[Config]:
    # A cluster two tiles high is half idle if groups have fewer rows than a tile.
    small_groups = not problem.contracting and problem.m <= 64 * problem.groups
    return sorted(CONFIGS, key=lambda config: small_groups and config.cluster_m > 1)


@functools.cache
def gemm_config(config: Config) -> Any:
    """Returns QuACK's object for a configuration, always the same, because QuACK caches by `id`."""
    from quack.gemm_config import GemmConfig

    return GemmConfig(**{"is_dynamic_persistent": False} | asdict(config), device_capacity=9)


class Quack(SweptPeer):
    """`gemm` with `cu_seqlens_m` for ragged rows and `cu_seqlens_k` for weight gradients.

    A sweep of 1 takes the default configuration. Larger sweeps try more of `CONFIGS`.
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
            # Call the function under the autotuner, as QuACK's public `gemm(tuned=False)` does.
            def run():
                out = torch.empty(problem.out_shape, dtype=out_dtype, device=a.device)
                gemm_tuned.fn(a, b, out, config=gemm_config(config), **ragged)
                return out

            prepared = TorchCall(run)
            prepared.wait(prepared.run())
            return prepared

        return self._sweep.best(problem, candidates(problem), call)
