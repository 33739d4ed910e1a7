"""Measures FP8 products and their peers, quantisers, and steps of training.

python -m benchmarks.fp8 --output benchmarks/results/fp8.json
"""

import argparse
import functools

from benchmarks.fp8 import quantizers, step
from benchmarks.fp8.cases import OPS, PRODUCTS, STEP, default_cases, tiny_cases
from benchmarks.harness.bandwidth import Bandwidth, copy_call
from benchmarks.harness.cases import DISTRIBUTIONS, Case
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.fp8_inputs import ScaledInputs
from benchmarks.harness.inputs import LatestInputs
from benchmarks.harness.measure import ragged_work
from benchmarks.harness.peer import Peer
from benchmarks.harness.session import Job, Session, leave_memory_to_torch
from benchmarks.peers.ours_fp8 import OursBf16, OursRowwise, OursScaled
from benchmarks.peers.torch_scaled import DenseScaledMm, TorchScaledGroupedMm


def peers() -> list[Peer]:
    """Returns the peers, in the order of the tables.

    A peer whose scaling differs from that of the case quantises the same data itself. Its result is
    checked against the product of its own operands.
    """
    return [
        OursScaled(),
        OursRowwise(),
        OursRowwise(fast_accumulation=True),
        OursBf16(),
        TorchScaledGroupedMm(),
        DenseScaledMm("cublas_dense", fast_accumulation=True),
        DenseScaledMm("cublas_dense_exact", fast_accumulation=False),
        Bandwidth("copy", copy_call),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--ops", OPS)
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only cases of these shapes")
    add_choices(parser, "--distributions", DISTRIBUTIONS)


def complete(options: argparse.Namespace) -> None:
    cases = tiny_cases(options.seed) if options.dry_run else default_cases(options.seed)
    options.cases = [
        case
        for case in cases
        if case.op.name in options.ops
        and case.shape.name in (options.shapes or [case.shape.name])
        and case.distribution in options.distributions
    ]
    if not options.cases:
        raise ValueError("no case has such a shape, op and distribution")


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    of_products = peers()
    inputs = LatestInputs(lambda shape: ScaledInputs(shape, options.seed))

    def measure(case: Case) -> dict:
        of_shape = inputs.of(case.shape)
        if case.op.name == STEP:
            return session.compare(step.work(case, of_shape.sources), step.peers())
        if case.op.name not in PRODUCTS:
            work = quantizers.work(case, of_shape.sources)
            return session.compare(work, quantizers.peers(case.op.name))
        return session.compare(ragged_work(case, of_shape), of_products)

    return [Job(case.name, functools.partial(measure, case)) for case in options.cases]


COMMAND = Command("benchmarks.fp8", __doc__, jobs, add_arguments, complete, time_limit=600)

if __name__ == "__main__":
    leave_memory_to_torch()
    COMMAND.main()
