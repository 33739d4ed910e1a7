"""Runs one of several processes that compute a layer together.

Prints the name of a strategy and "equal" if this process's part of the result and of all gradients
equals that of one device.
"""

from __future__ import annotations

import argparse
import os


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--platform", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--strategies", nargs="+", required=True)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = options.platform
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

    import jax

    if options.platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        options.address,
        options.processes,
        options.process,
        local_device_ids=[options.process] if options.platform == "cuda" else None,
    )
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from jax_grouped_gemm import moe
    from tests.support import expert_parallel as ep

    given = ep.operands(np.random.default_rng(7), embed=64, hidden=32)
    cotangent = jnp.asarray(np.random.default_rng(8).integers(-2, 3, given[0].shape), jnp.float32)
    exact = dict(activation="relu", precision="highest")
    expected = ep.with_gradients(ep.one_device(**exact))(cotangent, *given)

    split = P("expert")
    mesh = Mesh(np.array(jax.devices()), ("expert",))

    def everywhere(x):
        x, sharding = np.asarray(x), NamedSharding(mesh, split)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    for strategy in options.strategies:

        def on_device(x, experts, weights, *matrices, strategy=strategy):
            return moe.expert_parallel_mlp(
                x,
                ep.routing(experts, weights),
                *matrices,
                expert_axis="expert",
                strategy=strategy,
                **exact,
            )[0]

        layer = jax.shard_map(on_device, mesh=mesh, in_specs=(split,) * 6, out_specs=split)
        got = ep.with_gradients(layer)(everywhere(cotangent), *map(everywhere, given))
        for one, whole in zip(got, expected, strict=True):
            for shard in one.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(whole)[shard.index])
        print(strategy, "equal", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
