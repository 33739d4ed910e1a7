"""Command line: measures cases within a time limit and writes a table and a JSON file."""

from __future__ import annotations

import argparse
import faulthandler
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from tqdm import tqdm

from benchmarks import host, machine, report
from benchmarks.cases import DISTRIBUTIONS, OPS, SUITES, Case, select_shapes
from benchmarks.inputs import Inputs
from benchmarks.measure import measure_case, merge
from benchmarks.peers import all_peers
from benchmarks.peers.bandwidth import copy_call
from benchmarks.peers.base import Peer, on_gpu
from benchmarks.recorders import RECORDERS, Recorder, open_best
from benchmarks.results_file import save
from benchmarks.timing import CacheFlush

# A job that has begun may run past the time limit by this much before the process gives up.
GRACE_SECONDS = 120


@dataclass(frozen=True)
class Job:
    """A case and the peers to measure together in it."""

    case: Case
    peers: tuple[Peer, ...]
    rounds: int


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


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["main"], metavar="NAME", help="shapes and suites (--list)"
    )
    parser.add_argument(
        "--ops", nargs="+", default=["forward", "dgrad", "wgrad"], choices=OPS, metavar="OP"
    )
    parser.add_argument(
        "--distributions", nargs="+", default=["random"], choices=DISTRIBUTIONS, metavar="NAME"
    )
    parser.add_argument(
        "--peers", nargs="+", default=list(all_peers()), choices=all_peers(), metavar="PEER"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--precision",
        default="default",
        choices=("default", "highest"),
        help="of float32 operands: TF32's or float32's",
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the interleaved timing")
    parser.add_argument("--slow-rounds", type=int, default=3, help="the same for slow peers")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the group sizes")
    parser.add_argument(
        "--time-limit", type=float, default=240, metavar="SECONDS", help="skip cases after this"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="where to write the results")
    parser.add_argument("--commit", help="the measured commit, in a copy without git")
    parser.add_argument("--recorder", default="auto", choices=("auto", *RECORDERS))
    parser.add_argument("--no-host", action="store_true", help="leave out the host's times")
    parser.add_argument(
        "--sweep",
        type=int,
        default=3,
        metavar="N",
        help="configurations tried a problem of the peers that leave their tiles to the caller",
    )
    parser.add_argument("--retune", action="store_true", help="sweep again where known")
    parser.add_argument(
        "--dry-run", action="store_true", help="every step with tiny shapes, on any machine"
    )
    parser.add_argument("--list", action="store_true", help="print the choices and stop")
    parser.add_argument(
        "--chain", type=int, default=100, metavar="N", help="products of the host time's slope"
    )
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.shapes, options.rounds, options.slow_rounds = ["tiny"], 2, 1
        options.chain = 2
        options.recorder = "auto" if on_gpu() else "clock"
    try:
        options.shapes = select_shapes(options.shapes)
    except ValueError as error:
        parser.error(str(error))
    return options


def print_choices(peers: dict[str, Peer]) -> None:
    """What can be asked for, and which peers this machine has."""
    for suite, shapes in SUITES.items():
        print(f"suite {suite}")
        for shape in shapes:
            print(
                f"  {shape.name}: {shape.groups} groups, {shape.rows} rows, "
                f"k {shape.k}, n {shape.n}"
            )
    print(f"ops: {', '.join(OPS)}")
    print(f"distributions: {', '.join(DISTRIBUTIONS)}")
    for peer in peers.values():
        reason = peer.unavailable_reason()
        print(f"peer {peer.name} ({peer.role}): {f'unavailable, {reason}' if reason else 'ready'}")


def plan_jobs(options: argparse.Namespace, peers: Sequence[Peer]) -> list[Job]:
    """All cases with the fast peers, then all cases with the slow ones next to us.

    The second pass comes last because it is what a short time limit can best do without.
    """
    cases = [
        Case(shape, OPS[op], distribution, options.dtype, options.seed, options.precision)
        for shape in options.shapes
        for op in options.ops
        for distribution in options.distributions
    ]
    fast = tuple(peer for peer in peers if not peer.slow)
    slow = tuple(peer for peer in peers if peer.slow)
    ours = tuple(peer for peer in peers if peer.name == "ours")
    jobs = [Job(case, fast, options.rounds) for case in cases if fast]
    return jobs + [Job(case, ours + slow, options.slow_rounds) for case in cases if slow]


def run_jobs(
    jobs: Sequence[Job],
    options: argparse.Namespace,
    recorder: Recorder,
    deadline: Deadline,
    results: dict,
) -> None:
    """Fills `results` job by job, and writes it after each, so that an interrupt loses little."""
    flush = CacheFlush() if on_gpu() else lambda: None
    records: dict[str, dict] = {}
    inputs, inputs_of = None, None
    progress = tqdm(jobs, unit="case", disable=None)
    for job in progress:
        slow = any(peer.slow for peer in job.peers)
        label = f"{job.case.name}{' (slow peers)' if slow else ''}"
        if not deadline.allows_another():
            results["not_measured"].append(label)
            continue
        progress.set_postfix_str(label)
        start = deadline.elapsed()
        if inputs_of != job.case.shape:
            # The old tensors go before the new ones come.
            inputs = None
            inputs, inputs_of = Inputs(job.case.shape, options.dtype, options.seed), job.case.shape
        record = measure_case(
            job.case,
            inputs,
            job.peers,
            recorder,
            rounds=job.rounds,
            flush=flush,
            measure_host=not options.no_host,
        )
        name = job.case.name
        records[name] = merge(records[name], record) if name in records else record
        results["cases"] = list(records.values())
        if options.output:
            save(results, options.output)
        progress.write(f"{deadline.elapsed():4.0f} s  {report.case_line(record)}")
        deadline.took(deadline.elapsed() - start)


def print_results(results: dict) -> None:
    """Tables first, then what explains them."""
    records = results["cases"]
    for text in (
        report.times_table(records),
        report.ratios_table(records),
        report.summary_lines(records),
        report.host_lines(results),
        report.error_lines(records),
        report.missing_lines(records),
        report.unmeasured_line(results["not_measured"]),
    ):
        if text:
            print(f"\n{text}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parse_arguments(arguments)
    peers = all_peers(options.sweep, options.retune)
    if options.list:
        print_choices(peers)
        return
    deadline = Deadline(options.time_limit)
    names = [name for name in RECORDERS if options.recorder in ("auto", name)]
    recorder, passed_over = open_best(names, copy_call())
    for reason in passed_over:
        print(f"recorder passed over: {reason}")
    results = {
        "command": shlex.join(["python", "-m", "benchmarks.run", *(arguments or sys.argv[1:])]),
        "recorder": recorder.name,
        "device": jax.devices()[0].device_kind,
        "machine": machine.describe(options.commit),
        "gpu_before": machine.gpu_state(),
        "cases": [],
        "not_measured": [],
    }
    jobs = plan_jobs(options, [peers[name] for name in options.peers])
    # A kernel that hangs the device cannot be interrupted; what was measured is already written.
    faulthandler.dump_traceback_later(options.time_limit + GRACE_SECONDS, exit=True)
    try:
        # First, because it takes seconds and a time limit leaves out what comes last.
        if not options.no_host and "ours" in options.peers:
            results["host"] = host.product_cost(recorder, options.chain)
            try:
                results["first_call"] = host.first_call()
            except subprocess.SubprocessError as error:
                results["not_measured"].append(f"first call ({error})")
        run_jobs(jobs, options, recorder, deadline, results)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        faulthandler.cancel_dump_traceback_later()
        results["gpu_after"] = machine.gpu_state()
        results["summary"] = report.summary(results["cases"])
        results["seconds"] = deadline.elapsed()
        if options.output:
            save(results, options.output)
        if results["cases"]:
            print_results(results)
        print(f"\n{results['seconds']:.0f} s, device time by {recorder.name}")


if __name__ == "__main__":
    # PyTorch allocates from what JAX leaves of the GPU's memory, and JAX reserves its share once.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.7")
    main()
