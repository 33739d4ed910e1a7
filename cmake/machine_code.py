"""Reads and changes the machine code of sm_90 kernels in an object file.

NVIDIA does not document the encoding. Operations, registers and reuse flags are what its
disassembler prints. It does not print stall counts, yield flags and wait masks, for which see Jia,
Maggioni, Staiger, Scarpazza, "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking"
(2018), chapter 2. Hopper has them in the same places.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

INSTRUCTION_BYTES = 16
ALWAYS = 7  # the predicate field of an instruction without a predicate
ZERO_REGISTER = 255

_CUDA = 190  # e_machine of a cubin
_ELF_MAGIC = b"\x7fELF\x02\x01"


class _Field:
    """Some bits of an instruction."""

    def __init__(self, first: int, bits: int):
        self._first, self._mask = first, (1 << bits) - 1

    def __get__(self, instruction: Instruction, _) -> int:
        return instruction.bits >> self._first & self._mask

    def __set__(self, instruction: Instruction, value: int) -> None:
        cleared = instruction.bits & ~(self._mask << self._first)
        instruction.bits = cleared | (value & self._mask) << self._first


class Instruction:
    """One instruction, as a number of 128 bits."""

    operation = _Field(0, 12)
    predicate = _Field(12, 4)
    destination = _Field(16, 8)
    first_source = _Field(24, 8)
    second_source = _Field(32, 8)
    third_source = _Field(64, 8)

    stall = _Field(105, 4)  # cycles until the warp's next instruction may issue
    no_yield = _Field(109, 1)  # 0: prefer to issue another warp's instruction next
    wait_mask = _Field(116, 6)  # scoreboards that have to be clear before this instruction issues
    reuse = _Field(122, 4)  # a bit for each source that stays in the reuse cache

    def __init__(self, bits: int):
        self.bits = bits

    @classmethod
    def read(cls, code: bytes | bytearray, offset: int) -> Instruction:
        return cls(int.from_bytes(code[offset : offset + INSTRUCTION_BYTES], "little"))

    def write(self, code: bytearray, offset: int) -> None:
        code[offset : offset + INSTRUCTION_BYTES] = self.bits.to_bytes(INSTRUCTION_BYTES, "little")


def functions(binary: bytes | bytearray) -> Iterator[tuple[str, range]]:
    """Yields the mangled name of each kernel in an object file, and its instructions' offsets.

    It does not find compressed cubins.
    """
    start = binary.find(_ELF_MAGIC)
    while start >= 0:
        (machine,) = struct.unpack_from("<H", binary, start + 18)
        if machine == _CUDA:
            yield from _functions_of_cubin(binary, start)
        start = binary.find(_ELF_MAGIC, start + 1)


def _functions_of_cubin(binary: bytes | bytearray, start: int) -> Iterator[tuple[str, range]]:
    (headers,) = struct.unpack_from("<Q", binary, start + 40)
    size, count, names = struct.unpack_from("<HHH", binary, start + 58)
    sections = [
        struct.unpack_from("<IIQQQQ", binary, start + headers + i * size) for i in range(count)
    ]
    name_table = start + sections[names][4]
    for name, _, _, _, offset, length in sections:
        first = name_table + name
        text = binary[first : binary.index(b"\0", first)].decode()
        if text.startswith(".text."):
            yield (
                text.removeprefix(".text."),
                range(start + offset, start + offset + length, INSTRUCTION_BYTES),
            )
