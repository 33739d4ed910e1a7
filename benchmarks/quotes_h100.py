"""What the pages say of an H100, beside the H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.harness.quoting import span, table, time_and_rate
from benchmarks.records_by_topic import cases, commits, ours

OPS = ("forward", "dgrad", "wgrad")


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
    pairs = both()
    times = times_as_long(pairs)
    best = [found[1] for found in (best_grouped(one) for _, one in pairs) if found]
    others = cases("layers")
    layers = times_as_long([(others[name], one) for name, one in cases("h100_layers").items()])
    return (
        f"[{len(pairs)} products](#performance) take {geometric_mean(times):.2f} times as long as "
        f"on an H200 ({span(times)}), [whole layers](docs/performance.md#on-an-h100) "
        f"{geometric_mean(layers):.2f} times ({span(layers)}). The faster of PyTorch's and "
        f"Pallas's products takes {geometric_mean(best):.2f} times as long as ours ({span(best)})"
    )


def h100_products() -> str:
    """Each product on both, and the fastest other on the H100."""
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


def h100_layers() -> str:
    """Whole layers on both."""
    others, rows = cases("layers"), []
    for name, one in cases("h100_layers").items():
        rows.append(
            [
                f"`{one['shape']['name']}` {'step' if one['op'] == 'moe_step' else 'forward'}",
                *(f"{ours(case)['median_us']:.0f}" for case in (others[name], one)),
                f"{times_as_long([(others[name], one)])[0]:.2f}",
            ]
        )
    header = ["layer", f"H200 us ({commits('layers')})", f"H100 us ({commits('h100_layers')})"]
    return table([*header, "H100 over H200"], rows)
