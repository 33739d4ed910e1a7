"""Command line: FP8 products against their peers, quantisers, and steps of training.

python -m benchmarks.fp8 --output benchmarks/results/fp8.json
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from benchmarks.cases import DISTRIBUTIONS
from benchmarks.fp8.cases import OPS, PRODUCTS, STEP, Fp8Case, default_cases, tiny_cases
from benchmarks.fp8.inputs import ScaledInputs
from benchmarks.fp8.peers import all_peers
from benchmarks.fp8.quantizers import measure_quantizer
from benchmarks.fp8.step import measure_step
from benchmarks.inputs import LatestInputs
from benchmarks.measure import measure_case
from benchmarks.session import (
    Job,
    Session,
    add_options,
    leave_memory_to_torch,
    open_session,
    use_dry_run,
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fp8",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, rounds=12, time_limit=600)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS, metavar="OP")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="of the default cases")
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, metavar="NAME")
    parser.add_argument("--variants", action="store_true", help="every configuration of ours too")
    options = parser.parse_args(arguments)
    if options.dry_run:
        use_dry_run(options)
    if not chosen_cases(options):
        parser.error("no case has such a shape, op and distribution")
    return options


def chosen_cases(options: argparse.Namespace) -> list[Fp8Case]:
    """The default cases that the options leave."""
    cases = tiny_cases(options.seed) if options.dry_run else default_cases(options.seed)
    return [
        case
        for case in cases
        if case.op in options.ops
        and case.shape.name in (options.shapes or [case.shape.name])
        and case.distribution in (options.distributions or [case.distribution])
    ]


def plan_jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job a case."""
    peers = all_peers(options.variants)
    inputs = LatestInputs(lambda shape: ScaledInputs(shape, options.seed))

    def measure(case: Fp8Case) -> dict:
        of_shape = inputs.of(case.shape)
        if case.op == STEP:
            return measure_step(case, of_shape.sources, session)
        if case.op not in PRODUCTS:
            return measure_quantizer(case, of_shape.sources, session)
        return measure_case(
            case.product,
            of_shape,
            peers,
            session.recorder,
            rounds=options.rounds,
            flush=session.flush,
            measure_host=not options.no_host,
        )

    return [Job(case.name, functools.partial(measure, case)) for case in chosen_cases(options)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parse_arguments(arguments)
    command = ["benchmarks.fp8", *(sys.argv[1:] if arguments is None else arguments)]
    with open_session(command, options) as session:
        session.measure(plan_jobs(options, session))


if __name__ == "__main__":
    leave_memory_to_torch()
    main()
