"""tokamax's ragged dot, its Mosaic-GPU and its Triton kernels, where it is installed."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax

from benchmarks.harness.cases import Problem
from benchmarks.harness.inputs import abstract_operands
from benchmarks.harness.peer import dimension_numbers
from benchmarks.peers.sweep import CompiledPeer


@dataclass(frozen=True)
class Config:
    """A kernel and its options in tokamax's own terms; None is left out."""

    implementation: str
    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int | None = None
    persistent: bool | None = None
    grid_minor_dim: int | None = None
    grid_tile_width: int | None = None

    def options(self) -> dict[str, int | bool]:
        """The arguments of the kernel's own configuration class."""
        fields = asdict(self)
        del fields["implementation"]
        return {"split_k": 1} | {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.implementation} {tile}, {self.num_stages} stages"


# tokamax tunes offline and ships what it found on an H100: the most frequent entries of those
# tables, the Triton kernel's first, since it is the faster on most of their problems. The defaults
# for a GPU without a table, 64x64 tiles, are far from these.
CONFIGS = (
    Config("triton", 128, 128, 32, 4, num_warps=4),
    Config("triton", 128, 256, 64, 3, num_warps=8),
    Config("mosaic_gpu", 128, 64, 128, 4, persistent=True, grid_minor_dim=0, grid_tile_width=4),
    Config("triton", 128, 128, 64, 3, num_warps=4),
    Config("mosaic_gpu", 128, 64, 128, 4, persistent=False, grid_minor_dim=1, grid_tile_width=8),
    Config("triton", 64, 256, 32, 3, num_warps=4),
)


# The Mosaic kernel unrolls a loop over the groups, and 128 of them take half a minute to compile.
MOST_MOSAIC_GROUPS = 32


@functools.cache
def compiled(problem: Problem, config: Config) -> Callable[..., jax.Array]:
    """The compiled function of (lhs, rhs, group_sizes) with a configuration."""
    from absl import flags
    from tokamax._src.ops.ragged_dot import api

    if not flags.FLAGS.is_parsed():
        # tokamax would look for its flags on this program's command line.
        flags.FLAGS(["tokamax"])
    kernel = api.IMPLEMENTATIONS[config.implementation]
    kernel = kernel.replace(config=kernel.config_cls(**config.options()))

    def product(lhs, rhs, group_sizes):
        return api.ragged_dot_general(
            lhs,
            rhs,
            group_sizes,
            dimension_numbers(problem),
            preferred_element_type=problem.out_dtype,
            implementation=(kernel,),
        )

    return jax.jit(product).lower(*abstract_operands(problem)).compile()


class Tokamax(CompiledPeer):
    """Transposed operands are copied by tokamax itself, and those copies are part of its time."""

    name = "tokamax"
    needs = ("tokamax", "GPU")
    configs = CONFIGS
    compiled = staticmethod(compiled)

    def allowed(self, problem, config):
        if config.implementation == "mosaic_gpu" and problem.groups > MOST_MOSAIC_GROUPS:
            return False
        return problem.contracting or problem.k % config.block_k == 0
