"""One thing that is asked of the kernels, and how results compare with it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness.measure import best_grouped, geometric_mean

# The ratios that `over_best_or_dense` asks for.
GROUPED_RATIO, DENSE_RATIO = 1.05, 0.97

Record = Mapping
# A number of a record, and how to say it; None where the record has none. Other records of the same
# results are at hand.
Value = Callable[[Record, Sequence[Record]], tuple[float, str] | None]


@dataclass(frozen=True)
class Target:
    """A row of the table.

    Attributes:
      name: of the target.
      applies: which records it is about.
      value: what is compared, of one record.
      bound: the number, of one record or of all.
      wanted: cases that have to be measured.
      at_most: whether the value may be no larger than the bound, and not no smaller.
      mean: whether the geometric mean of the values counts, and not each.
      of: what else the reader has to know of the bound, after the number; or the whole rule.
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
    """One case against one target: `margin` is at least one if it is met."""

    case: str
    margin: float
    text: str


@dataclass(frozen=True)
class Verdict:
    """The verdict of results on a target. Without findings nothing was measured."""

    target: Target
    findings: Sequence[Finding]
    missing: Sequence[str]  # cases that are wanted and that no result covers

    @property
    def met(self) -> bool | None:
        """Whether all cases meet the target; None without a measurement."""
        return all(f.margin >= 1 for f in self.findings) if self.findings else None

    def lines(self) -> list[str]:
        """The verdict with the worst case, then every case that misses, then what is missing."""
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
    """The ratio to one other, or to the fastest of several, by their names or a pattern."""

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
    """Over what is asked of it: the ratio to the fastest grouped peer, or to cuBLAS's product."""
    best, dense = best_grouped(record), record["ratios"].get("cublas_dense")
    found = [best[1] / GROUPED_RATIO] if best else []
    found += [dense / DENSE_RATIO] if dense is not None else []
    if not found:
        return None
    first = f"{best[1]:.3f} of {best[0]}" if best else "no grouped peer"
    return max(found), first + (f", {dense:.3f} of dense" if dense is not None else "")


def of_uniform_time(record, records):
    """Time for a useful FLOP over that of groups of equal sizes."""
    uniform = f"{record['shape']['name']}/{record['op']}/uniform"
    found = [
        each for each in records if each["case"] == uniform and each["dtype"] == record["dtype"]
    ]
    speeds = [ours(each).get("tflops") for each in (*found, record)]
    if len(speeds) < 2 or None in speeds:
        return None
    return speeds[0] / speeds[-1], f"{speeds[0] / speeds[-1]:.3f}"


def without_communication(record, records):
    """The share of the speed without communication that a layer on several devices has."""
    share = record.get("fractions", {}).get("ours")
    return share and (share, f"{share:.2f}, max/mean {record['max_over_mean']:.2f}")


def error(record, records):
    found = ours(record).get("error")
    return found and (found["total"], f"{found['total']:.1e}")


def error_over_cublas(record, records):
    """Our error over that of cuBLAS."""
    loop = record["peers"].get("cublas_loop", {}).get("error")
    if not loop or "error" not in ours(record):
        return None
    errors = ours(record)["error"]["total"], loop["total"]
    return errors[0] / max(errors[1], 1e-30), f"{errors[0]:.1e}, cuBLAS {errors[1]:.1e}"


def cosine_distance(record, records):
    """The largest of the angles to bfloat16's result and cotangents."""
    found = record.get("cosine_distance", {}).get("ours")
    return found and (max(found.values()), f"{max(found.values()):.1e}")


def loss_difference(record, records):
    """The difference of FP8's held-out loss from bfloat16's."""
    ratio = record["loss_ratio"]
    return abs(ratio - 1), f"after {record['steps']} steps {ratio:.4f}"


def ours(record: Record) -> Mapping:
    return record["peers"].get("ours", {})
