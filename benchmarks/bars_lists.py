"""What is asked of lists of unequal products, against one cuBLAS call a problem.

A record of a list has its name as `list`, and in `us` the times of each variant, round by round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.bar import Bar, Finding, missing_cases
from benchmarks.measure import geometric_mean
from benchmarks.timing import median_ratio

DEFAULT, LOOP = "host_precomputed sorted", "cuBLAS loop"
# Between 24 and 300 problems with sides from 24 to 1024, and a list of large ones.
RANDOM = ("cutlass_24", "random_24", "random_79", "random_150", "random_300")
LARGE = ("big_8",)


def check(records: Iterable[Mapping]) -> list[Bar]:
    """All bars, from the records of lists."""
    ratios = {
        record["list"]: median_ratio(record["us"][LOOP], record["us"][DEFAULT])
        for record in records
        if "list" in record and {LOOP, DEFAULT} <= record["us"].keys()
    }
    return [_mean(ratios), _large(ratios), _cutlass()]


def _mean(ratios: Mapping[str, float]) -> Bar:
    bar = 1.5
    found = {name: ratios[name] for name in RANDOM if name in ratios}
    findings = []
    if found:
        mean = geometric_mean(found.values())
        each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found.items())
        findings.append(Finding(f"{len(found)} lists", mean / bar, f"{mean:.3f} ({each})"))
    missing = [name for name in RANDOM if name not in found]
    return Bar("lists, random, over a cuBLAS loop", f">= {bar} on average", findings, missing)


def _large(ratios: Mapping[str, float]) -> Bar:
    bar = 0.97
    findings = [
        Finding(name, ratios[name] / bar, f"{ratios[name]:.3f}") for name in LARGE if name in ratios
    ]
    missing = missing_cases(LARGE, findings)
    return Bar("lists, large, over a cuBLAS loop", f">= {bar}", findings, missing)


def _cutlass() -> Bar:
    return Bar("lists, over CUTLASS's grouped kernels", ">= 1", (), ("no benchmark builds them",))
