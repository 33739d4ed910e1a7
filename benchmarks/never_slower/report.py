"""Counts the slow cases in records, and says which peers count.

A peer counts if it takes the same operands and returns the same result: `jax.lax.ragged_dot`,
PyTorch's grouped product of 16-bit operands, an expression whose result is the update's triangle
and zeros or an exactly symmetric sum, and for lists, whose sizes are static, a loop of cuBLAS.

Other peers are reported separately: a loop of one cuBLAS call for each group, and PyTorch's grouped
product of float32, which need the sizes on the host; and `A@A.T`, whose other triangle is neither
zero nor an exact mirror image.
"""

from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness.peer import Role
from benchmarks.harness.report import table
from benchmarks.never_slower.cases import UNMASKED
from benchmarks.never_slower.shapes import LISTS

BAR = 0.98


def counts(record: Mapping, name: str) -> bool:
    role = record["peers"].get(name, {}).get("role")
    if name == UNMASKED:
        return False
    return role == Role.GROUPED or (role == Role.LOOP and record["op"] in LISTS)


def stands_beside(record: Mapping, name: str) -> bool:
    """Returns whether a peer's ratio is reported, although the peer does not count."""
    role = record["peers"].get(name, {}).get("role")
    return role in (Role.GROUPED, Role.LOOP) and not counts(record, name)


def worst_ratio(
    record: Mapping, chosen: Callable[[Mapping, str], bool] = counts
) -> tuple[float, str] | None:
    """Returns the ratio of the fastest of the chosen peers, and its name."""
    found = [(ratio, name) for name, ratio in record["ratios"].items() if chosen(record, name)]
    return min(found, default=None)


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Returns, for each operation, the numbers of cases and of cases under the bar, the worst and
    the median ratio; with a prefix, also for the peers that do not count."""
    result: dict[str, dict[str, float]] = {}
    for op in dict.fromkeys(record["op"] for record in records):
        of_op = [record for record in records if record["op"] == op]
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
    """Returns the summary, cases under the bar, and peers that were wrong or failed."""
    records, summary = results["cases"], results["summary"]
    columns = dict.fromkeys(name for row in summary.values() for name in row)
    rows = [[op, *(f"{row.get(name, 0):g}" for name in columns)] for op, row in summary.items()]
    return [
        table(["op", *columns], rows),
        _titled("Under the bar", _slow(records, counts)),
        _titled("Under it, next to peers that do not count", _slow(records, stands_beside)),
        _titled(
            "Wrong or failed",
            [
                f"{record['case']} {name} {peer['status']}: {peer.get('reason', '')}"
                for record in records
                for name, peer in record["peers"].items()
                if peer["status"] in ("wrong", "failed")
            ],
        ),
    ]


def short(record: dict) -> dict:
    """Returns a record without skipped variants, and without rounds if no peer is faster."""
    peers = {
        name: peer
        for name, peer in record["peers"].items()
        if (peer["role"], peer["status"]) != (Role.VARIANT, "skipped")
    }
    if min(record["ratios"].values(), default=0) >= BAR:
        peers = {
            name: {key: value for key, value in peer.items() if key not in ("us", "kernels")}
            for name, peer in peers.items()
        }
    return record | {"peers": peers}


def _titled(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}: {len(lines)}", *lines]) if lines else ""


def _slow(records: Sequence[Mapping], chosen: Callable[[Mapping, str], bool]) -> list[str]:
    found = []
    for record in records:
        worst = worst_ratio(record, chosen)
        if worst and worst[0] < BAR:
            others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in record["ratios"].items())
            us = record["peers"]["ours"]["median_us"]
            found.append((worst[0], f"{worst[0]:.2f} {record['case']} {us:.1f} us: {others}"))
    return [line for _, line in sorted(found)]
