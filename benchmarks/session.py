"""What the benchmarks' command lines share: options, the recorder, a time limit, a results file."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks import machine, report
from benchmarks.measure import first_line, merge
from benchmarks.peers.bandwidth import copy_call
from benchmarks.peers.base import on_gpu
from benchmarks.recorders import RECORDERS, open_best
from benchmarks.results_file import save
from benchmarks.timing import CacheFlush

# A job that has begun may run past the time limit by this much before the process gives up.
GRACE_SECONDS = 120


def leave_memory_to_torch() -> None:
    """Called before JAX starts, which reserves its share of the GPU's memory once."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.7")


@dataclass(frozen=True)
class Job:
    """One measurement: `run` returns a record for the results."""

    label: str
    run: Callable[[], dict]


class Deadline:
    """Time left for jobs, which cannot be interrupted: so a job needs to look short enough."""

    def __init__(self, seconds: float):
        self._start = time.monotonic()
        self._end = self._start + seconds
        self._longest = 0.0

    def allows_another(self) -> bool:
        """Whether a job as long as the longest so far would still end in time."""
        return time.monotonic() + self._longest < self._end

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def took(self, seconds: float) -> None:
        """Learns from a finished job."""
        self._longest = max(self._longest, seconds)


def add_options(parser: argparse.ArgumentParser, rounds: int = 20, time_limit: int = 240) -> None:
    """The options that all benchmarks have."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="rounds of the interleaved timing"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data and the group sizes")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=time_limit,
        metavar="SECONDS",
        help="skip cases after this",
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="where to write the results")
    parser.add_argument("--commit", help="the measured commit, in a copy without git")
    parser.add_argument("--recorder", default="auto", choices=("auto", *RECORDERS))
    parser.add_argument("--no-host", action="store_true", help="leave out the host's times")
    parser.add_argument(
        "--dry-run", action="store_true", help="every step with tiny shapes, on any machine"
    )


def use_dry_run(options: argparse.Namespace) -> None:
    """Makes a dry run short, and independent of profilers where there is no GPU."""
    options.rounds = 2
    options.recorder = "auto" if on_gpu() else "clock"


class Session:
    """One run: the recorder that measures, and the results that grow job by job."""

    def __init__(self, command: Sequence[str], options: argparse.Namespace):
        self.options = options
        self.deadline = Deadline(options.time_limit)
        names = [name for name in RECORDERS if options.recorder in ("auto", name)]
        self.recorder, passed_over = open_best(names, copy_call())
        for reason in passed_over:
            print(f"recorder passed over: {reason}")
        self.flush = CacheFlush() if on_gpu() else lambda: None
        self.results: dict = {
            "command": shlex.join(["python", "-m", *command]),
            "recorder": self.recorder.name,
            "device": jax.devices()[0].device_kind,
            "machine": machine.describe(options.commit),
            "gpu_before": machine.gpu_state(),
            "cases": [],
            "not_measured": [],
        }

    def measure(self, jobs: Sequence[Job]) -> None:
        """Runs jobs within the time limit; one that raises is named and does not end the run.

        The results are written after each, so that an interrupt loses little.
        """
        records = {record["case"]: record for record in self.results["cases"]}
        progress = tqdm(jobs, unit="case", disable=None)
        for job in progress:
            if not self.deadline.allows_another():
                self.results["not_measured"].append(job.label)
                continue
            progress.set_postfix_str(job.label)
            start = self.deadline.elapsed()
            try:
                record = job.run()
            except Exception as error:
                self.results["not_measured"].append(f"{job.label} ({first_line(error)})")
                continue
            name = record["case"]
            records[name] = merge(records[name], record) if name in records else record
            self.results["cases"] = list(records.values())
            self._save()
            progress.write(f"{self.deadline.elapsed():4.0f} s  {report.case_line(record)}")
            self.deadline.took(self.deadline.elapsed() - start)

    def close(self) -> None:
        """Completes, writes and prints the results."""
        self.results["gpu_after"] = machine.gpu_state()
        self.results["summary"] = report.summary(self.results["cases"])
        self.results["seconds"] = self.deadline.elapsed()
        self._save()
        print_results(self.results)
        print(f"\n{self.results['seconds']:.0f} s, device time by {self.recorder.name}")

    def _save(self) -> None:
        if self.options.output:
            save(self.results, self.options.output)


@contextlib.contextmanager
def open_session(command: Sequence[str], options: argparse.Namespace) -> Iterator[Session]:
    """A session that reports whatever it has measured, even when it is interrupted.

    Args:
      command: the module and its arguments.
      options: as `add_options` describes.
    """
    session = Session(command, options)
    # A kernel that hangs the device cannot be interrupted; what was measured is already written.
    faulthandler.dump_traceback_later(
        options.time_limit + GRACE_SECONDS, exit=True, file=sys.__stderr__
    )
    try:
        yield session
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        faulthandler.cancel_dump_traceback_later()
        session.close()


def print_results(results: Mapping) -> None:
    """Tables first, then what explains them."""
    records = results["cases"]
    texts = [report.unmeasured_line(results["not_measured"])]
    if records:
        texts = [
            report.times_table(records),
            report.ratios_table(records),
            report.variants_table(records),
            report.summary_lines(records),
            report.host_lines(results),
            report.error_lines(records),
            report.missing_lines(records),
            *texts,
        ]
    for text in texts:
        if text:
            print(f"\n{text}")
