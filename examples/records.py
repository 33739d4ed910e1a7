"""Writes the table of the recorded runs into examples/README.md, and draws their losses.

python -m examples.records            # after a new record by examples.pretrain_moe --output
python -m examples.records --check    # returns 1 if the table differs from the records
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import tables
from benchmarks.records_by_topic import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent / "README.md"
HEADER = ("options", "GPUs", "ms a step", "TFLOP/s a GPU", "MFU", "JAX", "commit")


def runs() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields each record with its only case, runs on fewer devices first."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    for record in sorted(records, key=lambda record: record["cases"][0]["devices"]):
        (case,) = record["cases"]
        yield record, case


def speeds() -> str:
    """Returns the table of speeds, with a row for each record."""
    rows = []
    for record, case in runs():
        ours, kind = case["peers"]["ours"], record["device"].removeprefix("NVIDIA ")
        rows.append(
            [
                f"`{case['case']}`" if case["case"] else "bfloat16",
                f"{case['devices']} {kind}",
                f"{ours['median_us'] / 1e3:.0f}",
                f"{ours['tflops']:.0f}",
                f"{ours['mfu']:.0%}".replace("%", " %"),
                record["machine"]["packages"]["jax"],
                record["commit"],
            ]
        )
    return table(HEADER, rows)


def losses() -> Figure:
    """Returns a picture of the losses of runs with all layers of the preset and trained routers."""
    from benchmarks.pictures import PALETTE, WIDTH, plt

    figure, axes = plt.subplots(figsize=(WIDTH, 4), layout="constrained")
    trained = [
        case
        for _, case in runs()
        if "--layers" not in case["case"] and not case["shape"]["balanced"]
    ]
    for case, color in zip(trained, PALETTE, strict=False):
        curve = case["peers"]["ours"]["losses"]
        style = "-" if case["devices"] == 1 else "--"
        steps = range(1, len(curve) + 1)
        axes.plot(steps, curve, style, color=color, label=case["case"] or "bfloat16")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend()
    return figure


PICTURES = {"pretraining": losses}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.records",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    check = parser.parse_args(arguments).check
    page = tables.filled(PAGE.read_text(), {"pretraining": speeds})
    found = tables.differences(PAGE, page)
    print("\n".join(found) or "nothing differs")
    if not check:
        from benchmarks.pictures import DPI, IMAGES

        PAGE.write_text(page)
        for name, picture in PICTURES.items():
            picture().savefig(IMAGES / f"{name}.png", dpi=DPI)
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
