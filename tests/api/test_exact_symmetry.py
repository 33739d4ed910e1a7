"""`symmetrize_output` gives exactly symmetric results, however XLA compiles the reference."""

from functools import partial

import jax
import numpy as np
import pytest

import jax_grouped_gemm as jgg


@pytest.mark.parametrize("name", ["syrk", "syr2k", "herk", "her2k"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("k", [1, 2])
def test_exactly_symmetric_however_xla_fuses(name, dtype, k, rng):
    """Results stay symmetric with all of XLA's optimisations, which other tests turn off."""

    def draw(*shape):
        x = rng.standard_normal(shape)
        return (x + 1j * rng.standard_normal(shape) if dtype == np.complex64 else x).astype(dtype)

    operands = [draw(1, 33, k) for _ in range(2 if "2" in name else 1)]
    for options in ({}, dict(c=draw(1, 33, 33), alpha=0.7, beta=0.3)):
        update = partial(getattr(jgg, f"grouped_{name}"), symmetrize_output=True, **options)
        lowered = jax.jit(update).lower(*operands)
        (out,) = lowered.compile({"xla_backend_optimization_level": 3})(*operands)
        mirrored = out.T.conj() if name.startswith("her") else out.T
        np.testing.assert_array_equal(out, mirrored)
