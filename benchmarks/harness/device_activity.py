"""What the device did during one call, however it was recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Activity:
    """One kernel, memory copy or memory set on the device. Times are in ns of one clock."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Sample:
    """Device time of one call in microseconds, and its device activities in order.

    `activities` are their names and `durations` the microseconds of each by itself, both None where
    only a clock around the call could be read.
    """

    us: float
    activities: tuple[str, ...] | None
    durations: tuple[float, ...] | None = None

    def parts(self, part_of: Callable[[str], str]) -> dict[str, float] | None:
        """Microseconds of the activities of each part, which `part_of` names; None without any."""
        if self.activities is None or self.durations is None:
            return None
        sums: dict[str, float] = {}
        for name, us in zip(self.activities, self.durations, strict=True):
            sums[part_of(name)] = sums.get(part_of(name), 0.0) + us
        return sums


def summarize(activities: Iterable[Activity]) -> Sample:
    """The time in which at least one activity ran.

    Gaps between activities do not count, so that a peer with many launches is not charged for the
    host's speed here; and activities that overlap are not counted twice.
    """
    ordered = sorted(activities)
    busy, past = 0, 0
    for activity in ordered:
        busy += max(0, activity.end - max(activity.start, past))
        past = max(past, activity.end)
    return Sample(
        busy / 1000,
        tuple(activity.name for activity in ordered),
        tuple((activity.end - activity.start) / 1000 for activity in ordered),
    )
