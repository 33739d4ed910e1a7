"""What the records say: who counts, how many cases are slow, and which ways were not taken.

Held against the bar is what takes the same operands and returns the same: `jax.lax.ragged_dot`,
PyTorch's grouped product of 16-bit operands, an expression whose result is the update's triangle
with zeros beside it or an exactly symmetric sum, and for lists, whose sizes are static, a loop of
cuBLAS.

Told beside it: a loop of one cuBLAS call a group, which has to know on the host what a device
computed, and whose gaps between kernels are left out of its time; PyTorch's grouped product of
float32, which is such a loop; and `A@A.T` as it is, whose result has neither zeros in the other
triangle nor, by any promise, its exact mirror image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness.peer import Role
from benchmarks.never_slower.cases import UNMASKED
from benchmarks.never_slower.shapes import LISTS

BAR = 0.98
# A variant that takes less of our time is worth a look.
WORTH_IT = 0.95
AGAIN = "again"
# Of a peer, what tells why ours is slower.
ONLY_OF_SLOW = ("us", "kernel_names", "kernels", "kernels_vary", "prepare_s")


def counts(record: Mapping, name: str) -> bool:
    """Whether a peer is held against the bar."""
    role = record["peers"].get(name, {}).get("role")
    if name == UNMASKED:
        return False
    return role == Role.GROUPED or (role == Role.LOOP and record["op"] in LISTS)


def stands_beside(record: Mapping, name: str) -> bool:
    """Whether a peer's ratio is told without being held against the bar."""
    role = record["peers"].get(name, {}).get("role")
    return role in (Role.GROUPED, Role.LOOP) and not counts(record, name)


def worst_ratio(
    record: Mapping, chosen: Callable[[Mapping, str], bool] = counts
) -> tuple[float, str] | None:
    """The ratio of the fastest of the chosen peers, and its name."""
    found = [(ratio, name) for name, ratio in record["ratios"].items() if chosen(record, name)]
    return min(found, default=None)


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Of each operation: how many cases, how many under the bar, the worst and the median.

    The same beside it, of those that do not count.
    """
    result: dict[str, dict[str, float]] = {}
    first = [record for record in records if AGAIN not in record]
    for op in dict.fromkeys(record["op"] for record in first):
        of_op = [record for record in first if record["op"] == op]
        row: dict[str, float] = {"measured": len(of_op)}
        for prefix, chosen in (("", counts), ("beside_", stands_beside)):
            found = [worst_ratio(record, chosen) for record in of_op]
            ratios = sorted(each[0] for each in found if each)
            if ratios:
                row |= {
                    f"{prefix}cases": len(ratios),
                    f"{prefix}under_{BAR}": sum(ratio < BAR for ratio in ratios),
                    f"{prefix}worst": ratios[0],
                    f"{prefix}median": ratios[len(ratios) // 2],
                }
        result[op] = row
    return result


def texts(results: Mapping) -> list[str]:
    """The summary, cases under the bar, faster ways that the plan left, and what was repeated."""
    records = results["cases"]
    first = [record for record in records if AGAIN not in record]
    return [
        _summary_table(results["summary"]),
        _titled("Under the bar", _slow(first, counts)),
        _titled("Under it beside those that do not count", _slow(first, stands_beside)),
        _titled("Ways not taken that were faster", _faster_variants(first)),
        _titled("Wrong or failed", _not_right(records)),
        _titled("Compiled again on a quiet machine: ratio before, and then", _repeated(records)),
    ]


def short(record: dict) -> dict:
    """A record without the variants that do not exist, and where none is faster, without rounds."""
    peers = {
        name: peer
        for name, peer in record["peers"].items()
        if (peer["role"], peer["status"]) != (Role.VARIANT, "skipped")
    }
    if min(record["ratios"].values(), default=0) >= BAR:
        peers = {
            name: {key: value for key, value in peer.items() if key not in ONLY_OF_SLOW}
            for name, peer in peers.items()
        }
    return record | {"peers": peers}


def _summary_table(summary: Mapping[str, Mapping[str, float]]) -> str:
    columns = ("cases", f"under_{BAR}", "worst", "median")
    names = [f"{prefix}{column}" for prefix in ("", "beside_") for column in columns]
    titles = ["cases", "under", "worst", "median", "beside", "under", "worst", "median"]
    lines = [f"{'op':26}" + "".join(f"{title:>8}" for title in titles)]
    for op, row in summary.items():
        lines.append(f"{op:26}" + "".join(_cell(row.get(name)) for name in names))
    counted = *names[:2], *names[4:6]
    whole = [sum(row.get(name, 0) for row in summary.values()) for name in counted]
    lines.append("in all: {} cases, {} under; beside: {}, {} under".format(*whole))
    return "\n".join(lines)


def _cell(value: float | None) -> str:
    if value is None:
        return f"{'-':>8}"
    return f"{value:8}" if isinstance(value, int) else f"{value:8.2f}"


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}: {len(lines)}", *lines]) if lines else ""


def _line(record: Mapping) -> str:
    others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in record["ratios"].items())
    return f"{record['case']} {record['peers']['ours']['median_us']:.1f} us: {others}"


def _slow(records: Sequence[Mapping], chosen: Callable[[Mapping, str], bool]) -> list[str]:
    found = [
        (worst, record)
        for record in records
        if (worst := worst_ratio(record, chosen)) and worst[0] < BAR
    ]
    found.sort(key=lambda each: each[0])
    return [f"{worst[0]:.2f} {_line(record)}" for worst, record in found]


def _faster_variants(records: Sequence[Mapping]) -> list[str]:
    """Ways of ours that compute the same, and more of it, in less time."""
    found = []
    for record in records:
        for name, ratio in record["ratios"].items():
            peer = record["peers"][name]
            if peer["role"] == Role.VARIANT and ratio < WORTH_IT:
                us = record["peers"]["ours"]["median_us"]
                line = f"{ratio:.2f} {record['case']} {us:.1f} us, {name} {peer['median_us']:.1f}"
                found.append((ratio, f"{line} {peer.get('detail', '')}".rstrip()))
    return [line for _, line in sorted(found)]


def _not_right(records: Sequence[Mapping]) -> list[str]:
    return [
        f"{record['case']} {name} {peer['status']}: {peer.get('reason', '')}"
        for record in records
        for name, peer in record["peers"].items()
        if peer["status"] in ("wrong", "failed")
    ]


def _kernels_differ(before: Mapping, after: Mapping, name: str) -> bool:
    """Whether a peer's program has other kernels; unknown of a case that kept no names."""
    names = [record["peers"].get(name, {}).get("kernel_names") for record in (before, after)]
    return None not in names and names[0] != names[1]


def _repeated(records: Sequence[Mapping]) -> list[str]:
    by_name = {record["case"]: record for record in records}
    lines = []
    for record in records:
        before = by_name.get(record.get(AGAIN))
        worst = worst_ratio(before) if before else None
        if worst and worst[1] in record["ratios"]:
            after = record["ratios"][worst[1]]
            changed = [name for name in ("ours", worst[1]) if _kernels_differ(before, record, name)]
            line = f"{before['case']} {worst[1]}: {worst[0]:.2f} {after:.2f}"
            lines.append(", other kernels: ".join([line, *filter(None, [" ".join(changed)])]))
    return lines
