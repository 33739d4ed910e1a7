"""Runs random products under hostile conditions, and custom calls that do not fit.

python -m tests.stress                         # about nine minutes on a GPU
python -m tests.stress --only threads memory
python -m tests.stress --sanitizer memcheck    # only the custom calls

The part `products` runs thousands of random products of all operations, dtypes and sizes. It
compares first runs with float64, and later runs with the first run, bit for bit. Other parts repeat
some of these products in four threads, on two CUDA streams, in recorded graphs whose group sizes
change, with little memory left, next to another process, and next to collectives. The part
`handlers` makes our custom calls with buffers and attributes that do not fit. Each part prints its
counts and failures as a line of JSON. The exit status is 1 if anything was wrong.

With `--sanitizer`, only `handlers` runs, under compute-sanitizer. It makes each valid call and some
calls that do not fit. Each array has its own allocation. XLA compiles in one thread, because the
sanitizer crashes while several threads compile.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness.measure import first_line
from benchmarks.harness.peer import on_gpu
from benchmarks.harness.session import leave_memory_to_torch
from tests.stress import handlers, sanitizer
from tests.stress.products import Products, soak
from tests.stress.surroundings import SURROUNDINGS

PARTS = ("products", *SURROUNDINGS, "handlers")
# Shares of `--seconds`, whichever parts run. "sanitizer" is for `handlers` with `--sanitizer`.
SHARES = {"products": 0.5, "handlers": 0.2, "sanitizer": 0.8}
MEMORY_OF_HANDLERS = "0.08"
GRACE_SECONDS = 120


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        "python -m tests.stress", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", nargs="+", default=list(PARTS), choices=PARTS, metavar="PART")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=540, help="for all parts together, about")
    add("--products", type=int, default=10_000, help="random products to run")
    add("--draws", type=int, default=6, help="different sizes of each program")
    add("--repeats", type=int, default=5, help="runs of the same sizes")
    add("--witnesses", type=int, default=40, help="programs for the surroundings")
    add("--misfits", type=int, default=600, help="calls that do not fit")
    add("--most", type=int, default=700, help="largest k and n; rows are twice that")
    add("--sanitizer", choices=sanitizer.TOOLS, help="run only the handlers, under this tool")
    add("--dry-run", action="store_true", help="few of everything, on any machine")
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.products, options.draws, options.repeats = 42, 2, 1
        options.witnesses, options.misfits, options.most = 4, 30, 48
    if options.sanitizer:
        options.only, options.misfits = ["handlers"], min(options.misfits, sanitizer.MISFITS)
    return options


def call_handlers(options: argparse.Namespace) -> dict:
    """Makes the custom calls in another process, and returns their counts and failures."""
    names = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["XLA_CLIENT_MEM_FRACTION"] = MEMORY_OF_HANDLERS
    limit = SHARES["sanitizer" if options.sanitizer else "handlers"] * options.seconds
    command = [sys.executable, "-m", "tests.stress.handlers", "--seed", str(options.seed)]
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
        found = handlers.summary(lines, done.returncode)
        if options.sanitizer:
            counts, wrong = sanitizer.summary(log)
            found |= counts
            found["failures"] += wrong
    return found


def run(part: str, options: argparse.Namespace, products: Callable[[], Products]) -> dict:
    """Runs a part, and returns its counts and failures."""
    if part == "handlers":
        return call_handlers(options)
    soaked = products()
    if part == "products":
        return soaked.record()
    before = len(soaked.failures())
    counts = SURROUNDINGS[part](soaked.programs[: options.witnesses])
    return counts | {"failures": soaked.failures()[before:]}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict]:
    """Runs the chosen parts. Raises SystemExit if anything was wrong or could not be tried."""
    options = parse(arguments)
    # Exit if a kernel hangs the device, because Python cannot interrupt it.
    faulthandler.dump_traceback_later(
        options.seconds + GRACE_SECONDS, exit=True, file=sys.__stderr__
    )
    products = functools.cache(
        lambda: soak(
            seed=options.seed,
            count=options.products,
            draws=options.draws,
            repeats=options.repeats,
            seconds=SHARES["products"] * options.seconds,
            implementation="cuda" if on_gpu() else "xla",
            most=options.most,
        )
    )
    results = {}
    for part in (part for part in PARTS if part in options.only):
        start = time.monotonic()
        try:
            found = run(part, options, products)
        except Exception as error:
            found = {"failures": [f"{part} could not be tried: {first_line(error)}"]}
        results[part] = {"seconds": round(time.monotonic() - start, 1), **found}
        print(json.dumps({"part": part, **results[part]}), flush=True)
    faulthandler.cancel_dump_traceback_later()
    if wrong := [failure for found in results.values() for failure in found["failures"]]:
        sys.exit(f"{len(wrong)} failures, the first: {wrong[0]}")
    return results


if __name__ == "__main__":
    leave_memory_to_torch()
    main()
