"""Writes and reads files of results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.measure import merge


def save(results: Mapping, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(dumps(without_absent_peers(results)) + "\n")
    partial.replace(path)


def without_absent_peers(results: Mapping) -> Mapping:
    """Returns results without peers that were not installed, and with a note if there were any."""
    cases = [
        case | {"peers": {name: peer for name, peer in case["peers"].items() if not absent(peer)}}
        for case in results.get("cases", ())
    ]
    if cases == results.get("cases", cases):
        return results
    return results | {"excerpt": "without peers that were not installed", "cases": cases}


def absent(peer: Mapping) -> bool:
    return peer.get("reason", "").endswith("is not installed")


def dumps(value, levels: int = 4, indent: str = "") -> str:
    """Returns JSON in which the outermost `levels` dicts and lists have a line for each item. With
    the default, each peer's record is one line."""
    is_dict = isinstance(value, dict)
    nested = is_dict or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
    if levels == 0 or not value or not nested:
        return json.dumps(_rounded(value), separators=(",", ":"))
    inner = indent + " "
    items = [
        (f"{json.dumps(key)}: " if is_dict else "") + dumps(item, levels - 1, inner)
        for key, item in (value.items() if is_dict else enumerate(value))
    ]
    opening, closing = "{}" if is_dict else "[]"
    lines = ",\n".join(inner + item for item in items)
    return f"{opening}\n{lines}\n{indent}{closing}"


def load(paths: Sequence[Path]) -> dict:
    """Returns the results of files as one. Values of a whole run come from the first file.

    If several files have a case, the first file's times stay, and later files add peers (`merge`).
    """
    whole: dict = {}
    cases: dict[tuple, dict] = {}
    for path in paths:
        results = json.loads(path.read_text())
        if "cases" not in results:
            continue  # the file has the tiles that a sweep found for a peer
        whole = results | whole
        for record in results["cases"]:
            # Cases of other dtypes may have the same names.
            key = tuple(record.get(name) for name in ("case", "dtype", "precision"))
            cases[key] = merge(cases[key], record) if key in cases else record
    return whole | {"cases": list(cases.values())}


def _rounded(value):
    """Rounds every float to five digits, because times vary in the fourth."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
