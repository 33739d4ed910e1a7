"""One thing that is asked of the kernels, and how results compare with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One case against one bar: `margin` is at least one if it is cleared."""

    case: str
    margin: float
    text: str


@dataclass(frozen=True)
class Bar:
    """What is asked, and what the results say. Without findings nothing was measured."""

    name: str
    target: str
    findings: Sequence[Finding]
    # Cases that it is asked of and that no result covers.
    missing: Sequence[str] = ()

    @property
    def cleared(self) -> bool | None:
        """Whether all cases clear the bar; None without a measurement."""
        return all(f.margin >= 1 for f in self.findings) if self.findings else None

    @property
    def worst(self) -> Finding:
        """The case with the least margin."""
        return min(self.findings, key=lambda finding: finding.margin)

    def lines(self) -> list[str]:
        """The verdict with the worst case, then every case that misses, then what is missing."""
        verdict = {True: "pass", False: "FAIL", None: "not measured"}[self.cleared]
        if self.cleared and self.missing:
            verdict = "incomplete"
        head = f"{verdict:12}  {self.name}: {self.target}"
        missing = [f"{'':14}missing: {', '.join(self.missing)}"] if self.missing else []
        if not self.findings:
            return [head, *missing]
        missed = [f for f in self.findings if f.margin < 1]
        passed = len(self.findings) - len(missed)
        head += f"; {passed} of {len(self.findings)}, worst {self.worst.case} {self.worst.text}"
        listed = [
            f"{'':14}{finding.case} {finding.text}"
            for finding in sorted(missed, key=lambda finding: finding.margin)
        ]
        return [head, *listed, *missing]


def missing_cases(wanted: Sequence[str], findings: Sequence[Finding]) -> list[str]:
    """Those of the wanted cases that no finding is about."""
    found = {finding.case for finding in findings}
    return [case for case in wanted if case not in found]
