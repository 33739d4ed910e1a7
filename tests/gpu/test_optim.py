"""Muon's orthogonalisation with the kernel, against the same in float64."""

import jax
import numpy as np

from jax_grouped_gemm.optim import orthogonalize
from tests.api.test_optim import plain, spread


def test_bfloat16_kernel(rng):
    shapes = [(256, 384), (384, 256), (3, 128, 128), (2, 136, 72), (100, 50)]
    matrices = [spread(rng, shape) for shape in shapes]
    outs = jax.jit(lambda m: orthogonalize(m, implementation="cuda"))(matrices)
    for out, x in zip(outs, matrices, strict=True):
        for one, matrix in zip(
            np.asarray(out).reshape(-1, *x.shape[-2:]), x.reshape(-1, *x.shape[-2:]), strict=True
        ):
            want = plain(matrix)
            # Five steps in bfloat16; singular values differ by what the iteration leaves open.
            assert np.linalg.norm(one - want) < 0.15 * np.linalg.norm(want)
            values = np.linalg.svd(one.astype(np.float64), compute_uv=False)
            assert 0.4 < values.min() and values.max() < 1.4
