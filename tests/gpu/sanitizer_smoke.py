"""A small set of kernel launches to run under compute-sanitizer:

compute-sanitizer --tool memcheck python -m tests.gpu.sanitizer_smoke
compute-sanitizer --tool racecheck python -m tests.gpu.sanitizer_smoke fp8 fp64

Arguments name the parts to run; by default all parts run. Each part takes a sanitizer minutes, and
parts in separate processes can run at the same time. Every buffer is its own allocation, so that
the sanitizer sees an access past the end of a buffer. XLA's autotuning is off, so that nearly all
kernels that run are ours. Exits with an error on a wrong result.
"""

import os
import sys

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
    # The sanitizer itself crashed now and then while XLA compiled.
    + " --xla_gpu_force_compilation_parallelism=1"
)

import numpy as np

from tests.gpu.sanitizer import fp8, layers, lists, optimizers, products

PARTS = {
    "ragged": products.ragged_products,
    "accumulate": products.products_added_in_place,
    "mlp": layers.expert_mlps,
    "few_rows": layers.expert_mlps_of_few_rows,
    "packed": layers.packed_weights,
    "stream_k": products.products_with_a_cut_last_wave,
    "long_tiles": products.long_tiles,
    "skew": products.gradients_of_unequal_groups,
    "pingpong": products.gradients_of_consumers_in_turn,
    "optimizers": optimizers.steps_that_quantize,
    "updates": lists.symmetric_updates,
    "symmetric_products": lists.symmetric_products,
    "float32_symmetric_products": lists.float32_symmetric_products,
    "lists": lists.lists_of_products,
    "float32_few_rows": products.float32_products_of_few_rows,
    "float32_updates": lists.float32_updates,
    "float32_lists": lists.float32_lists_of_products,
    "fp64": lists.fp64,
    "fp8": fp8.fp8,
    "fp8_mlp": fp8.fp8_mlps,
    "fp8_decode": fp8.fp8_layers_of_few_tokens,
    "rows": layers.rows,
}


def main(names: list[str]) -> None:
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    for name in names or PARTS:
        launches = PARTS[name](np.random.default_rng(0))
        print(f"{name}: {launches} launches, all results right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
