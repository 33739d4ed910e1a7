"""Everything at once, for hours' worth of accidents in minutes: products under fire.

python -m benchmarks.soak --output soak.json

Thousands of random products of all operations, dtypes and sizes, compared with float64 or, bit for
bit, with a first run; the same in four threads, on streams of their own, in recorded graphs whose
sizes change, with little memory left, beside another process and beside collectives; our custom
calls with buffers and attributes that do not fit; exported programs of other versions. The records
are counts. It ends with an error if anything was wrong.

python -m benchmarks.soak --sanitizer memcheck --output soak_memcheck.json

Nothing but the custom calls under compute-sanitizer: every call as it is and some that do not fit,
each array in an allocation of its own, and XLA compiling in one thread, because the sanitizer
crashes while several compile.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.command import Command
from benchmarks.harness.peer import on_gpu
from benchmarks.harness.session import Job, Session, leave_memory_to_torch
from benchmarks.soak import exports, handlers, sanitizer
from benchmarks.soak.products import Products, soak
from benchmarks.soak.surroundings import SURROUNDINGS

PARTS = ("products", *SURROUNDINGS, "handlers", "exports")
# Shares of the time limit, whatever else there is.
SHARES = {"products": 0.5, "handlers": 0.2, "sanitizer": 0.8}
MEMORY_OF_HANDLERS = "0.08"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much of it."""
    parser.add_argument("--products", type=int, default=10_000, help="random products to run")
    parser.add_argument("--draws", type=int, default=6, help="different sizes of each program")
    parser.add_argument("--repeats", type=int, default=5, help="runs of the same sizes")
    parser.add_argument("--witnesses", type=int, default=40, help="programs for the surroundings")
    parser.add_argument("--misfits", type=int, default=600, help="calls that do not fit")
    parser.add_argument(
        "--most", type=int, default=700, help="largest k and n; rows are twice that"
    )
    parser.add_argument(
        "--sanitizer",
        choices=sanitizer.TOOLS,
        help=f"run only the handlers under this tool, {sanitizer.MISFITS} misfits at most",
    )
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")


def complete(options: argparse.Namespace) -> None:
    """A dry run has few of everything."""
    if options.dry_run:
        options.products, options.draws, options.repeats = 42, 2, 1
        options.witnesses, options.misfits, options.most = 4, 30, 48
    if options.sanitizer:
        options.only = ["handlers"]
        options.misfits = min(options.misfits, sanitizer.MISFITS)


def record(name: str, counts: Mapping[str, Any], failures: Sequence[str], start: float) -> dict:
    """A record of one part."""
    return {
        "case": f"soak/{name}",
        "shape": {"name": "any"},
        "op": name,
        "counts": dict(counts),
        "failures": list(failures),
        "seconds": time.monotonic() - start,
        "peers": {},
        "ratios": {},
    }


class Soak:
    """The products that the other parts run again."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self._products: Products | None = None

    def products(self) -> dict:
        """Many products; a part that needs some runs this first."""
        start, options = time.monotonic(), self.options
        self._products = soak(
            seed=options.seed,
            count=options.products,
            draws=options.draws,
            repeats=options.repeats,
            seconds=SHARES["products"] * options.time_limit,
            implementation="cuda" if on_gpu() else "xla",
            most=options.most,
        )
        return record("products", self._products.record(), self._products.failures(), start)

    def surroundings(self, name: str, run: Callable) -> dict:
        """A few of the products again."""
        if self._products is None:
            self.products()
        assert self._products is not None
        start, before = time.monotonic(), len(self._products.failures())
        counts = run(self._products.witnesses(self.options.witnesses))
        return record(name, counts, self._products.failures()[before:], start)


def call_handlers(options: argparse.Namespace) -> dict:
    """In a process of its own."""
    start = time.monotonic()
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["XLA_CLIENT_MEM_FRACTION"] = MEMORY_OF_HANDLERS
    limit = SHARES["sanitizer" if options.sanitizer else "handlers"] * options.time_limit
    command = [sys.executable, "-m", "benchmarks.soak.handlers", "--seed", str(options.seed)]
    command += ["--count", str(options.misfits), "--time-limit", str(limit)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "sanitizer.log"
        if options.sanitizer:
            command = [*sanitizer.prefix(options.sanitizer, log), *command, "--threads", "1"]
            environment |= sanitizer.environment(environment)
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, env=environment, timeout=2 * limit + 60
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        counts = handlers.summary(lines, done.returncode)
        if options.sanitizer:
            found, wrong = sanitizer.summary(log)
            counts |= {"sanitizer": options.sanitizer, **found}
            counts["failures"] += wrong
    return record("handlers", counts, counts.pop("failures"), start)


def call_exports() -> dict:
    """Of both versions."""
    start = time.monotonic()
    counts = exports.check()
    return record("exports", counts, counts.pop("failures"), start)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job a part."""
    parts = Soak(options)
    runs: dict[str, Callable[[], dict]] = {
        "products": parts.products,
        **{
            name: functools.partial(parts.surroundings, name, run)
            for name, run in SURROUNDINGS.items()
        },
        "handlers": functools.partial(call_handlers, options),
        "exports": call_exports,
    }
    return [
        Job(f"soak/{name}", runs[name], typical=False) for name in PARTS if name in options.only
    ]


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """How many products there were, and failures, of each part."""
    return {
        record["op"]: {
            "products": record["counts"].get("products", record["counts"].get("calls", 0)),
            "failures": len(record["failures"]),
        }
        for record in records
    }


def texts(results: Mapping) -> list[str]:
    """A line a part, and what was wrong."""
    lines = [f"{'part':18}{'seconds':>8}{'failures':>10}  counts"]
    failures = []
    for case in results["cases"]:
        counts = ", ".join(f"{k} {v}" for k, v in case["counts"].items() if isinstance(v, int))
        lines.append(f"{case['op']:18}{case['seconds']:8.1f}{len(case['failures']):10}  {counts}")
        failures += [f"{case['op']}: {failure}" for failure in case["failures"]]
    return ["\n".join(lines), "\n".join(failures)]


COMMAND = Command(
    "benchmarks.soak",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    complete=complete,
    timed=False,
    time_limit=540,
    summarize=summarize,
    texts=texts,
)


def main(arguments: Sequence[str] | None = None) -> dict:
    """Runs all parts; SystemExit if anything was wrong or could not be tried."""
    results = COMMAND.main(arguments)
    wrong = sum(len(case["failures"]) for case in results["cases"])
    if wrong or any("(" in label for label in results["not_measured"]):
        sys.exit(f"{wrong} failures, not run: {results['not_measured']}")
    return results


if __name__ == "__main__":
    leave_memory_to_torch()
    main()
