"""Formats results as text: tables of times and of ratios, and the peers that did not run."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.harness.measure import best_grouped, geometric_mean
from benchmarks.harness.peer import Role


def timed(records: Sequence[Mapping]) -> list[Mapping]:
    """Returns the records of cases whose device time was measured."""
    return [record for record in records if "bytes" in record]


def by_peer(records: Iterable[Mapping]) -> list[tuple[Mapping, str, Mapping]]:
    """Returns (record, name of a peer, result of the peer) for each peer of each record."""
    return [(record, *peer) for record in records for peer in record["peers"].items()]


def texts(results: Mapping) -> list[str]:
    """Returns the whole report of results, first tables, then lines that explain them."""
    records = timed(results["cases"])
    return [
        *([times_table(records), ratios_table(records)] if records else []),
        variants_table(records),
        parts_table(records),
        summary_lines(records),
        error_lines(records),
        missing_lines(results["cases"]),
    ]


def times_table(records: Sequence[Mapping]) -> str:
    """Returns median device microseconds, with a row for each case and a column for each peer."""
    beside = (None, Role.BANDWIDTH, Role.VARIANT)
    found = by_peer(records)
    names = dict.fromkeys(name for _, name, peer in found if peer.get("role") not in beside)
    rows = [
        [
            record["case"],
            *(number(record["peers"].get(name, {}).get("median_us")) for name in names),
        ]
        for record in records
    ]
    return table(["device us", *names], rows)


def ratios_table(records: Sequence[Mapping]) -> str:
    """Returns the ratios of other times over ours. Above one, we are faster."""
    columns = {
        "vs loop": "cublas_loop",
        "vs dense": "cublas_dense",
        "vs bytes": "byte_floor",
        "vs write": "write_floor",
        "of floor": "floor",
        "vs stock": "stock",
    }
    rows = []
    for record in records:
        ours, found = record["peers"].get("ours", {}), dict(record["ratios"])
        best, ratio = best_grouped(record) or ("-", None)
        if 2 * record.get("written_bytes", 0) <= record["bytes"]:
            found.pop("write_floor", None)
        rows.append(
            [
                record["case"],
                number(ours.get("median_us")),
                number(ours.get("tflops")),
                _ratio(ratio),
                best,
                *(_ratio(found.get(name)) for name in columns.values()),
                str(ours.get("kernels", "-")),
                number(ours.get("enqueue_us")),
                number(ours.get("wall_us")),
            ]
        )
    header = ["case", "us", "TFLOP/s", "vs best", "best grouped peer", *columns]
    return table([*header, "kernels", "host us", "wall us"], rows)


def variants_table(records: Sequence[Mapping]) -> str:
    """Returns times of variants, their ratios to ours, and descriptions; "" without variants."""
    rows = [
        [record["case"], name, number(peer["median_us"]), _ratio(record["ratios"].get(name)),
         peer.get("detail", "")]
        for record, name, peer in by_peer(records)
        if peer.get("role") == Role.VARIANT and "median_us" in peer
    ]  # fmt: skip
    return table(["case", "variant", "us", "over ours", "what"], rows) if rows else ""


def parts_table(records: Sequence[Mapping]) -> str:
    """Returns microseconds of each part of the calls that have parts; "" without such calls."""
    found = [
        (record["case"], name, peer["parts_us"])
        for record, name, peer in by_peer(records)
        if "parts_us" in peer
    ]
    parts = list(dict.fromkeys(part for *_, us in found for part in us))
    rows = [[case, name, *(number(us.get(part)) for part in parts)] for case, name, us in found]
    return table(["kernels, us", "peer", *parts], rows) if parts else ""


def case_line(record: Mapping) -> str:
    """Returns a short text about a case, for the progress of a run."""
    if "bytes" not in record:
        return record["case"]
    ours = record["peers"].get("ours", {})
    line = f"{record['case']}: {number(ours.get('median_us'))} us"
    best = best_grouped(record)
    return f"{line}, {_ratio(best[1])} vs {best[0]}" if best else line


def summary(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Returns, for each op that was timed, geometric mean and minimum of the tables' ratios."""
    records = timed(records)
    result = {}
    for op in dict.fromkeys(record["op"] for record in records):
        of_op = [record for record in records if record["op"] == op]
        found = by_peer(of_op)
        grouped = dict.fromkeys(name for _, name, x in found if x.get("role") == Role.GROUPED)
        columns = {
            "best_grouped": [best[1] for record in of_op if (best := best_grouped(record))],
            **{
                name: [record["ratios"][name] for record in of_op if name in record["ratios"]]
                for name in (*grouped, "cublas_loop", "cublas_dense", "floor")
            },
        }
        result[op] = {
            f"{name}_{kind}": function(values)
            for name, values in columns.items()
            if values
            for kind, function in (("geomean", geometric_mean), ("min", min))
        }
    return result


def summary_lines(records: Sequence[Mapping]) -> str:
    return "\n".join(
        f"{op}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        for op, values in summary(records).items()
        if values
    )


def missing_lines(records: Sequence[Mapping]) -> str:
    """Returns the reasons for which peers were not measured, each with its cases."""
    reasons: dict[str, list[str]] = {}
    for record, name, peer in by_peer(records):
        if peer["status"] != "measured":
            reason = f"{name} {peer['status']}: {peer.get('reason', '')}"
            reasons.setdefault(reason, []).append(record["case"])
    return "\n".join(f"{x} [{_some(cases, len(records))}]" for x, cases in reasons.items())


def unmeasured_line(cases: Sequence[str]) -> str:
    """Returns some of the measurements that a time limit left out; the results file has all."""
    return f"out of time for {len(cases)} measurements: {_some(cases)}" if cases else ""


def error_lines(records: Sequence[Mapping]) -> str:
    """Returns the largest relative error of each peer over all cases, and its case."""
    errors: dict[str, list[tuple[float, str]]] = {}
    for record, name, peer in by_peer(records):
        if "error" in peer:
            errors.setdefault(name, []).append((peer["error"]["total"], record["case"]))
    return "\n".join(
        "{}: largest relative error {:.1e} ({})".format(name, *max(found))
        for name, found in errors.items()
    )


def _some(cases: Sequence[str], total: int = 0, shown: int = 4) -> str:
    if len(cases) == total:
        return "all cases"
    more = f" and {len(cases) - shown} more" if len(cases) > shown else ""
    return ", ".join(cases[:shown]) + more


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in (header, *rows)
    )
