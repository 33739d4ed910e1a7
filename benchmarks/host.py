"""What our products cost the host: inside a jitted computation, and the first one of a process.

A jitted call has a cost of its own, about as much as JAX takes to dispatch any computation, which
has nothing to do with what is in it. So a product's cost is taken as a slope: from a computation of
one product to a chain of many, over the number of products added. They are as small as they can
be, but the device takes its time for them too, so the slope of the wall time has that in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.cases import Problem
from benchmarks.peers.base import Call, jax_call, on_gpu
from benchmarks.peers.ours import ragged_product
from benchmarks.recorders import Recorder
from benchmarks.timing import one_call_times

# One tile: two groups of eight rows. The result of a product is the next one's operand.
PROBLEM = Problem(
    contracting=False,
    transpose_rhs=False,
    groups=2,
    m=16,
    k=64,
    n=64,
    dtype="bfloat16",
    out_dtype="bfloat16",
)
REPEATS = 30
# Without command buffers XLA calls our handler in every execution; with them, only to record.
COMMAND_BUFFERS = {"without": "", "with": "FUSION,CUSTOM_CALL"}


def chain(products: int, implementation: str) -> Callable[..., jax.Array]:
    """A function of (lhs, rhs, group_sizes) that multiplies `products` times in a row."""
    product = ragged_product(PROBLEM, implementation)

    def function(lhs, rhs, group_sizes):
        for _ in range(products):
            lhs = product(lhs, rhs, group_sizes)
        return lhs

    return function


def product_cost(recorder: Recorder, products: int = 100) -> dict[str, dict[str, float]]:
    """Microseconds that a product adds to a jitted call, without and with command buffers.

    Returns:
      For each: `enqueue_us`, until the call returned to the host; `wall_us`, until the device was
      done; `device_us`, the part of it in which a kernel ran; and the same of a call with a single
      product, `call_enqueue_us` and `call_wall_us`, which is mostly JAX's dispatch.
    """
    implementation = "cuda" if on_gpu() else "reference"
    key = jax.random.key(0)
    lhs = jax.random.normal(key, (PROBLEM.m, PROBLEM.k), PROBLEM.dtype)
    # Keeps a chain's values in range.
    rhs = jax.random.normal(key, (PROBLEM.groups, PROBLEM.k, PROBLEM.n), PROBLEM.dtype) / 8
    sizes = jnp.array([PROBLEM.m // 2] * PROBLEM.groups, jnp.int32)
    report = {}
    for name, kinds in COMMAND_BUFFERS.items():
        options = {"xla_gpu_enable_command_buffer": kinds} if on_gpu() else None
        one, many = (
            jax_call(
                jax.jit(chain(length, implementation), compiler_options=options), lhs, rhs, sizes
            )
            for length in (1, 1 + products)
        )
        report[name] = _slope(one, many, products, recorder)
    return report


def _slope(one: Call, many: Call, products: int, recorder: Recorder) -> dict[str, float]:
    # Warm: a command buffer is recorded in one of the first executions.
    for call in (one, many) * 3:
        call.wait(call.run())
    with recorder:
        for call in (one, many) * 3:
            recorder.record(call)
    samples = recorder.samples()
    device = [statistics.median(sample.us for sample in samples[i::2]) for i in range(2)]
    times = [one_call_times(call, REPEATS) for call in (one, many)]
    return {
        "enqueue_us": (times[1].enqueue_us - times[0].enqueue_us) / products,
        "wall_us": (times[1].wall_us - times[0].wall_us) / products,
        "device_us": (device[1] - device[0]) / products,
        "call_enqueue_us": times[0].enqueue_us,
        "call_wall_us": times[0].wall_us,
    }


def first_call() -> dict[str, float]:
    """Seconds of the first product in a fresh process, by steps; see `first_call.py`."""
    problem = json.dumps(dataclasses.asdict(PROBLEM))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_call", problem],
        # This process has reserved most of the GPU's memory.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
