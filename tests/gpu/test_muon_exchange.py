"""A matrix that is split over two GPUs gets the same bits as on one GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm.optim import orthogonalize

SHAPES = [(5, 256, 640), (520, 1032), (256, 640), (3, 384, 136)]
SPECS = [P(None, None, "d"), P("d"), P(None, "d"), P(None, "d")]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("method", ["auto", "standard"])
def test_bits_are_those_of_one_device(method, kind, rng):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(kind,))
    matrices = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in SHAPES]
    shardings = [NamedSharding(mesh, spec) for spec in SPECS]
    want = jax.jit(lambda *xs: orthogonalize(xs, method=method))(*matrices)
    split = [jax.device_put(x, s) for x, s in zip(matrices, shardings, strict=True)]
    given = shardings if kind == AxisType.Auto else None
    with jax.set_mesh(mesh):
        call = jax.jit(lambda *xs: orthogonalize(xs, method=method, shardings=given))
        got = call(*split)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
