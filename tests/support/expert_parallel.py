"""Operands whose results do not depend on the order of sums, and layers on one device."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import moe

TIME_LIMIT = 300  # seconds for all processes together, on a machine that does other things too

T, D, F, E, K = 24, 16, 8, 8, 2  # T is the number of tokens on all devices


def operands(rng, tokens=T, experts=E, top_k=K, embed=D, hidden=F, bias=None):
    """Returns x, experts, weights, wi_0, wi_1 and wo, which are small integers as float32."""

    def integers(*shape, most=2):
        return jnp.asarray(rng.integers(-most, most + 1, shape), jnp.float32)

    scores = rng.standard_normal((tokens, experts)) + (0 if bias is None else np.asarray(bias))
    chosen = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    return (
        integers(tokens, embed),
        jnp.asarray(chosen),
        jnp.asarray(rng.integers(1, 4, chosen.shape), jnp.float32),
        integers(experts, embed, hidden),
        integers(experts, embed, hidden, most=1),
        integers(experts, hidden, embed),
    )


def routing(experts, weights, num_experts=E) -> moe.Routing:
    """Returns the routing for given choices. A layer uses only the shape of the logits."""
    logits = jnp.zeros((*experts.shape[:-1], num_experts), jnp.float32)
    return moe.Routing(logits, experts, weights)


def one_device(num_experts=E, **options):
    """Returns a function (x, experts, weights, *matrices) -> y on one device."""

    def run(x, experts, weights, *matrices):
        options.setdefault("activation", "relu")
        return moe.dropless_mlp(x, routing(experts, weights, num_experts), *matrices, **options)

    return run


def with_gradients(function):
    """Returns a function (cotangent, *operands) -> result and gradients of all but the choices."""

    @jax.jit
    def run(cotangent, x, experts, *floats):
        y, vjp = jax.vjp(lambda x, *floats: function(x, experts, *floats), x, *floats)
        return y, *vjp(cotangent)

    return run


@functools.cache
def one_device_with_gradients(num_experts=E):
    """Returns one function for all tests, so that it is compiled once for equal shapes."""
    return with_gradients(one_device(num_experts))


layer_of_one_device = jax.jit(one_device())


def assert_equal(got, expected):
    """Asserts that all results and gradients are equal bit by bit."""
    for name, one, other in zip(
        ("y", "x", "weights", "wi_0", "wi_1", "wo"), got, expected, strict=True
    ):
        np.testing.assert_array_equal(one, other, err_msg=name)


def check_processes(
    count: int, platform: str, strategies: Sequence[str], devices_each: int = 1
) -> None:
    """Asserts that processes of `expert_parallel_process` get the results of one device."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    environment = dict(os.environ)
    if platform == "cpu":
        # If a flag is given twice, the last one counts.
        number = f"--xla_force_host_platform_device_count={devices_each}"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {number}".strip()
    command = [sys.executable, "-m", "tests.support.expert_parallel_process"]
    command += ["--address", address, "--processes", str(count)]
    command += ["--platform", platform, "--strategies", *strategies]
    processes = [
        subprocess.Popen(
            [*command, "--process", str(i)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    try:
        printed = [process.communicate(timeout=TIME_LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    equal = {f"{strategy} equal" for strategy in strategies}
    assert all(equal <= set(text.splitlines()) for text in printed), "\n".join(printed)
