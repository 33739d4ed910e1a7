"""What our products cost the host inside a jitted computation.

python -m benchmarks.host

A jitted call has a cost of its own, about as much as JAX takes to dispatch any computation, which
has nothing to do with what is in it. So a product's cost is taken as a slope: from a computation of
one product to a chain of many, over the number of products added. They are as small as they can
be, but the device takes its time for them too, so the slope of the wall time has that in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.harness.cases import Problem
from benchmarks.harness.command import Command
from benchmarks.harness.peer import Call, Role, jax_call, on_gpu, pinned_implementation
from benchmarks.harness.recorders import Recorder
from benchmarks.harness.session import Job, Session
from benchmarks.harness.timing import one_call_times
from benchmarks.peers.ours import ragged_product

# One tile: two groups of eight rows. The result of a product is the next one's operand.
PROBLEM = Problem(False, False, groups=2, m=16, k=64, n=64, dtype="bfloat16", out_dtype="bfloat16")
REPEATS = 30
# Without command buffers XLA calls our handler in every execution; with them, only to record.
COMMAND_BUFFERS = {"without_command_buffers": "", "with_command_buffers": "FUSION,CUSTOM_CALL"}


def chain(products: int, implementation: str | None) -> Callable[..., jax.Array]:
    """A function of (lhs, rhs, group_sizes) that multiplies `products` times in a row."""
    product = ragged_product(PROBLEM, implementation)

    def function(lhs, rhs, group_sizes):
        for _ in range(products):
            lhs = product(lhs, rhs, group_sizes)
        return lhs

    return function


def product_cost(buffers: str, recorder: Recorder, products: int, seed: int) -> dict:
    """A record of the microseconds that a product adds to a jitted call.

    Of ours: `enqueue_us`, until the call returned to the host; `wall_us`, until the device was
    done; `device_us`, the part of it in which a kernel ran; and the same of a call with a single
    product, `call_enqueue_us` and `call_wall_us`, which is mostly JAX's dispatch.
    """
    implementation = pinned_implementation()
    key = jax.random.key(seed)
    lhs = jax.random.normal(key, (PROBLEM.m, PROBLEM.k), PROBLEM.dtype)
    # Keeps a chain's values in range.
    rhs = jax.random.normal(key, (PROBLEM.groups, PROBLEM.k, PROBLEM.n), PROBLEM.dtype) / 8
    sizes = jnp.array([PROBLEM.m // 2] * PROBLEM.groups, jnp.int32)
    options = {"xla_gpu_enable_command_buffer": COMMAND_BUFFERS[buffers]} if on_gpu() else None
    one, many = (
        jax_call(jax.jit(chain(length, implementation), compiler_options=options), lhs, rhs, sizes)
        for length in (1, 1 + products)
    )
    times = slope(one, many, products, recorder)
    return {
        "case": f"one_tile/host/{buffers}",
        "shape": {"name": "one_tile", **dataclasses.asdict(PROBLEM)},
        "op": "host",
        "peers": {"ours": {"role": Role.OURS.value, "status": "measured", **times}},
        "ratios": {},
    }


def slope(one: Call, many: Call, products: int, recorder: Recorder) -> dict[str, float]:
    """What each of `products` adds, from a call of one and a call with so many more."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chain", type=int, default=100, metavar="N", help="products of the host time's slope"
    )


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    products = 2 if options.dry_run else options.chain
    return [
        Job(
            f"one_tile/host/{buffers}",
            functools.partial(product_cost, buffers, session.recorder, products, options.seed),
            typical=False,
        )
        for buffers in COMMAND_BUFFERS
    ]


COMMAND = Command("benchmarks.host", __doc__, jobs, add_arguments=add_arguments)
main = COMMAND.main

if __name__ == "__main__":
    main()
