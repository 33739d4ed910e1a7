"""Is there a shape where ours is slower than what it replaces?

python -m benchmarks.never_slower --output never_slower.json
python -m benchmarks.never_slower --workers 0 --shapes 2       # everything compiled in one process

Small, thin, shallow and deep shapes at random, `--shapes` of them for each operation, each against
the expressions and loops that it takes the place of. First `--workers` processes compile, for
`--compile-limit` seconds at most, then one process alone measures what they compiled, within
`--time-limit`. With `--programs FOLDER` what was compiled stays, and a second command goes on from
there. "ours" is what the plan takes, which may be XLA's own product. Where that is another program,
"kernel" is our kernel, "configN" another of its configurations and "XLA" XLA's product; "both
triangles" of a symmetric update is our `grouped_gemm`. At the end the slowest cases and some others
are compiled again, on a quiet machine, and measured again. `benchmarks.fit` fits to the record when
plans fall back to XLA.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness.command import Command
from benchmarks.harness.cupti import CuptiRecorder
from benchmarks.harness.session import Job, Session, leave_memory_to_torch
from benchmarks.never_slower import report, shapes
from benchmarks.never_slower.cases import case
from benchmarks.never_slower.programs import (
    Compiled,
    ProgramPeer,
    Store,
    compile_here,
    run_workers,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which operations, how many shapes, and who compiles."""
    ops = list(shapes.OPS)
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops, metavar="OP")
    parser.add_argument("--shapes", type=int, default=60, help="random shapes an operation")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 1),
        help="processes that compile; 0: the measuring process compiles what it needs",
    )
    parser.add_argument(
        "--compile-limit", type=float, default=300, metavar="SECONDS", help="of the workers"
    )
    parser.add_argument(
        "--programs", type=Path, metavar="FOLDER", help="where compiled programs stay"
    )
    parser.add_argument("--compile-only", action="store_true", help="measure nothing")
    parser.add_argument("--again", type=int, default=8, help="cases to compile anew at the end")
    # Of a worker, by the process that starts it.
    parser.add_argument("--as-worker", metavar="RUN", help=argparse.SUPPRESS)


def complete(options: argparse.Namespace) -> None:
    """A dry run has one shape, and compiles it itself unless workers are asked for."""
    if options.dry_run:
        options.shapes, options.again = 1, min(options.again, 1)
        options.workers = min(options.workers, 1)
    if options.compile_only and options.programs is None:
        raise ValueError("--compile-only needs --programs, the folder that keeps them")
    if options.programs is not None and not options.workers:
        raise ValueError("--workers 0 compiles what it measures, and reads nothing of --programs")


def labels(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Operations in turn, so that a time limit leaves as many of each."""
    numbers = range(options.first, options.first + options.shapes)
    return [(op, number) for number in numbers for op in options.ops]


def compile_share(options: argparse.Namespace) -> None:
    """Compiles the next case that no other process of the run has begun, until there is none."""
    jax.config.update("jax_compilation_cache_dir", str(options.programs / "xla"))
    # Only for XLA's choices among kernels: a product that two programs have is tuned once.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    store = Store(options.programs)
    for op, number in labels(options):
        if not store.claim(f"{op}/{number}", options.as_worker):
            continue
        found = case(op, number, options.seed, tiny=options.dry_run)
        with jax.enable_x64(found.x64):
            programs = {
                program.name: compile_here(program, found.operands) for program in found.programs
            }
        store.save(found.label, programs)


def job_of(
    op: str, number: int, options: argparse.Namespace, session: Session, store: Store | None
) -> Job:
    """A case whose programs are compiled, or without a store are compiled as they are needed."""

    def measure() -> dict:
        found = case(op, number, options.seed, tiny=options.dry_run)
        compiled: dict[str, Compiled] = store.load(found.label) if store else {}
        if store and not compiled:
            raise LookupError("not compiled in time")
        peers = [ProgramPeer(p, compiled.get(p.name)) for p in found.programs]
        with jax.enable_x64(found.x64):
            record = session.compare(found.work(), [*peers, *found.others], host=False)
        here = [name for name, each in compiled.items() if each.failure]
        name = f"{found.label}/{record['shape']['name']}"
        record |= {"case": name, "op": op} | ({"compiled_here": here} if here else {})
        return report.short(record)

    return Job(f"{op}/{number}", measure)


def jobs(options: argparse.Namespace, session: Session) -> Iterator[Job]:
    """Every case, then some again."""
    recorder = session.recorder
    # No host time is measured, and attaching the profiler for each case would take its share.
    if isinstance(recorder, CuptiRecorder):
        recorder.stays_attached = True
    try:
        store = Store(options.programs) if options.workers else None
        for op, number in labels(options):
            yield job_of(op, number, options, session, store)
        if store:
            for record in chosen_again(session.results["cases"], options.again, options.seed):
                yield again(record, options, session)
    finally:
        if isinstance(recorder, CuptiRecorder):
            recorder.detach()


def chosen_again(records: Sequence[dict], count: int, seed: int) -> list[dict]:
    """Half of them the slowest, half of them any."""
    ratios = {r["case"]: worst[0] for r in records if (worst := report.worst_ratio(r))}
    slowest = sorted(records, key=lambda record: ratios.get(record["case"], np.inf))
    rest = slowest[count // 2 :]
    drawn = np.random.default_rng(seed).permutation(len(rest))[: count - count // 2]
    return [*slowest[: count // 2], *(rest[i] for i in drawn)]


def again(record: dict, options: argparse.Namespace, session: Session) -> Job:
    """A case compiled anew, by a process that nothing runs beside."""
    op, number = record["case"].split("/")[:2]
    job = job_of(op, int(number), options, session, None)

    def measure() -> dict:
        repeated = job.run()
        return repeated | {"case": f"{repeated['case']}/again", report.AGAIN: record["case"]}

    return Job(f"{job.label}/again", measure, typical=False)


COMMAND = Command(
    "benchmarks.never_slower",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    complete=complete,
    rounds=9,
    time_limit=270,
    summarize=report.summarize,
    texts=report.texts,
)


def main(arguments: Sequence[str] | None = None) -> dict:
    """Compiles and measures; returns the results."""
    options = COMMAND.parse(arguments)
    if options.as_worker:
        compile_share(options)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        if options.programs is None:
            options.programs = Path(folder)
        if options.workers:
            compile_all(options)
        if options.compile_only:
            return {}
        return COMMAND.run(options, arguments)


def compile_all(options: argparse.Namespace) -> None:
    """Starts the workers, and says what they left."""
    run = f"{os.getpid()}-{time.time_ns()}"
    command = [COMMAND.module, "--as-worker", run, "--programs", str(options.programs)]
    command += ["--seed", str(options.seed), "--shapes", str(options.shapes)]
    command += ["--first", str(options.first), "--ops", *options.ops]
    command += ["--dry-run"] if options.dry_run else []
    seconds = run_workers(options.workers, command, options.compile_limit)
    store = Store(options.programs)
    done = [store.has(f"{op}/{number}") for op, number in labels(options)]
    print(f"{sum(done)} of {len(done)} cases compiled in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    leave_memory_to_torch()
    main()
