"""Steps of optimisers that write FP8 weights."""

import jax.numpy as jnp
import numpy as np

from tests.support import optimizer as oracle
from tests.support import optimizer_steps as steps


def steps_that_quantize(rng: np.random.Generator) -> int:
    """Runs steps on matrices with partial blocks, joined or not; returns how many it launched."""
    fp8, options = jnp.float8_e4m3fn, dict(implementation="cuda")
    for shape in oracle.SHAPES:
        for kinds in steps.MOMENTS:
            steps.check_adamw(rng, shape, fp8, kinds, **options)
        steps.check_adamw(rng, shape, fp8, parts=2, copy=jnp.bfloat16, **options)
        steps.check_apply(rng, shape, fp8, parts=2, **options)
        steps.check_skipped(rng, shape, fp8, "cuda")
    return len(oracle.SHAPES) * (len(steps.MOMENTS) + 6)
