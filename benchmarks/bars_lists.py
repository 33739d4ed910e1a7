"""What is asked of lists of unequal products, against cuBLAS and CUTLASS's grouped kernels.

A record of a list has its name as `list`, and in `us` the times of each variant, round by round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.bar import Bar, Finding, missing_cases
from benchmarks.harness.measure import geometric_mean
from benchmarks.harness.timing import median_ratio

DEFAULT, LOOP, CUTLASS = "host_precomputed sorted", "cuBLAS loop", "CUTLASS "
# CUTLASS's own example, in the layout that its notes on sorting discuss.
EXAMPLE = "four"
# Between 24 and 300 problems with sides from 24 to 1024, and a list of large ones.
RANDOM = ("cutlass_24", "random_24", "random_79", "random_150", "random_300")
LARGE = ("big_8",)


def check(records: Iterable[Mapping]) -> list[Bar]:
    """All bars, from the records of lists."""
    times = {
        record["list"]: record["us"]
        for record in records
        if "list" in record and DEFAULT in record["us"]
    }
    ratios = {name: median_ratio(us[LOOP], us[DEFAULT]) for name, us in times.items() if LOOP in us}
    return [_mean(ratios), _large(ratios), _cutlass(times)]


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


def _cutlass(times: Mapping[str, Mapping[str, Sequence[float]]]) -> Bar:
    """The fastest of CUTLASS's kernels on each list, whichever that is."""
    findings = []
    for name, us in times.items():
        found = {
            other: median_ratio(us[other], us[DEFAULT]) for other in us if other.startswith(CUTLASS)
        }
        if found:
            fastest = min(found, key=found.get)
            findings.append(Finding(name, found[fastest], f"{found[fastest]:.3f} of {fastest}"))
    missing = missing_cases((EXAMPLE, *RANDOM, *LARGE), findings)
    return Bar("lists, over CUTLASS's grouped kernels", ">= 1 of the fastest", findings, missing)
