"""Everything that a Hopper machine is needed for, in one command: tests, sanitizer, benchmarks.

python -m benchmarks.record --output record --seconds 3600

What fails or runs out of its share of the time is recorded and does not stop the rest. Parts can
be run again one by one, into the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cutlass, targets
from benchmarks.harness import machine

ROOT = Path(__file__).parents[1]
PYTHON = shlex.quote(sys.executable)
EDITABLE_INSTALL = (
    f"{PYTHON} -m pip install --no-build-isolation --no-deps -e . -C build-dir=build/{{wheel_tag}}"
)
# Of a benchmark's share, what its own time limit leaves for starting and for its last case.
START_SECONDS = 45
SMOKE = f"{PYTHON} -m tests.gpu.sanitizer_smoke"
SANITIZER = "compute-sanitizer --error-exitcode 1 --tool"
# By the name of its results: a share of the time, and the command after `python -m benchmarks.`.
BENCHMARKS = {
    "main": (5, "run --rounds 8"),
    "main_other": (3, "run --rounds 6 --no-host --ops forward_t dgrad_t wgrad_f32"),
    "fp8": (4, "fp8"),
    "rank_k": (2, "rank_k"),
    "muon": (2, "muon"),
    "moe": (3, "moe --no-host"),
    "lists": (2, "grouped_gemm"),
    "skew": (
        2,
        "run --rounds 5 --no-host --ops wgrad --distributions uniform zipf one_hot "
        "--peers ours cublas_loop copy",
    ),
    "training": (4, "fp8_training --seeds 3"),
    "float32": (
        2,
        "run --rounds 5 --no-host --dtype float32 --precision highest "
        "--peers ours cublas_loop copy",
    ),
    "models": (4, "run --rounds 5 --no-host --shapes models fine decode --ops forward wgrad"),
}


def parts(build: str = EDITABLE_INSTALL, commit: str | None = None) -> dict[str, tuple]:
    """By name, a share of the time and commands: what others rest on first.

    `{output}` in a command is the folder, and `{limit}` a benchmark's time limit in seconds.
    `commit` goes into every benchmark's results; without one they ask git.
    """
    options = "--time-limit {limit}" + (f" --commit {shlex.quote(commit)}" if commit else "")
    return {
        # CUTLASS's kernels with the Python that has its headers.
        "build": (14, [build, f"env PYTHON={PYTHON} {cutlass.BUILD}"]),
        # A line for each test: a log that ends before pytest's summary still names what failed.
        "tests": (5, [f"{PYTHON} -m pytest -v -m gpu"]),
        "sanitizer": (4, [f"{SANITIZER} memcheck {SMOKE}", f"{SANITIZER} racecheck {SMOKE}"]),
    } | {
        name: (
            weight,
            [f"{PYTHON} -m benchmarks.{command} {options} --output {{output}}/{name}.json"],
        )
        for name, (weight, command) in BENCHMARKS.items()
    }


def run_command(command: str, log: Path, seconds: float) -> dict:
    """What becomes of a command in the root of the checkout, within so many seconds at most."""
    start, returncode = time.monotonic(), None
    with log.open("w") as file:
        file.write(f"$ {command}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                shlex.split(command), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            returncode = process.wait(seconds)
            status = "failed" if returncode else "ok"
        except subprocess.TimeoutExpired:
            # With whatever it started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "out of time"
        except OSError as error:
            status = f"failed: {error}"
    seconds = round(time.monotonic() - start, 1)
    print(f"  {status} after {seconds:.0f} s: {log.name}", flush=True)
    return dict(
        command=command, log=log.name, status=status, returncode=returncode, seconds=seconds
    )


def run_parts(
    chosen: dict[str, tuple], folder: Path, seconds: float, commit: str | None = None
) -> bool:
    """Runs parts, each with a share of what is left of the time; whether all succeeded."""
    path = folder / "record.json"
    known = json.loads(path.read_text())["parts"] if path.exists() else {}
    end = time.monotonic() + seconds
    weights = [weight for weight, _ in chosen.values()]
    for index, (name, (weight, commands)) in enumerate(chosen.items()):
        share = (end - time.monotonic()) * weight / sum(weights[index:])
        print(f"{name}: {share:.0f} s", flush=True)
        until, known[name] = time.monotonic() + max(1.0, share), []
        for number, command in enumerate(commands):
            left = max(1.0, (until - time.monotonic()) / (len(commands) - number))
            # What a folder is called must not be taken for words of the command.
            command = command.replace("{output}", shlex.quote(str(folder.resolve())))
            command = command.replace("{limit}", str(max(1, int(left - START_SECONDS))))
            known[name].append(run_command(command, folder / f"{name}_{number}.log", left))
        head = {"commit": machine.commit(commit), "machine": machine.versions()}
        found = {**head, "gpu": machine.gpu_state(), "parts": known}
        path.write_text(json.dumps(found, indent=1) + "\n")
    return all(outcome["status"] == "ok" for name in chosen for outcome in known[name])


def main(arguments: Sequence[str] | None = None) -> int:
    names = list(parts())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("record"), metavar="FOLDER")
    add("--seconds", type=float, default=3600, help="for all parts together")
    add("--only", nargs="+", default=names, choices=names, metavar="PART", help=", ".join(names))
    add("--build", default=EDITABLE_INSTALL, metavar="COMMAND", help="another way to install")
    add("--commit", help="of the sources, where git cannot tell")
    add("--dry-run", action="store_true", help="print the commands and stop")
    options = parser.parse_args(arguments)
    found = parts(options.build, options.commit).items()
    chosen = {name: part for name, part in found if name in options.only}
    if options.dry_run:
        for name, (_, commands) in chosen.items():
            print(name, *(f"  {command}" for command in commands), sep="\n")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    succeeded = run_parts(chosen, options.output, options.seconds, options.commit)
    results = [path for path in sorted(options.output.glob("*.json")) if path.stem != "record"]
    if results:
        lines: list[str] = []
        targets.main([str(path) for path in results], lines.append)
        (options.output / "targets.txt").write_text("\n".join(lines) + "\n")
        print("\n".join(lines))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
