"""Compiles for GPUs that need not be present, and reads what XLA makes of a program."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# The description of an H200 that XLA needs to compile for it.
H200 = (Path(__file__).parents[1] / "data" / "h200_target_config.txtpb").read_text()
ALIGNMENT = 256  # bytes, of every buffer in XLA's arena

# Opcodes that run nothing on the GPU, so a program that only runs our kernels may have them.
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "custom-call"}


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: `%name = type opcode(operands), attributes`."""

    text: str
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Instruction:
        pattern = r"(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\(([^)]*)\)"
        name, type_, opcode, operands = re.match(pattern, line).groups()
        return cls(line, name, type_, opcode, tuple(re.findall(r"%([^\s,]+)", operands)))

    @property
    def kernel(self) -> str | None:
        """The name of the op if the instruction calls one of our kernels, or else None."""
        target = re.search(r'custom_call_target="jax_grouped_gemm\.(\w+)\.v\d+"', self.text)
        return target and target[1]


@dataclass(frozen=True)
class Program:
    """A compiled program: its HLO without metadata, and its memory.

    The peak includes operands, results and temporary buffers.
    """

    hlo: str
    temporary_bytes: int
    peak_bytes: int

    @property
    def kernels(self) -> Counter:
        """How often the whole program calls each of our kernels."""
        lines = self.hlo.splitlines()
        found = (re.search(r'custom_call_target="jax_grouped_gemm\.(\w+)', line) for line in lines)
        return Counter(match[1] for match in found if match)

    @property
    def entry(self) -> list[Instruction]:
        body = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", self.hlo, re.MULTILINE | re.DOTALL)[1]
        return [Instruction.parse(line.strip()) for line in body.splitlines()]

    @property
    def calls(self) -> list[Instruction]:
        """The entry computation's calls of our kernels."""
        return [instruction for instruction in self.entry if instruction.kernel]

    @property
    def opcodes(self) -> set[str]:
        """The kinds of the entry computation's instructions."""
        return {instruction.opcode for instruction in self.entry}

    def computed_operands(self) -> list[str]:
        """Returns operands of our kernels that other kernels, such as transposes, produce."""
        by_name = {instruction.name: instruction for instruction in self.entry}
        computed, seen = [], set()
        frontier = [operand for call in self.calls for operand in call.operands]
        while frontier:
            instruction = by_name[frontier.pop()]
            if instruction.name in seen or instruction.kernel:
                continue
            seen.add(instruction.name)
            if instruction.opcode in FREE:
                frontier += instruction.operands
            else:
                computed.append(instruction.text)
        return computed


class Target:
    """Compiles for GPUs that need not be present. Skips the test if JAX has no CUDA plugin."""

    def __init__(self, config: str, devices: int = 1):
        plugins = importlib.metadata.entry_points(group="jax_plugins")
        if not any(plugin.name.startswith("xla_cuda") for plugin in plugins):
            pytest.skip("the CUDA plugin is not installed")
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{devices}"
        )
        self.mesh = Mesh(np.array(topology.devices), ("x",))
        # Keep programs by what is compiled, because several tests look at the same program.
        self.programs: dict[tuple, Program] = {}

    def compile(self, function, *arguments, specs=None, donated=(), **compiler_options) -> Program:
        specs = specs or [P()] * len(arguments)

        def placed(x, spec):
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        arguments = [
            jax.tree.map(functools.partial(placed, spec=spec), argument)
            for argument, spec in zip(arguments, specs, strict=True)
        ]
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        key = lowered.as_text(), tuple(sorted(compiler_options.items()))
        if key not in self.programs:
            compiled = lowered.compile(compiler_options=compiler_options or None)
            # Remove metadata, in which names such as "transpose(jvp(...))" look like operations.
            hlo = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
            memory = compiled.memory_analysis()
            sizes = memory.temp_size_in_bytes, memory.peak_memory_in_bytes
            self.programs[key] = Program(hlo, *sizes)
        return self.programs[key]
