"""Runs the jobs of a command with a recorder and a time limit, and saves results as they grow."""

import argparse
import contextlib
import faulthandler
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import jax
from tqdm import tqdm

from benchmarks.harness import machine, report
from benchmarks.harness.bandwidth import copy_call
from benchmarks.harness.measure import Workload, first_line, measure, merge
from benchmarks.harness.peer import Peer, on_gpu
from benchmarks.harness.recorders import RECORDERS, open_best
from benchmarks.harness.results_file import save
from benchmarks.harness.timing import CacheFlush

# A job that has begun may run past the time limit by this much before the process gives up.
GRACE_SECONDS = 120
# The share of the time that writing results may take.
SAVING_SHARE = 0.02


def leave_memory_to_torch() -> None:
    """Limits JAX's share of the GPU's memory. Call it before JAX starts, which reserves memory."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.7")


def command_line(command: Sequence[str]) -> str:
    """Returns the command for the same results, without `--output`."""
    return re.sub(r" --output[ =]('[^']*'|\S+)", "", shlex.join(["python", "-m", *command]))


@dataclass(frozen=True)
class Job:
    """One measurement: `run` returns a record for the results."""

    label: str
    run: Callable[[], dict]


class Deadline:
    """The time limit of a run. Jobs run to their end, so none may start that would end too late."""

    def __init__(self, seconds: float):
        self._start, self._seconds, self._longest = time.monotonic(), seconds, 0.0

    def allows_another(self) -> bool:
        """Returns whether a job as long as the longest so far would end in time."""
        return self.elapsed() + self._longest < self._seconds

    def elapsed(self) -> float:
        return time.monotonic() - self._start

    def took(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)


class Session:
    """A run, with its recorder and its results. `timed` says whether to measure device time."""

    def __init__(
        self,
        command: Sequence[str],
        options: argparse.Namespace,
        timed: bool = True,
        summarize: Callable[[Sequence[dict]], dict] = report.summary,
    ):
        self.options = options
        self.deadline = Deadline(options.time_limit)
        self._summarize = summarize
        self._next_save = 0.0
        self.recorder = None
        if timed:
            names = [name for name in RECORDERS if options.recorder in ("auto", name)]
            self.recorder, passed_over = open_best(names, copy_call())
            for reason in passed_over:
                print(f"recorder passed over: {reason}")
        self.flush = CacheFlush() if timed and on_gpu() else lambda: None
        self.results: dict = {
            "command": command_line(command),
            "device": jax.devices()[0].device_kind,
            "commit": machine.commit(options.commit),
            "seed": options.seed,
            "recorder": self.recorder.name if self.recorder else None,
            "machine": machine.versions(),
            "gpu_before": machine.gpu_state(),
            "cases": [],
            "not_measured": [],
        }

    def compare(
        self, work: Workload, peers: Iterable[Peer], rounds: int | None = None, host: bool = True
    ) -> dict:
        """Measures a case as the options say, without host times if `host` is false."""
        return measure(
            work,
            peers,
            self.recorder,
            rounds=rounds or self.options.rounds,
            flush=self.flush,
            measure_host=host and not self.options.no_host,
        )

    def run(self, jobs: Iterable[Job]) -> None:
        """Runs jobs within the time limit. The results name jobs that fail or are left out.

        It saves results as they grow, so that an interrupt loses little. The iterable `jobs` may
        depend on the results of earlier jobs.
        """
        records: dict[str, dict] = {}
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
            self._save_now_and_then()
            progress.write(f"{self.deadline.elapsed():4.0f} s  {report.case_line(record)}")
            self.deadline.took(self.deadline.elapsed() - start)

    def close(self) -> None:
        self.results["gpu_after"] = machine.gpu_state()
        self.results["summary"] = self._summarize(self.results["cases"])
        self.results["seconds"] = self.deadline.elapsed()
        self._save()

    def _save_now_and_then(self) -> None:
        """Saves the results, unless saving has taken more than its share of the time so far."""
        if self.deadline.elapsed() >= self._next_save:
            start = self.deadline.elapsed()
            self._save()
            end = self.deadline.elapsed()
            self._next_save = end + (end - start) / SAVING_SHARE

    def _save(self) -> None:
        if self.options.output:
            save(self.results, self.options.output)


@contextlib.contextmanager
def watched(session: Session) -> Iterator[Session]:
    """Returns a context in which a session completes its results even if it is interrupted."""
    # Exit if a kernel hangs, because that cannot be interrupted. Earlier results are saved already.
    faulthandler.dump_traceback_later(
        session.options.time_limit + GRACE_SECONDS, exit=True, file=sys.__stderr__
    )
    try:
        yield session
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        faulthandler.cancel_dump_traceback_later()
        session.close()
