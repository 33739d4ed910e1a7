"""Command line: measures cases within a time limit and writes a table and a JSON file."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import host
from benchmarks.cases import DISTRIBUTIONS, OPS, SUITES, Case, select_shapes
from benchmarks.inputs import Inputs, LatestInputs
from benchmarks.measure import measure_case
from benchmarks.peers import all_peers
from benchmarks.peers.base import Peer, Role
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    add_options(parser)
    parser.add_argument(
        "--shapes", nargs="+", default=["main"], metavar="NAME", help="shapes and suites (--list)"
    )
    parser.add_argument(
        "--ops", nargs="+", default=["forward", "dgrad", "wgrad"], choices=OPS, metavar="OP"
    )
    parser.add_argument(
        "--distributions", nargs="+", default=["random"], choices=DISTRIBUTIONS, metavar="NAME"
    )
    parser.add_argument("--peers", nargs="+", choices=all_peers(), metavar="PEER")
    parser.add_argument(
        "--variants",
        action="store_true",
        help="measure our kernel in every compiled configuration too",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--precision",
        default="default",
        choices=("default", "highest"),
        help="of float32 operands: TF32's or float32's",
    )
    parser.add_argument("--slow-rounds", type=int, default=3, help="rounds of slow peers")
    parser.add_argument(
        "--sweep",
        type=int,
        default=3,
        metavar="N",
        help="configurations tried a problem of the peers that leave their tiles to the caller",
    )
    parser.add_argument("--retune", action="store_true", help="sweep again where known")
    parser.add_argument("--list", action="store_true", help="print the choices and stop")
    parser.add_argument(
        "--chain", type=int, default=100, metavar="N", help="products of the host time's slope"
    )
    options = parser.parse_args(arguments)
    if options.dry_run:
        use_dry_run(options)
        options.shapes, options.slow_rounds, options.chain = ["tiny"], 1, 2
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


def plan_jobs(options: argparse.Namespace, peers: Sequence[Peer], session: Session) -> list[Job]:
    """All cases with the fast peers, then all cases with the slow ones next to us.

    The second pass comes last because it is what a short time limit can best do without.
    """
    cases = [
        Case(shape, OPS[op], distribution, options.dtype, options.seed, options.precision)
        for shape in options.shapes
        for op in options.ops
        for distribution in options.distributions
    ]
    inputs = LatestInputs(lambda shape: Inputs(shape, options.dtype, options.seed))

    def job(case: Case, peers: Sequence[Peer], rounds: int, suffix: str = "") -> Job:
        def run() -> dict:
            return measure_case(
                case,
                inputs.of(case.shape),
                peers,
                session.recorder,
                rounds=rounds,
                flush=session.flush,
                measure_host=not options.no_host,
            )

        return Job(case.name + suffix, run)

    fast = [peer for peer in peers if not peer.slow]
    slow = [peer for peer in peers if peer.slow]
    ours = [peer for peer in peers if peer.name == "ours"]
    jobs = [job(case, fast, options.rounds) for case in cases if fast]
    return jobs + [
        job(case, ours + slow, options.slow_rounds, " (slow peers)") for case in cases if slow
    ]


def measure_host(session: Session, chain: int) -> None:
    """What a product costs the host, and the first one of a process."""
    session.results["host"] = host.product_cost(session.recorder, chain)
    try:
        session.results["first_call"] = host.first_call()
    except subprocess.SubprocessError as error:
        session.results["not_measured"].append(f"first call ({error})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parse_arguments(arguments)
    peers = all_peers(options.sweep, options.retune, options.variants)
    if options.list:
        print_choices(peers)
        return
    names = options.peers or list(peers)
    chosen = [peer for name, peer in peers.items() if name in names or peer.role == Role.VARIANT]
    command = ["benchmarks.run", *(sys.argv[1:] if arguments is None else arguments)]
    with open_session(command, options) as session:
        # First, because it takes seconds and a time limit leaves out what comes last.
        if not options.no_host and "ours" in names:
            measure_host(session, options.chain)
        session.measure(plan_jobs(options, chosen, session))


if __name__ == "__main__":
    leave_memory_to_torch()
    main()
