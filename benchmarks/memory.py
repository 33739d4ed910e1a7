"""Temporary memory that XLA plans for our ragged dot and for the stock one, without running either.

With `--target-config` it compiles for the described GPU, so that it needs none.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from benchmarks.cases import OPS, Case, Problem, select_shapes
from benchmarks.inputs import abstract_operands
from benchmarks.peers import ours, stock


def temporary_bytes(
    function: Callable[..., jax.Array], problem: Problem, device: jax.Device
) -> int | str:
    """Bytes besides operands and result, or the first line of the error that stops compilation."""
    placed = SingleDeviceSharding(device)
    operands = [
        jax.ShapeDtypeStruct(operand.shape, operand.dtype, sharding=placed)
        for operand in abstract_operands(problem)
    ]
    try:
        compiled = function.lower(*operands).compile()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return compiled.memory_analysis().temp_size_in_bytes


def described_device(target_config: Path) -> jax.Device:
    """The GPU that one of XLA's GPU target descriptions describes."""
    # The plugin otherwise refuses to load where NVIDIA's libraries are missing.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config.read_text(), topology="1x1x1"
    )
    return np.ravel(topology.devices)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["main"], metavar="NAME")
    parser.add_argument("--ops", nargs="+", default=["forward", "dgrad", "wgrad"], choices=OPS)
    parser.add_argument("--target-config", type=Path, metavar="TXTPB")
    parser.add_argument("--output", type=Path, metavar="JSON")
    options = parser.parse_args(arguments)
    device = described_device(options.target_config) if options.target_config else jax.devices()[0]
    implementation = "reference" if device.platform == "cpu" else "cuda"

    report = {}
    cases = [
        Case(shape, OPS[op], "uniform")
        for shape in select_shapes(options.shapes)
        for op in options.ops
    ]
    for case in tqdm(cases, unit="case", disable=None):
        functions = {
            "ours": ours.ragged_product(case.problem, implementation),
            "stock": stock.ragged_product(case.problem),
        }
        report[f"{case.shape.name}/{case.op.name}"] = {
            name: temporary_bytes(function, case.problem, device)
            for name, function in functions.items()
        }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"temporary memory on {device.device_kind}")
    for name, sizes in report.items():
        print(f"{name:24} ours {_size(sizes['ours']):>12}   stock {_size(sizes['stock']):>12}")


def _size(value: int | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value} B" if value < 2**20 else f"{value / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
