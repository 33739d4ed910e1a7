"""Temporary memory that XLA plans for our ragged dot and for the stock one, without running either.

python -m benchmarks.memory --target-config tests/data/h200_target_config.txtpb

With `--target-config` it compiles for the described GPU, so that it needs none.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.harness.cases import OPS, Case, Problem, select_shapes
from benchmarks.harness.command import Command
from benchmarks.harness.inputs import abstract_operands
from benchmarks.harness.measure import first_line
from benchmarks.harness.peer import Role
from benchmarks.harness.session import Job, Session
from benchmarks.peers import ours, stock


def temporary_bytes(
    function: Callable[..., jax.Array], problem: Problem, device: jax.Device
) -> dict[str, object]:
    """Bytes besides operands and result, or the error that stops compilation, for a record."""
    placed = SingleDeviceSharding(device)
    operands = [
        jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=placed)
        for operand in abstract_operands(problem)
    ]
    try:
        compiled = function.lower(*operands).compile()
    except Exception as error:
        return {"status": "failed", "reason": first_line(error)}
    return {
        "status": "measured",
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def described_device(target_config: Path) -> jax.Device:
    """The GPU that one of XLA's GPU target descriptions describes."""
    # The plugin otherwise refuses to load where NVIDIA's libraries are missing.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config.read_text(), topology="1x1x1"
    )
    return np.ravel(topology.devices)[0]


def record(case: Case, device: jax.Device) -> dict:
    """A record of what both need."""
    implementation = "xla" if device.platform == "cpu" else "cuda"
    functions = {
        "ours": (Role.OURS, ours.ragged_product(case.problem, implementation)),
        "stock": (Role.GROUPED, stock.ragged_product(case.problem)),
    }
    return {
        "case": f"{case.shape.name}/{case.op.name}/memory",
        "shape": dataclasses.asdict(case.shape),
        "op": case.op.name,
        "dtype": case.dtype,
        "compiled_for": device.device_kind,
        "peers": {
            name: {"role": role.value, **temporary_bytes(function, case.problem, device)}
            for name, (role, function) in functions.items()
        },
        "ratios": {},
    }


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, int]]:
    """The most of each op."""
    found: dict[str, dict[str, int]] = {}
    for each in records:
        most = found.setdefault(each["op"], {})
        for name, peer in each["peers"].items():
            key = f"{name}_most_bytes"
            most[key] = max(most.get(key, 0), peer.get("temporary_bytes", 0))
    return found


def texts(results: Mapping) -> list[str]:
    """A line a case."""
    lines = []
    for each in results["cases"]:
        sizes = "   ".join(f"{name} {_size(peer):>12}" for name, peer in each["peers"].items())
        lines.append(f"{each['case']:30} {sizes}   ({each['compiled_for']})")
    return ["\n".join(lines)]


def _size(peer: Mapping) -> str:
    value = peer.get("temporary_bytes")
    if value is None:
        return peer["reason"]
    return f"{value} B" if value < 2**20 else f"{value / 2**20:.1f} MiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Cases, and what they are compiled for."""
    parser.add_argument("--shapes", nargs="+", default=["main"], metavar="NAME")
    parser.add_argument("--ops", nargs="+", default=["forward", "dgrad", "wgrad"], choices=OPS)
    parser.add_argument("--target-config", type=Path, metavar="TXTPB")


def complete(options: argparse.Namespace) -> None:
    """Finds the shapes."""
    options.shapes = select_shapes(["tiny"] if options.dry_run else options.shapes)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """A job a case."""
    device = described_device(options.target_config) if options.target_config else jax.devices()[0]
    cases = [Case(shape, OPS[op], "uniform") for shape in options.shapes for op in options.ops]
    return [Job(case.name, functools.partial(record, case, device)) for case in cases]


COMMAND = Command(
    "benchmarks.memory",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    complete=complete,
    timed=False,
    time_limit=1200,
    summarize=summarize,
    texts=texts,
)
main = COMMAND.main

if __name__ == "__main__":
    main()
