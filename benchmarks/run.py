"""Measures ragged products of MoE layers, and all peers that can compute them.

python -m benchmarks.run --output benchmarks/results/main.json
"""

import argparse
from collections.abc import Sequence

from benchmarks.harness.bandwidth import bandwidth_peers
from benchmarks.harness.cases import DISTRIBUTIONS, OPS, SUITES, Case, select_shapes
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.inputs import Inputs, LatestInputs
from benchmarks.harness.measure import ragged_work
from benchmarks.harness.peer import Peer
from benchmarks.harness.session import Job, Session, leave_memory_to_torch
from benchmarks.peers.cublas import CublasDense, CublasLoop, TorchGroupedMm
from benchmarks.peers.ours import Ours
from benchmarks.peers.pallas_mgpu import PallasMgpu
from benchmarks.peers.quack import Quack
from benchmarks.peers.stock import Stock
from benchmarks.peers.tokamax import Tokamax


def peers(sweep: int = 3, retune: bool = False) -> dict[str, Peer]:
    """Returns all peers by name, in the order of the tables. For the arguments, see `Sweep`."""
    found = (
        Ours(),
        PallasMgpu(sweep, retune),
        TorchGroupedMm(),
        Quack(sweep, retune),
        Tokamax(sweep, retune),
        Stock(),
        CublasLoop(),
        CublasDense(),
        *bandwidth_peers(),
    )
    return {peer.name: peer for peer in found}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", default=["main"], metavar="NAME", help=f"suites: {[*SUITES]}")
    add_choices(parser, "--ops", OPS, ["forward", "dgrad", "wgrad"])
    add_choices(parser, "--distributions", DISTRIBUTIONS, ["random"])
    add_choices(parser, "--peers", peers())
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--precision", default="default", choices=("default", "highest"), help="for float32")
    add("--slow-rounds", type=int, default=3, help="rounds of slow peers")
    add("--sweep", type=int, default=3, metavar="N", help="tiles to try for peers without defaults")
    add("--retune", action="store_true", help="sweep again if the fastest tiles are known")


def complete(options: argparse.Namespace) -> None:
    if options.dry_run:
        options.shapes, options.slow_rounds = ["tiny"], 1
    options.shapes = select_shapes(options.shapes)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """Returns jobs for all cases with fast peers, then for all cases with ours and slow peers,
    which a time limit leaves out first."""
    known = peers(options.sweep, options.retune)
    chosen = [peer for name, peer in known.items() if name in options.peers]
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
    found = [job(case, fast, options.rounds) for case in cases if fast]
    return found + [
        job(case, ours + slow, options.slow_rounds, " (slow peers)") for case in cases if slow
    ]


COMMAND = Command("benchmarks.run", __doc__, jobs, add_arguments, complete, rounds=20)

if __name__ == "__main__":
    leave_memory_to_torch()
    COMMAND.main()
