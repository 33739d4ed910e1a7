"""What the pages say of an H100, beside the H200, once there is a record of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.harness.quoting import span, table, time_and_rate
from benchmarks.records_by_topic import RECORDS, RESULTS, cases, commits, ours

NONE = "no records yet"
OPS = ("forward", "dgrad", "wgrad")


def is_recorded() -> bool:
    """Whether the record is there."""
    return all((RESULTS / f"{stem}.json").exists() for stem in RECORDS["h100"])


def both() -> list[tuple[Mapping, Mapping]]:
    """The cases that were measured on both, the H200's first."""
    others = cases("ragged")
    return [
        (others[name], found)
        for name, found in cases("h100").items()
        if name in others and found["op"] in OPS
    ]


def times_as_long(pairs: Sequence[tuple[Mapping, Mapping]]) -> list[float]:
    """What the H100 takes, over what the H200 does."""
    return [ours(one)["median_us"] / ours(other)["median_us"] for other, one in pairs]


def h100() -> str:
    """A cell of the first page's table."""
    if not is_recorded():
        return NONE
    times = times_as_long(both())
    best = [found[1] for found in (best_grouped(one) for _, one in both()) if found]
    return (
        f"products take {geometric_mean(times):.2f} times as long as on an H200 ({span(times)}); "
        f"over the fastest other, {geometric_mean(best):.2f} ({span(best)})"
    )


def h100_products() -> str:
    """Each product on both, and the fastest other on the H100."""
    if not is_recorded():
        return table(["product", "H200", "H100"], [[NONE, "", ""]])
    rows = []
    for other, one in both():
        best = best_grouped(one)
        rows.append(
            [
                f"`{one['shape']['name']}` {one['op']}",
                time_and_rate(other),
                time_and_rate(one),
                f"{times_as_long([(other, one)])[0]:.2f}",
                f"{best[1]:.2f} {best[0]}" if best else "-",
            ]
        )
    header = ["product", "H200 us (TFLOP/s)", "H100 us (TFLOP/s)", "H100 over H200", "vs best"]
    return table([*header[:4], f"{header[4]} on the H100 ({commits('h100')})"], rows)
