"""Measures several calls so that their times can be compared.

The chip's clocks drift by several per cent within minutes. So calls are interleaved: each round
runs every call once, in a random order, and results compare times of the same round.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.peer import Call
from benchmarks.harness.recorders import Recorder, Sample

# Several times the 50 to 60 MB of L2 on Hopper.
FLUSH_BYTES = 256 * 2**20


class CacheFlush:
    """Replaces the contents of L2, so that no call finds the operands of an earlier call there."""

    def __init__(self, nbytes: int = FLUSH_BYTES):
        self._data = jnp.zeros(nbytes // 4, jnp.uint32)
        # Read and do not write, because the next call would have to wait until written cache lines
        # have gone to memory.
        self._read = jax.jit(jnp.max)

    def __call__(self) -> None:
        jax.block_until_ready(self._read(self._data))


def interleave(
    calls: Mapping[str, Call],
    recorder: Recorder,
    rounds: int,
    flush: Callable[[], None],
    seed: int = 0,
) -> dict[str, list[Sample]]:
    """Returns `rounds` samples of each call. Samples with the same index are of the same round."""
    rng = np.random.default_rng(seed)
    # Drop the first round, which warms the chip.
    order = [name for _ in range(rounds + 1) for name in rng.permutation(list(calls))]
    with recorder:
        for name in order:
            flush()
            recorder.record(calls[name])
    recorded = list(zip(order, recorder.samples(), strict=True))[len(calls) :]
    return {name: [sample for other, sample in recorded if other == name] for name in calls}


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Returns the median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


@dataclass(frozen=True)
class HostTimes:
    """Microseconds of a call in a queue of calls, by the host's clock."""

    wall_us: float  # until the last call has finished
    enqueue_us: float  # until the calls have returned to the host


def host_times(call: Call, device_us: float, repeats: int = 3) -> HostTimes:
    """Returns wall and enqueue times of a call, medians over queues of up to 16 calls.

    With longer queues, the host would wait for the device while it enqueues.
    """
    queue = int(np.clip(20_000 / max(device_us, 1.0), 2, 16))
    measured = [_queue_times(call, queue) for _ in range(repeats)]
    return HostTimes(
        statistics.median(times.wall_us for times in measured),
        statistics.median(times.enqueue_us for times in measured),
    )


def _queue_times(call: Call, queue: int) -> HostTimes:
    call.wait(call.run())
    start = time.perf_counter()
    for _ in range(queue):
        result = call.run()
    enqueued = time.perf_counter()
    call.wait(result)
    finished = time.perf_counter()
    return HostTimes((finished - start) * 1e6 / queue, (enqueued - start) * 1e6 / queue)
