"""Repeats products in hostile surroundings, which must not change the results.

Each function takes programs whose first runs were judged, and returns counts. `Program.failures`
gets wrong results, and results of the same program that have other bits than the first run.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import compute_on
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.harness.measure import first_line
from benchmarks.harness.peer import on_gpu
from tests.stress.products import Program, run_again

Counts = dict[str, Any]
ALL_RUNS = 3  # repetitions of every run of a program
THREADS = 4
GRAPH = {"xla_gpu_graph_min_graph_size": 1}
# The device memory that stays free, and the smallest array that is worth allocating.
FREE_BYTES, LEAST_BYTES = 96 << 20, 1 << 24
MOST_FAILURES = 4  # failed allocations of memory that should be free
NEIGHBOR_MEMORY = "0.08"


def all_runs(programs: Sequence[Program], times: int = 1, seed: int = 0) -> list:
    """Returns every run of the programs, `times` times, in random order."""
    runs = [(p, index) for p in programs for index in range(len(p.digests))] * times
    random.Random(seed).shuffle(runs)
    return runs


def threads(programs: Sequence[Program]) -> Counts:
    """Runs the same programs in four threads at once, in a different order in each thread."""
    counts = [0] * THREADS
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait()
        counts[thread] = run_again(all_runs(programs, ALL_RUNS, seed=thread))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"threads": THREADS, "products": sum(counts)}


def on_stream(number: int, function: Callable) -> Callable:
    """Returns a function that runs `function` on CUDA stream `number`."""
    # JAX 0.10 calls this function compute_on2, and has an older one that is called compute_on.
    compute = getattr(compute_on, "compute_on2", compute_on.compute_on)
    options: Any = dict(
        compute_type=f"gpu_stream:{number}", out_memory_spaces=jax.memory.Space.Device
    )
    return compute(function, **options)


def streams(programs: Sequence[Program]) -> Counts:
    """Runs two trials in one program, each on its own CUDA stream."""
    done, same, refused = 0, 0, []
    for first, second in zip(programs[::2], programs[1::2], strict=False):
        if first.trial.x64 or second.trial.x64:
            continue

        def both(a, b, first=first, second=second):
            return on_stream(1, first.trial.function)(*a), on_stream(2, second.trial.function)(*b)

        arguments = [(*p.operands, *p.drawn[0]) for p in (first, second)]
        try:
            program = jax.jit(both).lower(*arguments).compile()
        except Exception as error:
            refused.append(first_line(error))
            continue
        for index in range(min(len(first.drawn), len(second.drawn))):
            arguments = [(*p.operands, *p.drawn[index]) for p in (first, second)]
            results = jax.device_get(program(*arguments))
            for each, result in zip((first, second), results, strict=True):
                same += each.is_right(index, result, "on a stream of its own")
                done += 1
    counts = {"products": done, "same_bits": same}
    return counts | {"not_compiled": len(refused), "reasons": sorted(set(refused))[:3]}


def command_buffers(programs: Sequence[Program]) -> Counts:
    """Replays a recorded CUDA graph, with different group sizes in each replay."""
    done, same = 0, 0
    for program in programs:
        with jax.enable_x64(program.trial.x64):
            table = jax.tree.map(lambda *rows: jnp.stack(rows), *program.drawn)

            def of_row(operands, table, row, function=program.trial.function):
                pick = partial(jax.lax.dynamic_index_in_dim, index=row, keepdims=False)
                return function(*operands, *jax.tree.map(pick, table))

            arguments = program.operands, table
            lowered = jax.jit(of_row).lower(*arguments, jnp.int32(0))
            recorded = lowered.compile(compiler_options=GRAPH if on_gpu() else None)
            for index in [*range(len(program.drawn))] * ALL_RUNS:
                results = jax.device_get(recorded(*arguments, jnp.int32(index)))
                same += program.is_right(index, results, "in a replayed graph")
                done += 1
    return {"programs": len(programs), "products": done, "same_bits": same}


@contextlib.contextmanager
def little_memory() -> Iterator[int]:
    """Takes the device's memory except `FREE_BYTES`, and yields the number of bytes it took."""
    held: list[jax.Array] = []
    # XLA retries a failed allocation for ten seconds, so few may fail. Take the largest power of
    # two of free bytes, and half of it after each failure, because free memory may be in pieces.
    failures = 0
    while failures < MOST_FAILURES and (size := _largest_size(failures)) >= LEAST_BYTES:
        try:
            held.append(jnp.zeros(size, jnp.uint8).block_until_ready())
        except Exception:  # out of memory
            failures += 1
        if not on_gpu():
            break
    taken = sum(x.size for x in held)
    # Free the last arrays, which have different sizes, like the memory that real programs free.
    freed = 0
    while held and freed < FREE_BYTES:
        freed += held.pop().size
    try:
        yield taken - freed
    finally:
        held.clear()


def _largest_size(halvings: int) -> int:
    """Returns the largest power of two of free bytes, halved `halvings` times."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats:  # a CPU has none
        return LEAST_BYTES
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    return 1 << max(free.bit_length() - 1 - halvings, 0)


def memory(programs: Sequence[Program]) -> Counts:
    """Runs products with little memory left, and again with enough. No result may be wrong."""
    done, refused = 0, 0
    with little_memory() as taken:
        for program, index in all_runs(programs, ALL_RUNS):
            try:
                program.again(index)
                done += 1
            except Exception as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                refused += 1
    after = run_again(all_runs(programs))
    return {"bytes_taken": taken, "products": done, "out_of_memory": refused, "after": after}


def company(programs: Sequence[Program]) -> Counts:
    """Runs products while another process multiplies matrices on the same device."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")
    }
    environment["XLA_CLIENT_MEM_FRACTION"] = NEIGHBOR_MEMORY
    command = [sys.executable, "-m", "tests.stress.neighbor"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as neighbor:
        assert neighbor.stdin is not None and neighbor.stdout is not None
        begun = neighbor.stdout.readline()  # "ready", once it multiplies
        done = run_again(all_runs(programs, ALL_RUNS)) if begun else 0
        alive = neighbor.poll() is None
        neighbor.stdin.close()
        rounds = neighbor.stdout.read().strip()
    if not begun or not alive:
        raise RuntimeError(f"the other process ended with {neighbor.returncode}")
    return {"products": done, "rounds_of_the_other": int(rounds)}


def collectives(programs: Sequence[Program]) -> Counts:
    """Runs a trial and sums over all devices in one program. Neither needs the other's results."""
    devices = jax.devices()
    if len(devices) < 2:
        return {"devices": len(devices), "products": 0}
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    ones = jax.device_put(
        jnp.ones((len(devices), 1 << 22), jnp.float32), NamedSharding(mesh, PartitionSpec("x"))
    )
    done, same = 0, 0
    for program in programs:
        if program.trial.x64:
            continue
        beside = _beside_sums(program.trial.function, mesh, (*program.operands, *program.drawn[0]))
        operands = jax.device_put(program.operands, everywhere)
        for index, drawn in enumerate(program.drawn):
            total, results = beside(ones, *operands, *jax.device_put(drawn, everywhere))
            for device in range(len(devices)):
                mine = jax.tree.map(lambda x, device=device: np.asarray(x[device]), results)
                same += program.is_right(index, mine, f"beside collectives on device {device}")
                done += 1
            if not (np.asarray(total[0, :8]) == len(devices) ** 4).all():
                program.fail("a collective beside it has a wrong sum")
    return {"devices": len(devices), "products": done, "same_bits": same}


def _beside_sums(function: Callable, mesh: jax.sharding.Mesh, arguments: tuple) -> Callable:
    def of_shard(ones, *operands):
        total = ones
        for _ in range(4):
            total = jax.lax.psum(total, "x")
            total = jax.lax.pcast(total, "x", to="varying")
        operands = jax.tree.map(lambda x: jax.lax.pcast(x, "x", to="varying"), operands)
        return total, jax.tree.map(lambda x: x[None], function(*operands))

    spec = PartitionSpec("x")
    replicated = jax.tree.map(lambda _: PartitionSpec(), arguments)
    mapped = jax.shard_map(
        of_shard, mesh=mesh, in_specs=(spec, *replicated), out_specs=(spec, spec)
    )
    return jax.jit(mapped)


SURROUNDINGS: dict[str, Callable[[Sequence[Program]], Counts]] = {
    "threads": threads,
    "streams": streams,
    "command_buffers": command_buffers,
    "memory": memory,
    "company": company,
    "collectives": collectives,
}
