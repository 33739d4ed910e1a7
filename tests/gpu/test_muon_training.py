"""Muon with our kernels in float16 trains like Optax's Muon in float32."""

import numpy as np

from tests.support.muon_training import losses, optimizers


def test_200_steps_follow_optax():
    found = {
        name: np.asarray(losses(optimizer, 11, experts=16, d=256, f=512))
        for name, optimizer in optimizers("cuda").items()
    }
    assert found["optax"][-1] < 0.75 * found["optax"][0]
    np.testing.assert_allclose(found["ours"], found["optax"], rtol=0.005)
