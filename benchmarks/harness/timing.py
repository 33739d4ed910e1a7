"""Measuring several calls so that their times can be compared.

The chip's clocks drift by several per cent within minutes. Calls are therefore interleaved: each
round runs every call once, in a new random order, and what is compared is the ratio within a round.
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
    """Replaces what the L2 cache holds, so that no call finds operands of the call before it."""

    def __init__(self, nbytes: int = FLUSH_BYTES):
        self._data = jnp.zeros(nbytes // 4, jnp.uint32)
        # Reading leaves clean lines. A cache full of written lines would be charged to the next
        # call, which has to wait for them to go to memory.
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
    """Device times: `rounds` samples of each call, the i-th of every call from the same round."""
    rng = np.random.default_rng(seed)
    # The first round warms the chip and is dropped.
    order = [name for _ in range(rounds + 1) for name in rng.permutation(list(calls))]
    with recorder:
        for name in order:
            flush()
            recorder.record(calls[name])
    recorded = list(zip(order, recorder.samples(), strict=True))[len(calls) :]
    return {name: [sample for other, sample in recorded if other == name] for name in calls}


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


@dataclass(frozen=True)
class HostTimes:
    """Microseconds a call, as the host sees them."""

    # The time of a queue of calls, until the last has finished.
    wall_us: float
    # Until the call returned to the host, the device still working.
    enqueue_us: float


def host_times(call: Call, device_us: float, repeats: int = 3) -> HostTimes:
    """Wall and enqueue time of a call, medians over queues of up to 16 calls.

    More calls in flight than that would make the host wait for the device while enqueueing.
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
