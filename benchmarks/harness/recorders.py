"""Ways to measure the device time of a call, best first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from benchmarks.harness.cupti import CuptiRecorder
from benchmarks.harness.device_activity import Sample
from benchmarks.harness.peer import Call


class Recorder(contextlib.AbstractContextManager, Protocol):
    """Measures calls between its opening and closing; it can be opened again afterwards."""

    name: str

    def record(self, call: Call) -> None:
        """Runs a call to its end and measures it."""

    def samples(self) -> list[Sample]:
        """A sample for each recorded call, in order; complete once the recorder is closed."""


class ClockRecorder:
    """Whatever clock a call offers: events on its stream, or the host's clock around it.

    It needs nothing, but host time is in the result where the host's clock is all there is.
    """

    name = "clock"

    def __enter__(self) -> ClockRecorder:
        self._samples: list[Sample] = []
        return self

    def __exit__(self, *_) -> None:
        pass

    def record(self, call: Call) -> None:
        self._samples.append(Sample(call.elapsed_us(), None))

    def samples(self) -> list[Sample]:
        return self._samples


RECORDERS: dict[str, Callable[[], Recorder]] = {"cupti": CuptiRecorder, "clock": ClockRecorder}


def open_best(names: list[str], probe: Call) -> tuple[Recorder, list[str]]:
    """The first of the named recorders that sees the device time of a probing call."""
    reasons = []
    for name in names:
        try:
            recorder = RECORDERS[name]()
            # Twice, because every case opens the recorder anew.
            for _ in range(2):
                with recorder:
                    recorder.record(probe)
                if recorder.samples()[0].us <= 0:
                    raise RuntimeError("recorded no device activity")
            return recorder, reasons
        except Exception as error:
            # Anything may go wrong in a profiler, and every reason leads to the next recorder.
            reasons.append(f"{name}: {error!r}")
    raise RuntimeError(f"no way to measure device time: {'; '.join(reasons)}")
