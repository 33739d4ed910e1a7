"""Ragged products of MoE layers against everything else that can compute them.

python -m benchmarks.run --output benchmarks/results/main.json
python -m benchmarks.run --list
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import first_call, host
from benchmarks.harness.bandwidth import bandwidth_peers
from benchmarks.harness.cases import DISTRIBUTIONS, OPS, SUITES, Case, select_shapes
from benchmarks.harness.command import Command
from benchmarks.harness.inputs import Inputs, LatestInputs
from benchmarks.harness.measure import ragged_work
from benchmarks.harness.peer import Peer, Role
from benchmarks.harness.session import Job, Session, leave_memory_to_torch
from benchmarks.peers import variants
from benchmarks.peers.cublas import CublasDense, CublasLoop
from benchmarks.peers.cutlass import CutlassGrouped
from benchmarks.peers.ours import Ours, Variant
from benchmarks.peers.pallas_mgpu import PallasMgpu
from benchmarks.peers.quack import Quack
from benchmarks.peers.stock import Stock
from benchmarks.peers.tokamax import Tokamax
from benchmarks.peers.torch_grouped_mm import TorchGroupedMm


def peers(sweep: int = 3, retune: bool = False, configurations: bool = False) -> dict[str, Peer]:
    """Every peer by name, in the order in which the tables show them.

    Args:
      sweep, retune: see `Sweep`.
      configurations: whether each configuration of ours is a peer too.
    """
    count = variants.MOST if configurations else 0
    found = (
        Ours(),
        *map(Variant, range(count)),
        PallasMgpu(sweep, retune),
        TorchGroupedMm(),
        Quack(sweep, retune),
        Tokamax(sweep, retune),
        *map(CutlassGrouped, ("cooperative", "pingpong")),
        Stock(),
        CublasLoop(),
        CublasDense(),
        *bandwidth_peers(),
    )
    return {peer.name: peer for peer in found}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that other suites lack."""
    parser.add_argument(
        "--shapes", nargs="+", default=["main"], metavar="NAME", help="shapes and suites (--list)"
    )
    parser.add_argument(
        "--ops", nargs="+", default=["forward", "dgrad", "wgrad"], choices=OPS, metavar="OP"
    )
    parser.add_argument(
        "--distributions", nargs="+", default=["random"], choices=DISTRIBUTIONS, metavar="NAME"
    )
    parser.add_argument("--peers", nargs="+", choices=peers(), metavar="PEER")
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
    host.add_arguments(parser)


def complete(options: argparse.Namespace) -> None:
    """Finds the shapes."""
    host.complete(options)
    if options.dry_run:
        options.shapes, options.slow_rounds = ["tiny"], 1
    options.shapes = select_shapes(options.shapes)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """The host's times, all cases with the fast peers, and all with the slow ones next to us.

    The first take seconds; the last are what a short time limit can best do without.
    """
    known = peers(options.sweep, options.retune, options.variants)
    names = options.peers or list(known)
    chosen = [peer for name, peer in known.items() if name in names or peer.role == Role.VARIANT]
    cases = [
        Case(shape, OPS[op], distribution, options.dtype, options.seed, options.precision)
        for shape in options.shapes
        for op in options.ops
        for distribution in options.distributions
    ]
    inputs = LatestInputs(lambda shape: Inputs(shape, options.dtype, options.seed))

    def job(case: Case, peers: Sequence[Peer], rounds: int, suffix: str = "") -> Job:
        def run() -> dict:
            return session.compare(ragged_work(case, inputs.of(case.shape)), peers, rounds)

        return Job(case.name + suffix, run)

    fast = [peer for peer in chosen if not peer.slow]
    slow = [peer for peer in chosen if peer.slow]
    ours = [peer for peer in chosen if peer.name == "ours"]
    found = []
    if ours and not options.no_host:
        found += [*host.jobs(options, session), *first_call.jobs(options, session)]
    found += [job(case, fast, options.rounds) for case in cases if fast]
    return found + [
        job(case, ours + slow, options.slow_rounds, " (slow peers)") for case in cases if slow
    ]


def print_choices() -> None:
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
    for peer in peers().values():
        reason = peer.unavailable_reason()
        print(f"peer {peer.name} ({peer.role}): {f'unavailable, {reason}' if reason else 'ready'}")


COMMAND = Command(
    "benchmarks.run", __doc__, jobs, add_arguments=add_arguments, complete=complete, rounds=20
)


def main(arguments: Sequence[str] | None = None) -> dict | None:
    """Entry point."""
    options = COMMAND.parse(arguments)
    if options.list:
        return print_choices()
    return COMMAND.run(options, arguments)


if __name__ == "__main__":
    leave_memory_to_torch()
    main()
