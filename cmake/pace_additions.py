"""Paces the float32 additions of the FP8 kernels, between whose products they run.

An FP8 kernel adds the products of each step to float32 sums while another warpgroup has the tensor
cores. Both read registers, and the tensor cores wait while additions issue without a break. ptxas
has every other addition yield to another warp, so that the next one reads its scale again. Here
every addition leaves it in the reuse cache, and now and then one stalls for a cycle more instead,
as no PTX can ask for. What that gives is in docs/notes/fp8.md.

DeepGEMM (github.com/deepseek-ai/DeepGEMM) was the first to change how such additions are scheduled
in compiled code. Results stay the same, bit for bit: nothing is reordered, no stall gets shorter
than what the compiler found necessary, and a source that has left the reuse cache is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from machine_code import ALWAYS, ZERO_REGISTER, Instruction, functions

KERNEL = "scaled_kernel"
# One addition in so many pauses: of products, and of those that scales are multiplied by before.
ADDITIONS_PER_PAUSE = 10
SCALED_FIRST, ADDITIONS_PER_PAUSE_OF_SCALED = "ScaledContracting", 3

_FFMA, _FMUL = 0x223, 0x220
_LEAST_RUN = 16
_MOST_BETWEEN = 3  # other instructions, which load scales or count


def pace(path: Path) -> int:
    """Paces the additions of all FP8 kernels of an object file. Returns how many there are."""
    binary = bytearray(path.read_bytes())
    paced = 0
    for name, offsets in functions(binary):
        if KERNEL not in name:
            continue
        instructions = [Instruction.read(binary, offset) for offset in offsets]
        period = ADDITIONS_PER_PAUSE_OF_SCALED if SCALED_FIRST in name else ADDITIONS_PER_PAUSE
        paced += pace_instructions(instructions, period)
        for instruction, offset in zip(instructions, offsets, strict=True):
            instruction.write(binary, offset)
    if paced:
        path.write_bytes(binary)
    return paced


def pace_instructions(instructions: Sequence[Instruction], period: int) -> int:
    """Has one in `period` additions pause, in place. Returns how many instructions are paced."""
    paced = 0
    for run in _runs(instructions):
        for place, index in enumerate(run, start=1):
            instructions[index].no_yield = 1
            if place % period == 0:
                instructions[index].stall = max(instructions[index].stall, 2)
        for index, following in zip(run, run[1:], strict=False):
            if following == index + 1:
                _reuse_sources(instructions[index], instructions[following])
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


def _reuse_sources(instruction: Instruction, following: Instruction) -> None:
    """Leaves the following instruction the sources that it reads in the same place, unless it waits
    first, as ptxas does."""
    if following.wait_mask:
        return
    pairs = (
        (instruction.first_source, following.first_source),
        (instruction.second_source, following.second_source),
    )
    for slot, (source, next_source) in enumerate(pairs):
        if source == next_source and source not in (instruction.destination, ZERO_REGISTER):
            instruction.reuse |= 1 << slot
