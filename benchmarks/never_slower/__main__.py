"""Searches shapes for which our functions are slower than those they replace.

python -m benchmarks.never_slower --output never_slower.json

It measures `--shapes` random small, thin, shallow and deep shapes for each operation, and the
expressions and loops that the operation replaces. In turn, `--workers` threads compile a few cases,
and these cases are measured. "ours" is the program that the plan chooses, perhaps XLA's product.
If our kernel or XLA's product is another program, it is measured too, as "kernel" or "XLA".
`benchmarks.fit` uses the record to fit when plans fall back to XLA.
"""

import argparse
import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax

from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.recorders import CuptiRecorder
from benchmarks.harness.session import Job, Session, leave_memory_to_torch
from benchmarks.never_slower import report, shapes
from benchmarks.never_slower.cases import Case, case
from benchmarks.never_slower.programs import ProgramPeer

CASES_A_WORKER = 4  # number of cases that each worker compiles before they are measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--ops", shapes.OPS)
    parser.add_argument("--shapes", type=int, default=60, help="shapes of each operation")
    parser.add_argument("--first", type=int, default=0, help="number of the first shape")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="threads that compile")


def complete(options: argparse.Namespace) -> None:
    if options.dry_run:
        options.shapes = 1


def compiled(found: Case) -> list[ProgramPeer]:
    with jax.enable_x64(found.x64):
        return [ProgramPeer(program, found.operands) for program in found.programs]


def measure(found: Case, programs: list[ProgramPeer], session: Session) -> dict:
    with jax.enable_x64(found.x64):
        record = session.compare(found.work(), [*programs, *found.others], host=False)
    op, _ = found.label.split("/")
    name = f"{found.label}/{record['shape']['name']}"
    return report.short(record | {"case": name, "op": op})


def jobs(options: argparse.Namespace, session: Session) -> Iterator[Job]:
    """Yields jobs of operations in turn, so that a time limit leaves equally many of each."""
    recorder = session.recorder
    # Attach the profiler once for many cases, because no host times are measured.
    attaches = isinstance(recorder, CuptiRecorder)
    if attaches:
        recorder.stays_attached = True
    numbers = range(options.first, options.first + options.shapes)
    labels = [(op, number) for number in numbers for op in options.ops]
    step = CASES_A_WORKER * options.workers
    with ThreadPoolExecutor(options.workers) as pool:
        for start in range(0, len(labels), step):
            found = [
                case(op, number, options.seed, tiny=options.dry_run)
                for op, number in labels[start : start + step]
            ]
            if attaches:
                recorder.detach()  # XLA's autotuner launches kernels too
            in_time = session.deadline.allows_another()
            programs = list(pool.map(compiled, found)) if in_time else [[]] * len(found)
            for each, of_case in zip(found, programs, strict=True):
                yield Job(each.label, functools.partial(measure, each, of_case, session))
    if attaches:
        recorder.detach()


OPTIONS = dict(rounds=9, time_limit=540, summarize=report.summarize, texts=report.texts)
COMMAND = Command("benchmarks.never_slower", __doc__, jobs, add_arguments, complete, **OPTIONS)

if __name__ == "__main__":
    leave_memory_to_torch()
    COMMAND.main()
