"""Targets of the kernels' speed or accuracy, and their comparison with results."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.measure import best_grouped, geometric_mean

# The ratios that `over_best_or_dense` requires.
GROUPED_RATIO, DENSE_RATIO = 1.05, 0.97

Record = Mapping
# Returns a number of a record and a text for it, or None if the record has no such number. The
# second argument has all records of the same results.
Value = Callable[[Record, Sequence[Record]], tuple[float, str] | None]


@dataclass(frozen=True)
class Target:
    """A target, which is a row of the table.

    Attributes:
      name: name of the target.
      applies: returns whether the target is about a record.
      value: returns the value of a record that is compared with the bound.
      bound: the bound for all records, or a function that returns the bound for a record.
      wanted: cases that have to be measured.
      at_most: whether the bound is an upper bound; by default it is a lower bound.
      mean: whether the bound is for the geometric mean of the values, and not for each value.
      of: text after the bound; or the whole rule, if it begins with <= or >=.
    """

    name: str
    applies: Callable[[Record], bool]
    value: Value
    bound: float | Callable[[Record], float]
    wanted: Sequence[str] = ()
    at_most: bool = False
    mean: bool = False
    of: str = ""

    def check(self, records: Sequence[Record]) -> Verdict:
        found = [
            (record, *value)
            for record in records
            if self.applies(record) and (value := self.value(record, records)) is not None
        ]
        names = {record["case"] for record, *_ in found}
        missing = [case for case in self.wanted if case not in names]
        if self.mean and found:
            mean = geometric_mean(value for _, value, _ in found)
            found = [({"case": f"{len(found)} cases"}, mean, f"{mean:.3f}")]
        return Verdict(self, [Finding(r["case"], self._margin(v, r), t) for r, v, t in found],
                       missing)  # fmt: skip

    def _margin(self, value: float, record: Record) -> float:
        bound = self.bound(record) if callable(self.bound) else self.bound
        if value != value:
            return 0.0
        return bound / max(value, 1e-30) if self.at_most else value / bound


@dataclass(frozen=True)
class Finding:
    """The comparison of a case with a target, which is met if `margin` is at least one."""

    case: str
    margin: float
    text: str


@dataclass(frozen=True)
class Verdict:
    """The comparison of results with a target. Without findings nothing was measured."""

    target: Target
    findings: Sequence[Finding]
    missing: Sequence[str]  # wanted cases without a result

    @property
    def met(self) -> bool | None:
        """Whether all cases meet the target, None without a measurement."""
        return all(f.margin >= 1 for f in self.findings) if self.findings else None

    def lines(self) -> list[str]:
        """Returns a line with the worst case, then all cases that fail, then missing cases."""
        target = self.target
        word = {True: "pass", False: "FAIL", None: "not measured"}[self.met]
        if self.met and self.missing:
            word = "incomplete"
        asked = target.of
        if not callable(target.bound) and not asked.startswith(("<=", ">=")):
            sign, mean = "<=" if target.at_most else ">=", "on average" if target.mean else ""
            asked = " ".join(filter(None, (sign, f"{target.bound:g}", mean, target.of)))
        head = f"{word:12}  {target.name}: {asked}"
        missing = [f"{'':14}missing: {', '.join(self.missing)}"] if self.missing else []
        if not self.findings:
            return [head, *missing]
        ordered = sorted(self.findings, key=lambda finding: finding.margin)
        missed = [f for f in ordered if f.margin < 1]
        passed = len(ordered) - len(missed)
        head += f"; {passed} of {len(ordered)}, worst {ordered[0].case} {ordered[0].text}"
        return [head, *(f"{'':14}{f.case} {f.text}" for f in missed), *missing]


# Values of a record that targets compare.


def over(*others: str) -> Value:
    """Returns a value: the ratio to the fastest of the peers with these names or patterns."""

    def value(record, records):
        found = [
            (ratio, name)
            for name, ratio in record["ratios"].items()
            if any(fnmatch.fnmatchcase(name.lower(), other.lower()) for other in others)
        ]
        return (min(found)[0], "{:.3f} of {}".format(*min(found))) if found else None

    return value


def of_ours(key: str, text: str) -> Value:

    def value(record, records):
        found = ours(record).get(key)
        return found and (found, text.format(found))

    return value


def over_best(record, records):
    best = best_grouped(record)
    return best and (best[1], f"{best[1]:.3f} of {best[0]}")


def over_best_or_dense(record, records):
    """Returns the larger of the ratios to the fastest grouped peer and to dense cuBLAS, each over
    the ratio that is required."""
    best, dense = best_grouped(record), record["ratios"].get("cublas_dense")
    found = [best[1] / GROUPED_RATIO] if best else []
    found += [dense / DENSE_RATIO] if dense is not None else []
    if not found:
        return None
    first = f"{best[1]:.3f} of {best[0]}" if best else "no grouped peer"
    return max(found), first + (f", {dense:.3f} of dense" if dense is not None else "")


def of_uniform_time(record, records):
    """Returns the time for a useful FLOP over the time with groups of equal sizes."""
    uniform = f"{record['shape']['name']}/{record['op']}/uniform"
    found = [
        each for each in records if each["case"] == uniform and each["dtype"] == record["dtype"]
    ]
    speeds = [ours(each).get("tflops") for each in (*found, record)]
    if len(speeds) < 2 or None in speeds:
        return None
    return speeds[0] / speeds[-1], f"{speeds[0] / speeds[-1]:.3f}"


def without_communication(record, records):
    """Returns the speed of a layer on several devices over its speed without communication."""
    share = record.get("fractions", {}).get("ours")
    return share and (share, f"{share:.2f}, max/mean {record['max_over_mean']:.2f}")


def error(record, records):
    found = ours(record).get("error")
    return found and (found["total"], f"{found['total']:.1e}")


def error_over_cublas(record, records):
    """Returns our error over that of cuBLAS."""
    loop = record["peers"].get("cublas_loop", {}).get("error")
    if not loop or "error" not in ours(record):
        return None
    errors = ours(record)["error"]["total"], loop["total"]
    return errors[0] / max(errors[1], 1e-30), f"{errors[0]:.1e}, cuBLAS {errors[1]:.1e}"


def cosine_distance(record, records):
    """Returns the largest 1 - cosine of the angles to bfloat16's result and cotangents."""
    found = record.get("cosine_distance", {}).get("ours")
    return found and (max(found.values()), f"{max(found.values()):.1e}")


def loss_difference(record, records):
    """Returns the relative difference of FP8's held-out loss from bfloat16's."""
    ratio = record["loss_ratio"]
    return abs(ratio - 1), f"after {record['steps']} steps {ratio:.4f}"


def ours(record: Record) -> Mapping:
    return record["peers"].get("ours", {})
