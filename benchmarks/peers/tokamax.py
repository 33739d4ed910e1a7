"""tokamax's ragged dot with its Mosaic-GPU and Triton kernels, if it is installed."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from benchmarks.harness.cases import Problem
from benchmarks.harness.inputs import abstract_operands
from benchmarks.harness.peer import Call, NotOffered, Peer, Role, dimension_numbers, jax_call
from benchmarks.peers.sweep import CompiledPeer, Sweep
from jax_grouped_gemm import moe


@dataclass(frozen=True)
class Config:
    """A kernel and its options under tokamax's own names. Options that are None are left out."""

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
        """Returns the arguments of the kernel's own configuration class."""
        fields = asdict(self)
        del fields["implementation"]
        return {"split_k": 1} | {name: value for name, value in fields.items() if value is not None}

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.implementation} {tile}, {self.num_stages} stages"


# These are the most frequent entries of the tables that tokamax tuned on an H100, first those of
# the Triton kernel, which is faster on most problems. Without a table, tokamax's defaults are slow.
CONFIGS = (
    Config("triton", 128, 128, 32, 4, num_warps=4),
    Config("triton", 128, 256, 64, 3, num_warps=8),
    Config("mosaic_gpu", 128, 64, 128, 4, persistent=True, grid_minor_dim=0, grid_tile_width=4),
    Config("triton", 128, 128, 64, 3, num_warps=4),
    Config("mosaic_gpu", 128, 64, 128, 4, persistent=False, grid_minor_dim=1, grid_tile_width=8),
    Config("triton", 64, 256, 32, 3, num_warps=4),
)


# Configurations for weights of 4 and 8 bits: the default, and tiles of fewer and of more rows.
LAYER_CONFIGS = tuple(
    Config("mosaic_gpu", rows, 64, 128, 3, persistent=True, grid_minor_dim=0, grid_tile_width=1)
    for rows in (64, 16, 128)
)


# The Mosaic kernel unrolls a loop over the groups. With 128 groups it compiles for half a minute.
MOST_MOSAIC_GROUPS = 32


def kernel_of(config: Config) -> Callable[..., jax.Array]:
    """Returns tokamax's kernel with a configuration."""
    from absl import flags
    from tokamax._src.ops.ragged_dot import api

    if not flags.FLAGS.is_parsed():
        # Without this, tokamax would look for its flags on this program's command line.
        flags.FLAGS(["tokamax"])
    kernel = api.IMPLEMENTATIONS[config.implementation]
    return kernel.replace(config=kernel.config_cls(**config.options()))


@functools.cache
def compiled(problem: Problem, config: Config) -> Callable[..., jax.Array]:
    """Returns the compiled function of (lhs, rhs, group_sizes) with a configuration."""
    numbers, dtype = dimension_numbers(problem), problem.out_dtype
    options = dict(ragged_dot_dimension_numbers=numbers, preferred_element_type=dtype)

    def product(lhs, rhs, group_sizes):
        return kernel_of(config)(lhs, rhs, group_sizes=group_sizes, **options)

    return jax.jit(product).lower(*abstract_operands(problem)).compile()


class Tokamax(CompiledPeer):
    """tokamax's ragged dot, timed with the copies that it makes of transposed operands."""

    name = "tokamax"
    needs = ("tokamax", "GPU")
    configs = CONFIGS
    compiled = staticmethod(compiled)

    def allowed(self, problem, config):
        if config.implementation == "mosaic_gpu" and problem.groups > MOST_MOSAIC_GROUPS:
            return False
        return problem.contracting or problem.k % config.block_k == 0


class TokamaxLayer(Peer):
    """A layer of int4 or int8 weights with tokamax's products, and our sort and our sum."""

    name, role, needs = "tokamax", Role.GROUPED, ("tokamax", "GPU")

    def prepare(self, problem, arrays, packed):
        from qwix import QArray

        format, layer = packed[0].format.name, problem.layer
        if format not in ("int4", "int8") or layer.embed % 128 or layer.hidden % 128:
            raise NotOffered(f"{format} of {layer.embed} x {layer.hidden}")

        def parts(q):
            # The kernel reads values along k, and multiplies in the dtype of the scales.
            codes, scales, _ = q.unpack()
            values = jnp.swapaxes(codes, 1, 2).astype(jnp.int8)
            if format == "int4":
                values = (values - 8).astype(jnp.int4)
            return values, scales.reshape(layer.experts, -1, codes.shape[2]).astype(jnp.bfloat16)

        def call(config: Config) -> Call:
            def run(x, experts, weights, matrices):
                order = moe.sort_by_expert(experts, layer.experts)

                def product(rows, values, scales):
                    w = QArray(values.mT, scales)
                    return kernel_of(config)(rows, w, group_sizes=order.group_sizes)

                rows = moe.dispatch(x, order)
                gate, up = (product(rows, *w) for w in matrices[:2])
                y = product(jax.nn.silu(gate) * up, *matrices[2])
                return (moe.combine(y, order, weights=weights),)

            return jax_call(jax.jit(run), *arrays[:3], matrices)

        matrices = [*map(parts, packed)]
        sweep = Sweep("tokamax_layer", len(LAYER_CONFIGS), retune=False)
        return sweep.best(f"{layer.name}/{format}", LAYER_CONFIGS, call, workers=4)
