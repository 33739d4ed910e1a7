"""A layer over several H200 has room for all rows, with little more memory than on one GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import moe
from tests.support import aot

BF16, F32 = jnp.bfloat16, jnp.float32
LAYERS = {
    "qwen3_30b": (8192, 2048, 768, 128, 8),
    "dsv3": (4096, 7168, 2048, 64, 8),
    "mixtral": (4096, 4096, 14336, 8, 2),
}
"""Tokens of a device, D, F, E and k."""


def peak_bytes(target, layer, tokens, embed, hidden, experts, top_k, specs=None):
    """Returns the peak bytes of a step of `layer(x, routing, *matrices)`, including operands."""
    shapes = [
        ((tokens, embed), BF16),
        ((tokens, top_k), jnp.int32),
        ((tokens, top_k), F32),
        ((experts, embed, hidden), BF16),
        ((experts, embed, hidden), BF16),
        ((experts, hidden, embed), BF16),
    ]

    def step(x, chosen, *floats):
        y, vjp = jax.vjp(lambda x, *floats: layer(x, chosen, *floats), x, *floats)
        return y, vjp(y)

    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return target.compile(step, *operands, specs=specs).peak_bytes


@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("devices", "save"), [(2, "auto"), (8, "nothing")])
def test_a_chunk_for_each_device(sizes, devices, save, extension):
    one, many = (aot.Target(aot.H200, devices=n) for n in (1, devices))
    tokens, embed, hidden, experts, top_k = sizes

    def routing(chosen, weights, num_experts):
        return moe.Routing(jnp.zeros((*chosen.shape[:-1], num_experts), F32), chosen, weights)

    def share(x, chosen, weights, *matrices):
        return moe.dropless_mlp(x, routing(chosen, weights, experts // devices), *matrices)

    def on_device(x, chosen, weights, *matrices):
        options = dict(expert_axis="x", chunks=devices, save=save)
        routed = routing(chosen, weights, experts)
        return moe.expert_parallel_mlp(x, routed, *matrices, **options)[0]

    split = [P("x")] * 6
    layer = jax.shard_map(on_device, mesh=many.mesh, in_specs=tuple(split), out_specs=P("x"))
    alone = peak_bytes(one, share, tokens, embed, hidden, experts // devices, top_k)
    together = peak_bytes(many, layer, tokens * devices, *sizes[1:], specs=split)
    gathered = 2 * devices * tokens * embed
    assert together < 1.3 * alone + gathered
