"""JAX's Pallas Mosaic-GPU ragged dot for Hopper, with the best configuration of a small sweep.

The kernel is an example in JAX's tree, and takes tile sizes from the caller.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax

from benchmarks.harness.cases import Problem
from benchmarks.harness.inputs import abstract_operands
from benchmarks.harness.peer import NotOffered
from benchmarks.peers.sweep import CompiledPeer


@dataclass(frozen=True)
class Config:
    """Tile sizes under the kernel's own names. `grid_block_n` is the width of its raster."""

    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int

    def __str__(self) -> str:
        return (
            f"{self.block_m}x{self.block_n}x{self.block_k}, "
            f"{self.max_concurrent_steps} steps, raster {self.grid_block_n}"
        )


# A sweep tries these in order. One warpgroup computes a tile, so a tile has at most 128 x 192
# accumulators. More steps would not fit into shared memory.
CONFIGS = (
    Config(128, 128, 64, 5, 8), Config(64, 256, 64, 4, 4), Config(128, 192, 64, 4, 4),
    Config(128, 128, 64, 5, 2), Config(64, 128, 64, 6, 8), Config(128, 128, 128, 2, 4),
    Config(64, 192, 64, 5, 4), Config(64, 64, 64, 8, 8),
)  # fmt: skip


@functools.cache
def compiled(problem: Problem, config: Config) -> Callable[..., jax.Array]:
    """Returns the compiled function of (lhs, rhs, group_sizes) with a configuration."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    options = dataclasses.asdict(config)
    if problem.contracting:
        function = transposed_ragged_dot_mgpu.transposed_ragged_dot
    else:
        function = ragged_dot_mgpu.ragged_dot
        options["transpose_rhs"] = problem.transpose_rhs
    jitted = jax.jit(lambda lhs, rhs, sizes: function(lhs, rhs, group_sizes=sizes, **options))
    return jitted.lower(*abstract_operands(problem)).compile()


class PallasMgpu(CompiledPeer):
    """`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and its transposed counterpart."""

    name = "pallas_mgpu"
    needs = ("absl", "GPU")
    configs = CONFIGS
    compiled = staticmethod(compiled)

    def allowed(self, problem, config):
        if problem.out_dtype != problem.dtype:
            raise NotOffered(f"its result has the operands' dtype, {problem.dtype}")
        if problem.contracting:
            return problem.k % config.block_m == 0 and problem.n % config.block_n == 0
        return problem.k % config.block_k == 0 and problem.n % config.block_n == 0
