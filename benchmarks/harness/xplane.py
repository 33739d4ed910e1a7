"""Device activity of this process from JAX's profiler, where CUPTI cannot be used directly.

One profile covers many calls. Each call runs inside a host annotation, its window, and device
activities are attributed to windows by time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from benchmarks.harness.device_activity import Activity, Sample, summarize
from benchmarks.harness.peer import Call

WINDOW = "benchmark window"
# The profiler aligns the device's clock with the host's to within tens of microseconds.
CLOCK_SKEW_NS = 100_000


def attribute(
    windows: Sequence[Activity], activities: Iterable[Activity], skew: int = CLOCK_SKEW_NS
) -> list[list[Activity]]:
    """The activities of each window, in time order.

    A call is over before its window closes, so an activity belongs to the window that it starts in,
    give or take the skew between the clocks. One between windows (a flush of the cache) belongs to
    none. Windows must lie at least two skews apart.
    """
    windows = sorted(windows)
    attributed: list[list[Activity]] = [[] for _ in windows]
    current = 0
    for activity in sorted(activities):
        while current < len(windows) and windows[current].end + skew < activity.start:
            current += 1
        if current == len(windows):
            break
        if activity.start >= windows[current].start - skew:
            attributed[current].append(activity)
    return attributed


def read_profile(profile: ProfileData) -> tuple[list[Activity], list[Activity]]:
    """The windows and the device activities of a profile."""
    windows, activities = [], []
    for plane in profile.planes:
        on_device = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            # A device's other lines (modules, ops) are summaries of what its streams did.
            if on_device and line.name.startswith("Stream"):
                activities += map(_activity, line.events)
            elif plane.name.startswith("/host"):
                windows += [_activity(event) for event in line.events if event.name == WINDOW]
    return windows, activities


def _activity(event) -> Activity:
    return Activity(round(event.start_ns), round(event.start_ns + event.duration_ns), event.name)


class XplaneRecorder:
    """Records the device activity of calls while it is open; the samples are known once closed."""

    name = "xplane"

    def __init__(self):
        if jax.default_backend() != "gpu":
            raise OSError("JAX has no GPU to profile")

    def __enter__(self) -> XplaneRecorder:
        options = ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        self._directory = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._directory.name, profiler_options=options)
        return self

    def __exit__(self, *_) -> None:
        jax.profiler.stop_trace()
        with self._directory as directory:
            (path,) = Path(directory).rglob("*.xplane.pb")
            windows, activities = read_profile(ProfileData.from_file(str(path)))
        self._samples = [summarize(group) for group in attribute(windows, activities)]

    def record(self, call: Call) -> None:
        """Runs a call to its end inside a window of its own."""
        time.sleep(2 * CLOCK_SKEW_NS / 1e9)
        with TraceAnnotation(WINDOW):
            call.wait(call.run())

    def samples(self) -> list[Sample]:
        """A sample for each recorded call, in order."""
        return self._samples
