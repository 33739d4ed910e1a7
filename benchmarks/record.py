"""Everything that a Hopper machine is needed for, in one command: tests, sanitizer, benchmarks.

python -m benchmarks.record --output record --seconds 3600

What fails or runs out of its share of the time is recorded and does not stop the rest. Parts can
be run again one by one, into the same folder, and `--resume` runs those that have not succeeded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cutlass
from benchmarks.harness import machine

ROOT = Path(__file__).parents[1]
EDITABLE_INSTALL = (
    f"{shlex.quote(sys.executable)} -m pip install --no-build-isolation --no-deps -e . "
    "-C build-dir=build/{wheel_tag}"
)
# With the Python that has CUTLASS's headers.
CUTLASS_BUILD = f"env PYTHON={shlex.quote(sys.executable)} {cutlass.BUILD}"
# Of a benchmark's share, what its own time limit leaves for starting and for its last case.
START_SECONDS = 45


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other, each with a log of its own.

    In a command, `{output}` is the folder and `{limit}` a benchmark's time limit in seconds.
    """

    name: str
    weight: float  # of its share of the time
    commands: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What became of one command."""

    command: str
    log: str
    status: str  # ok, failed or out of time
    returncode: int | None
    seconds: float


def python(module: str) -> str:
    """The beginning of a command that runs a module."""
    return f"{shlex.quote(sys.executable)} -m {module}"


def parts(build: str, commit: str | None = None) -> list[Part]:
    """All parts, in the order in which to run them: what others rest on first.

    `commit` goes into every benchmark's results; without one they ask git.
    """
    run, fp8, rank_k, muon, lists, training, layers = (
        python(f"benchmarks.{name}")
        for name in ("run", "fp8", "rank_k", "muon", "grouped_gemm", "fp8_training", "moe")
    )
    limits = "--time-limit {limit}" + (f" --commit {shlex.quote(commit)}" if commit else "")
    smoke = python("tests.gpu.sanitizer_smoke")
    sanitizer = "compute-sanitizer --error-exitcode 1 --tool"
    return [
        Part("build", 14, (build, CUTLASS_BUILD)),
        # A line for each test: a log that ends before pytest's summary still names what failed.
        Part("tests", 5, (f"{python('pytest')} -v -m gpu",)),
        Part("sanitizer", 4, (f"{sanitizer} memcheck {smoke}", f"{sanitizer} racecheck {smoke}")),
        Part(
            "main",
            8,
            (
                f"{run} {limits} --rounds 8 --output {{output}}/main.json",
                f"{run} {limits} --rounds 6 --no-host --ops forward_t dgrad_t wgrad_f32 "
                "--output {output}/main_other.json",
            ),
        ),
        Part("fp8", 4, (f"{fp8} {limits} --output {{output}}/fp8.json",)),
        Part("rank_k", 2, (f"{rank_k} {limits} --output {{output}}/rank_k.json",)),
        Part("muon", 2, (f"{muon} {limits} --output {{output}}/muon.json",)),
        Part("moe", 3, (f"{layers} {limits} --no-host --output {{output}}/moe.json",)),
        Part("lists", 2, (f"{lists} {limits} --output {{output}}/lists.json",)),
        Part(
            "skew",
            2,
            (
                f"{run} {limits} --rounds 5 --no-host --ops wgrad "
                "--distributions uniform zipf one_hot --peers ours cublas_loop copy "
                "--output {output}/skew.json",
            ),
        ),
        Part("training", 4, (f"{training} {limits} --seeds 3 --output {{output}}/training.json",)),
        Part(
            "float32",
            2,
            (
                f"{run} {limits} --rounds 5 --no-host --dtype float32 --precision highest "
                "--peers ours cublas_loop copy --output {output}/float32.json",
            ),
        ),
        Part(
            "models",
            4,
            (
                f"{run} {limits} --rounds 5 --no-host --shapes models fine decode "
                "--ops forward wgrad --output {output}/models.json",
            ),
        ),
        Part(
            "variants",
            4,
            (
                f"{run} {limits} --rounds 5 --no-host --variants --peers ours copy "
                "--output {output}/variants.json",
                f"{fp8} {limits} --rounds 5 --no-host --variants "
                "--ops fp8_forward fp8_dgrad fp8_wgrad --output {output}/fp8_variants.json",
            ),
        ),
    ]


class Record:
    """What is known of each part, kept in a file of the output folder."""

    def __init__(self, folder: Path, commit: str | None):
        self._path = folder / "record.json"
        self._parts: dict = {}
        if self._path.exists():
            self._parts = json.loads(self._path.read_text())["parts"]
        self._head = {"commit": machine.commit(commit), "machine": machine.versions()}

    def succeeded(self, part: str) -> bool:
        """Whether all its commands did."""
        outcomes = self._parts.get(part, [])
        return bool(outcomes) and all(outcome["status"] == "ok" for outcome in outcomes)

    def add(self, part: str, outcomes: Sequence[Outcome]) -> None:
        """Replaces what is known of a part."""
        self._parts[part] = [dataclasses.asdict(outcome) for outcome in outcomes]
        found = {**self._head, "gpu": machine.gpu_state(), "parts": self._parts}
        self._path.write_text(json.dumps(found, indent=1) + "\n")


def run_command(command: str, log: Path, seconds: float) -> Outcome:
    """Runs a command in the root of the checkout, for so many seconds at most."""
    start = time.monotonic()
    with log.open("w") as file:
        file.write(f"$ {command}\n")
        file.flush()
        process = subprocess.Popen(
            shlex.split(command),
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = "failed" if process.wait(seconds) else "ok"
        except subprocess.TimeoutExpired:
            # With whatever it started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = "out of time"
    elapsed = time.monotonic() - start
    return Outcome(command, log.name, status, process.returncode, round(elapsed, 1))


def run_part(part: Part, folder: Path, seconds: float) -> list[Outcome]:
    """Runs all commands of a part, a failed one too, within its share of the time."""
    end = time.monotonic() + seconds
    outcomes = []
    for index, command in enumerate(part.commands):
        share = max(1.0, (end - time.monotonic()) / (len(part.commands) - index))
        # What a folder is called must not be taken for words of the command.
        output = shlex.quote(str(folder.resolve()))
        limit = max(1, int(share - START_SECONDS))
        command = command.replace("{output}", output).replace("{limit}", str(limit))
        log = folder / f"{part.name}_{index}.log"
        try:
            outcomes.append(run_command(command, log, share))
        except OSError as error:
            outcomes.append(Outcome(command, log.name, f"failed: {error}", None, 0.0))
    return outcomes


def run_parts(
    chosen: Sequence[Part],
    folder: Path,
    record: Record,
    seconds: float,
    write: Callable[[str], object] = print,
) -> bool:
    """Runs parts, each with a share of what is left of the time; whether all succeeded."""
    end = time.monotonic() + seconds
    for index, part in enumerate(chosen):
        weights = sum(rest.weight for rest in chosen[index:])
        share = (end - time.monotonic()) * part.weight / weights
        write(f"{part.name}: {share:.0f} s")
        outcomes = run_part(part, folder, max(1.0, share))
        record.add(part.name, outcomes)
        for outcome in outcomes:
            write(f"  {outcome.status} after {outcome.seconds:.0f} s: {outcome.log}")
    return all(record.succeeded(part.name) for part in chosen)


def judge(folder: Path, write: Callable[[str], object] = print) -> None:
    """Writes what the targets say of all results in the folder."""
    results = sorted(folder.glob("*.json"))
    results = [path for path in results if path.name != "record.json"]
    if not results:
        return
    from benchmarks import targets

    lines: list[str] = []
    targets.main([str(path) for path in results], lines.append)
    (folder / "targets.txt").write_text("\n".join(lines) + "\n")
    write("\n".join(lines))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    names = [part.name for part in parts("")]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("record"), metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=3600, help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--skip", nargs="+", default=[], choices=names, metavar="PART")
    parser.add_argument("--resume", action="store_true", help="skip parts that have succeeded")
    parser.add_argument(
        "--build",
        default=EDITABLE_INSTALL,
        metavar="COMMAND",
        help="of the part build; by default an editable install into this environment",
    )
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 1 if a part did not succeed."""
    options = parse_arguments(arguments)
    chosen = [
        part
        for part in parts(options.build, options.commit)
        if part.name in (options.only or [part.name]) and part.name not in options.skip
    ]
    if options.dry_run:
        for part in chosen:
            print(part.name, *(f"  {command}" for command in part.commands), sep="\n")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    record = Record(options.output, options.commit)
    if options.resume:
        chosen = [part for part in chosen if not record.succeeded(part.name)]
    succeeded = run_parts(chosen, options.output, record, options.seconds)
    judge(options.output)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
