"""Paces the float32 additions of the FP8 kernels, which run between products.

An FP8 kernel adds the products of each step to float32 sums while another warpgroup has the tensor
cores. Additions and tensor cores both read registers, and the tensor cores wait while additions
issue without a break. ptxas makes every other addition yield to another warp, so that the next
addition reads its scale again. This module instead makes every addition leave its scale in the
reuse cache, and now and then an addition stall for one more cycle. PTX cannot ask for this.
docs/notes/fp8.md has the gain.

DeepGEMM (github.com/deepseek-ai/DeepGEMM) was the first to change how such additions are scheduled
in compiled code. Results stay the same, bit for bit: nothing is reordered, no stall gets shorter
than what the compiler found necessary, and a source that has left the reuse cache is read again.

Registers are in two banks, odd and even. Each bank gives two sources at a time (Jia et al., see
machine_code.py), so an addition whose three sources are in one bank takes a cycle more. Such
additions are counted, because ptxas has chosen such registers after changes of unrelated code: 28
of the 128 additions of a kernel cost 4 % of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from machine_code import ALWAYS, ZERO_REGISTER, Instruction, functions

_FFMA, _FMUL = 0x223, 0x220
_LEAST_RUN = 16
_MOST_BETWEEN = 5  # other instructions, which load scales or count


def pace(path: Path, period: int) -> int:
    """Paces the additions of an object file's kernels. Returns how many instructions are paced.

    One addition in `period` pauses.
    """
    binary = bytearray(path.read_bytes())
    paced = 0
    for _, offsets in functions(binary):
        instructions = [Instruction.read(binary, offset) for offset in offsets]
        paced += pace_instructions(instructions, period)
        for instruction, offset in zip(instructions, offsets, strict=True):
            instruction.write(binary, offset)
    if paced:
        path.write_bytes(binary)
    return paced


def count_of_one_bank(path: Path) -> int:
    """Returns how many additions of an object file's kernels read three registers of one bank."""
    binary = path.read_bytes()
    count = 0
    for _, offsets in functions(binary):
        instructions = [Instruction.read(binary, offset) for offset in offsets]
        paced = (instructions[index] for run in _runs(instructions) for index in run)
        count += sum(map(_is_of_one_bank, paced))
    return count


def _is_of_one_bank(instruction: Instruction) -> bool:
    sources = (instruction.first_source, instruction.second_source, instruction.third_source)
    return (
        instruction.operation == _FFMA
        and len(set(sources)) == len(sources)
        and len({source % 2 for source in sources}) == 1
    )


def pace_instructions(instructions: Sequence[Instruction], period: int) -> int:
    """Makes one in `period` additions pause, in place. Returns how many instructions are paced."""
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
    """Returns the indices of the instructions of each run of multiplications and additions."""
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
    """Leaves in the reuse cache the sources that the following instruction reads in the same place.

    Like ptxas, it leaves none if the following instruction waits first.
    """
    if following.wait_mask:
        return
    pairs = (
        (instruction.first_source, following.first_source),
        (instruction.second_source, following.second_source),
    )
    for slot, (source, next_source) in enumerate(pairs):
        if source == next_source and source not in (instruction.destination, ZERO_REGISTER):
            instruction.reuse |= 1 << slot
