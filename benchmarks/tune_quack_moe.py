"""Finds the fastest of QuACK's configurations for each product of the layers of `benchmarks.moe`.

python -m benchmarks.tune_quack_moe

They are kept in `results/quack_moe_configs.json`, product by product. Each layer has a process of
its own, so that one that crashes or hangs leaves the others theirs; started again, what is known is
kept. Kernels are compiled by QuACK's own processes, QUACK_COMPILE_WORKERS of them or one a core,
and kept in QUACK_CACHE_DIR for later runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event

from benchmarks.harness.session import leave_memory_to_torch
from benchmarks.moe import LAYERS, Layer, Problem, operands
from benchmarks.peers.quack import CONFIGS
from benchmarks.peers.quack_moe import QuackLayer


def tune(turn: Event, layer: Layer, sweep: int, retune: bool, seed: int) -> None:
    """Finds one layer's configurations in this process, once it is its turn on the GPU."""
    peer = QuackLayer(tuned=True, sweep=sweep, retune=retune)
    with contextlib.suppress(ImportError):
        importlib.import_module("quack.gemm_interface")  # Takes seconds, and no GPU.
    turn.wait()
    start = time.monotonic()
    leave_memory_to_torch()
    if reason := peer.unavailable_reason():
        raise SystemExit(reason)
    detail = peer.prepare(Problem(layer, "moe_step"), *operands(layer, seed)).detail
    found = "\n  ".join(detail.split("; "))
    print(f"{layer.name}, {time.monotonic() - start:.0f} s\n  {found}", flush=True)


def take_turns(
    target: Callable[..., None], arguments: Mapping[str, Sequence], seconds: float
) -> Iterator[tuple[str, str]]:
    """Runs `target` of an event and each of the arguments, each in a process of its own.

    All start at once, and one at a time finds its event set, for so many seconds at most. Yields
    the name of each, and why it failed or "".
    """
    context = multiprocessing.get_context("spawn")
    waiting = {}
    try:
        for name, given in arguments.items():
            turn = context.Event()
            process = context.Process(target=_in_own_group, args=(target, turn, *given))
            process.start()
            waiting[name] = process, turn
        for name in arguments:
            process, turn = waiting[name]
            turn.set()
            process.join(seconds)
            code = process.exitcode
            _end(process)
            del waiting[name]
            if code is None:
                yield name, f"took more than {seconds:.0f} s"
            else:
                yield name, f"exit code {code}" if code else ""
    finally:
        for process, _ in waiting.values():
            _end(process)


def _in_own_group(target: Callable[..., None], *arguments: object) -> None:
    os.setsid()
    target(*arguments)


def _end(process: SpawnProcess) -> None:
    """With whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Tunes the layers, one after the other; 1 if any failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune_quack_moe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS, metavar="NAME")
    parser.add_argument(
        "--sweep",
        type=int,
        default=2 * len(CONFIGS),
        metavar="N",
        help="configurations tried a product, likely ones first (all)",
    )
    parser.add_argument("--retune", action="store_true", help="sweep again where known")
    parser.add_argument("--seed", type=int, default=0, help="of the data and the routing")
    parser.add_argument(
        "--time-limit", type=float, default=300, metavar="SECONDS", help="of a layer"
    )
    options = parser.parse_args(arguments)
    each = {
        name: (LAYERS[name], options.sweep, options.retune, options.seed) for name in options.layers
    }
    failed = False
    for name, reason in take_turns(tune, each, options.time_limit):
        if reason:
            failed = True
            print(f"{name}: {reason}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
