"""Records the temporary memory that XLA plans for our ragged dot and for JAX's.

python -m benchmarks.memory --target-config tests/data/h200_target_config.txtpb

With `--target-config` it compiles for the described GPU, so it needs no GPU.
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from benchmarks.harness import report
from benchmarks.harness.cases import OPS, Case, select_shapes
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.inputs import abstract_operands
from benchmarks.harness.measure import first_line
from benchmarks.harness.peer import Role
from benchmarks.harness.session import Job, Session
from benchmarks.peers import ours, stock


def described_device(target_config: Path) -> jax.Device:
    """Returns the GPU that a target description of XLA describes."""
    # Without this, the plugin does not load if NVIDIA's libraries are missing.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config.read_text(), topology="1x1x1"
    )
    return np.ravel(topology.devices)[0]


def record(case: Case, device: jax.Device) -> dict:
    """Returns the bytes of temporary memory of our ragged dot and of JAX's, or a compile error."""
    implementation = "xla" if device.platform == "cpu" else "cuda"
    functions = {
        "ours": (Role.OURS, ours.ragged_product(case.problem, implementation)),
        "stock": (Role.GROUPED, stock.ragged_product(case.problem)),
    }
    placed = SingleDeviceSharding(device)
    operands = [
        jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=placed)
        for operand in abstract_operands(case.problem)
    ]
    peers = {}
    for name, (role, function) in functions.items():
        try:
            size = function.lower(*operands).compile().memory_analysis().temp_size_in_bytes
            found = {"status": "measured", "temporary_bytes": size}
        except Exception as error:
            found = {"status": "failed", "reason": first_line(error)}
        peers[name] = {"role": role.value, **found}
    name, shape = f"{case.shape.name}/{case.op.name}/memory", dataclasses.asdict(case.shape)
    found = dict(case=name, shape=shape, op=case.op.name, dtype=case.dtype)
    return found | dict(compiled_for=device.device_kind, peers=peers, ratios={})


def texts(results: Mapping) -> list[str]:
    rows = [
        [case["case"], *(str(peer.get("temporary_bytes", "-")) for peer in case["peers"].values())]
        for case in results["cases"]
    ]
    return [report.table(["bytes", "ours", "stock"], rows), report.missing_lines(results["cases"])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=["main"], metavar="NAME")
    add_choices(parser, "--ops", OPS, ["forward", "dgrad", "wgrad"])
    parser.add_argument("--target-config", type=Path, metavar="TXTPB")


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    device = described_device(options.target_config) if options.target_config else jax.devices()[0]
    shapes = select_shapes(["tiny"] if options.dry_run else options.shapes)
    cases = [Case(shape, OPS[op], "uniform") for shape in shapes for op in options.ops]
    return [Job(case.name, functools.partial(record, case, device)) for case in cases]


COMMAND = Command(
    "benchmarks.memory", __doc__, jobs, add_arguments, timed=False, time_limit=1200, texts=texts
)

if __name__ == "__main__":
    COMMAND.main()
