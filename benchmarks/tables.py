"""Writes the recorded results into README.md, docs/ and results/README.md.

python -m benchmarks.tables            # after new records
python -m benchmarks.tables --check    # returns 1 if a page and the records differ

A region of a page begins with `<!-- records: NAME -->` and ends with `<!-- end of records -->`. Its
text is `quotes.QUOTES[NAME]`. A text of several lines stands on separate lines. A text of one line
is part of a sentence, and its region may not begin a line, because this would end the paragraph.
"""

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import quotes
from benchmarks.harness.command import parser_of

ROOT = Path(__file__).parents[1]
# The pages that may have regions.
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
INDEX = ROOT / "benchmarks" / "results" / "README.md"
REGION = re.compile(r"(<!-- records: (\w+) -->)(.*?)(<!-- end of records -->)", re.DOTALL)


def filled(page: str, texts: Mapping[str, Callable[[], str]]) -> str:
    """Returns a page with new texts in its regions."""

    def region(match: re.Match) -> str:
        begin, name, _, end = match.groups()
        text = texts[name]()
        between = f"\n{text}\n" if "\n" in text else text
        return begin + between + end

    return REGION.sub(region, page)


def index(folder: Path) -> str:
    """Returns a page with the cases, commit, device and command of each record."""
    rows = []
    for path in sorted(folder.glob("*.json")):
        results = json.loads(path.read_text())
        if "cases" not in results:
            continue
        what = ", ".join(dict.fromkeys(case["op"] for case in results["cases"]))
        note = f"; {results['excerpt']}" if "excerpt" in results else ""
        rows.append(
            [
                f"`{path.name}`",
                f"{len(results['cases'])}: {what}{note}",
                results["commit"] or "not recorded",
                results["device"],
                f"`{results['command']}`" if results["command"] else "not recorded",
            ]
        )
    return "\n".join(
        [
            "# Recorded results",
            "",
            "`python -m benchmarks.tables` writes this page. Records that newer ones have replaced",
            "are in git's history. Some peers leave their tiles to the caller: `*_configs.json`",
            "has the tiles with which these peers were fastest.",
            "",
            quotes.table(["record", "cases", "commit", "device", "command"], rows),
        ]
    )


def pages() -> dict[Path, str]:
    return {
        **{page: filled(page.read_text(), quotes.QUOTES) for page in PAGES},
        INDEX: index(INDEX.parent) + "\n",
    }


def differences(path: Path, wanted: str) -> list[str]:
    found = path.read_text() if path.exists() else ""
    name = str(path.relative_to(ROOT))
    return list(
        difflib.unified_diff(
            found.splitlines(), wanted.splitlines(), name, "from the records", lineterm="", n=0
        )
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.tables", __doc__)
    parser.add_argument("--check", action="store_true", help="print differences, write nothing")
    check = parser.parse_args(arguments).check
    found = []
    for path, wanted in pages().items():
        found += differences(path, wanted)
        if not check:
            path.write_text(wanted)
    print("\n".join(found) or "nothing differs")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
