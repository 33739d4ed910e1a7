"""What the device did during one call, however it was recorded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Activity:
    """One kernel, memory copy or memory set on the device. Times are in ns of one clock."""

    start: int
    end: int
    name: str


@dataclass(frozen=True)
class Sample:
    """Device time of one call in microseconds, and the names of its device activities in order.

    `activities` is None where only a clock around the call could be read.
    """

    us: float
    activities: tuple[str, ...] | None


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
    return Sample(busy / 1000, tuple(activity.name for activity in ordered))
