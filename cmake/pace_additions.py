"""Paces the float32 additions of the FP8 kernels, between whose products they run.

An FP8 kernel adds the products of each step to float32 sums while another warpgroup has the tensor
cores. Both read registers, and the tensor cores wait while additions issue without a break. ptxas
lets another warp go first after every other addition, and what the next one reads again is then
read again. Here every addition keeps it, and now and then one pauses for a cycle instead, as no PTX
can ask for. What that gives is in benchmarks/README.md.

DeepGEMM (github.com/deepseek-ai/DeepGEMM) was the first to change how such additions are scheduled
in compiled code. Results stay the same, bit for bit: nothing is reordered, no stall gets shorter
than what the compiler found necessary, and what should have been kept but is gone is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from machine_code import ALWAYS, ZERO_REGISTER, Instruction, functions

KERNEL = "scaled_kernel"
# Additions between two pauses: of products, and of those that scales are multiplied by before.
BETWEEN_PAUSES = 9
BETWEEN_PAUSES_OF_SCALED = 2
SCALED_FIRST = "ScaledContracting"

_FFMA, _FMUL = 0x223, 0x220
_LEAST_RUN = 16
_MOST_BETWEEN = 3  # other instructions, which load scales or count


def pace(path: Path) -> int:
    """Paces the additions of all FP8 kernels of an object file. Returns how many there are."""
    binary = bytearray(path.read_bytes())
    paced = 0
    for name, offsets in functions(bytes(binary)):
        if KERNEL not in name:
            continue
        instructions = [Instruction.read(binary, offset) for offset in offsets]
        between = BETWEEN_PAUSES_OF_SCALED if SCALED_FIRST in name else BETWEEN_PAUSES
        paced += pace_instructions(instructions, between)
        for instruction, offset in zip(instructions, offsets, strict=True):
            instruction.write(binary, offset)
    if paced:
        path.write_bytes(binary)
    return paced


def pace_instructions(instructions: Sequence[Instruction], between_pauses: int) -> int:
    """Paces the additions among a kernel's instructions, in place. Returns how many there are."""
    paced = 0
    for run in _runs(instructions):
        for place, index in enumerate(run):
            _pace_one(instructions[index], pause=place % (between_pauses + 1) == between_pauses)
        for index, following in zip(run, run[1:], strict=False):
            if following == index + 1:
                _keep_sources(instructions[index], instructions[following])
        paced += len(run)
    return paced


def _runs(instructions: Sequence[Instruction]) -> list[list[int]]:
    """Stretches of multiplications and additions: the indices of each one's."""
    runs: list[list[int]] = [[]]
    for index, instruction in enumerate(instructions):
        if instruction.operation not in (_FFMA, _FMUL) or instruction.predicate != ALWAYS:
            continue
        if runs[-1] and index - runs[-1][-1] > _MOST_BETWEEN + 1:
            runs.append([])
        runs[-1].append(index)
    return [
        run
        for run in runs
        if len(run) >= _LEAST_RUN and any(instructions[i].operation == _FFMA for i in run)
    ]


def _pace_one(instruction: Instruction, pause: bool) -> None:
    instruction.stay = 1
    instruction.stall = max(instruction.stall, 2 if pause else 1)


def _keep_sources(instruction: Instruction, following: Instruction) -> None:
    """Keeps the sources that the following instruction reads in the same place, unless it waits
    first, as ptxas does."""
    if following.wait:
        return
    pairs = (
        (instruction.first_source, following.first_source),
        (instruction.second_source, following.second_source),
    )
    for slot, (source, next_source) in enumerate(pairs):
        if source == next_source and source not in (instruction.destination, ZERO_REGISTER):
            instruction.keep |= 1 << slot
