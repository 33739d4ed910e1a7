"""A small set of kernel launches to run under compute-sanitizer:

compute-sanitizer --tool memcheck python tests/gpu/sanitizer_smoke.py
compute-sanitizer --tool racecheck python tests/gpu/sanitizer_smoke.py

Every buffer is its own allocation, so that an access past the end of one is seen, and XLA's
autotuning is off, so that nearly all kernels seen are ours. Exits with an error on a wrong result.
"""

import os
import sys
from itertools import product
from pathlib import Path

os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
)
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
from ops import OPS, random, swap  # noqa: E402

M, K, N, G = 392, 136, 264, 5
SIZES = [
    [129, 0, 64, 1, 150],  # a tail, an empty group, boundaries off the tile
    [-3, 392, 0, 2**31 - 1, 7],  # out of range: clamped, never an access out of bounds
    [0, 0, 0, 0, 0],
]
OFFSETS = [None, 2, -4]


def main() -> None:
    rng = np.random.default_rng(0)
    launches = 0
    for op, transpose_lhs, transpose_rhs in product(OPS, (False, True), (False, True)):
        lhs, rhs, _ = (random(rng, shape, jnp.bfloat16) for shape in op.shapes(M, K, N, G))
        for out_dtype, offset in zip(
            (jnp.bfloat16, jnp.float32, jnp.bfloat16), OFFSETS, strict=True
        ):
            for sizes in np.array(SIZES, np.int32):
                out = op.call(
                    swap(lhs, transpose_lhs),
                    swap(rhs, transpose_rhs),
                    sizes,
                    offset,
                    transpose_lhs=transpose_lhs,
                    transpose_rhs=transpose_rhs,
                    preferred_element_type=out_dtype,
                    implementation="cuda",
                )
                oracle.check(out, op.exact(lhs, rhs, sizes, offset or 0))
                launches += 1
    print(f"{launches} launches, all results right")


if __name__ == "__main__":
    main()
