"""Records in words: tables in Markdown, and their numbers; a dash where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.harness.measure import geometric_mean

# In place of a case that was not measured.
NO_CASE: Mapping = {"peers": {}, "ratios": {}}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def microseconds(case: Mapping, peer: str = "ours") -> str:
    value = case["peers"].get(peer, {}).get("median_us")
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def time_and_rate(case: Mapping) -> str:
    ours = case["peers"].get("ours", {})
    return f"{ours['median_us']:.0f} ({ours['tflops']:.0f})" if "tflops" in ours else "-"


def ratio(case: Mapping, *others: str) -> str:
    found = [case["ratios"][name] for name in others if name in case["ratios"]]
    return f"{min(found):.2f}" if found else "-"


def span(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def ends(values: Mapping[str, float]) -> str:
    """The least and the largest of some numbers, with what each is of."""
    low, high = (each(values, key=values.__getitem__) for each in (min, max))
    return f"{values[low]:.2f} ({low}) to {values[high]:.2f} ({high})"


def mean_and_span(values: Sequence[float]) -> str:
    """The geometric mean, and the least and the largest in brackets."""
    return f"{geometric_mean(values):.2f} ({span(values)})" if values else "-"
