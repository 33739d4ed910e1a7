"""Tests of what the build changes in the machine code of FP8 kernels, and what it leaves."""

from __future__ import annotations

import struct
import sys

import compile_kernels
import machine_code
import pace_additions
import pytest

FFMA, FMUL, FADD, LDS = 0x223, 0x220, 0x221, 0x984
# ptxas wrote this: FFMA R201, R24, R107, R201, yields, one cycle, no reuse.
FFMA_OF_PTXAS = 0x000FC200000000C90000006B18C97223


def instruction(operation, destination=1, first=2, second=3, **fields):
    made = machine_code.Instruction(0)
    made.operation, made.predicate = operation, machine_code.ALWAYS
    made.destination, made.first_source, made.second_source = destination, first, second
    made.third_source = destination
    made.stall = 1
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def additions(count, **fields):
    """Returns additions of different products, times the same factor, to different sums."""
    return [
        instruction(FFMA, destination=100 + i, first=20 + i, second=7, **fields)
        for i in range(count)
    ]


def bits(instructions):
    return [each.bits for each in instructions]


def test_fields_of_an_instruction():
    one = machine_code.Instruction(FFMA_OF_PTXAS)
    assert (one.operation, one.predicate, one.stall, one.no_yield) == (FFMA, 7, 1, 0)
    assert (one.destination, one.first_source, one.second_source) == (201, 24, 107)
    assert one.third_source == 201
    assert (one.wait_mask, one.reuse) == (0, 0)


@pytest.mark.parametrize(
    "name",
    "operation predicate destination first_source second_source third_source "
    "stall no_yield wait_mask reuse".split(),
)
def test_a_field_is_written_and_no_other(name, rng):
    before = int.from_bytes(rng.bytes(16), "little")
    one = machine_code.Instruction(before)
    value = getattr(one, name)
    setattr(one, name, 0)
    assert getattr(one, name) == 0
    setattr(one, name, value)
    assert one.bits == before


@pytest.mark.parametrize("period", [1, 2, 3, 10])
def test_every_so_many_additions_pause(period):
    code = additions(40, no_yield=0)
    assert pace_additions.pace_instructions(code, period) == 40
    assert all(each.no_yield for each in code)
    pauses = [i for i, each in enumerate(code) if each.stall == 2]
    assert pauses == list(range(period - 1, 40, period))
    assert all(each.stall in (1, 2) for each in code)


def test_a_stall_never_gets_shorter():
    code = additions(20)
    code[3].stall = code[9].stall = 6
    pace_additions.pace_instructions(code, 10)
    assert code[3].stall == code[9].stall == 6


def test_what_the_next_one_reads_is_reused():
    code = additions(20)
    pace_additions.pace_instructions(code, 10)
    second = 2
    assert [each.reuse for each in code] == [second] * 19 + [0]


def test_what_is_overwritten_is_not_reused():
    code = additions(20)
    code[5].destination = 7
    pace_additions.pace_instructions(code, 10)
    assert code[4].reuse and not code[5].reuse and code[6].reuse


def test_one_that_waits_or_reads_it_elsewhere_reuses_nothing():
    code = additions(20)
    code[5].wait_mask = 1
    code[11].first_source, code[11].second_source = 7, 31
    pace_additions.pace_instructions(code, 10)
    assert not code[4].reuse and not code[10].reuse and not code[11].reuse


def test_reuse_flags_of_the_compiler_stay():
    # The next instruction is a load. The addition after it still finds the source in the cache.
    code = [*additions(10), instruction(LDS), *additions(10)]
    code[9].reuse = 2
    pace_additions.pace_instructions(code, 10)
    assert code[9].reuse == 2


def test_a_few_other_instructions_do_not_end_a_run():
    code = [each for one in additions(20) for each in (one, *[instruction(LDS)] * 5)]
    assert pace_additions.pace_instructions(code, 10) == 20


def test_other_instructions_stay_as_they_are(rng):
    others = [machine_code.Instruction(int.from_bytes(rng.bytes(16), "little")) for _ in range(6)]
    for each in others:
        each.operation = LDS
    code = [*others[:3], *additions(20), *others[3:]]
    pace_additions.pace_instructions(code, 10)
    assert bits([*code[:3], *code[-3:]]) == bits(others)


@pytest.mark.parametrize(
    "code",
    [
        additions(15),
        [each for one in additions(20) for each in (one, *[instruction(LDS)] * 6)],
        [instruction(FMUL, destination=i, first=i) for i in range(40)],
        [instruction(FADD, destination=i, first=i) for i in range(40)],
        additions(40, predicate=1),
    ],
    ids=["few", "far apart", "multiplications alone", "sums alone", "predicated"],
)
def test_other_code_stays_as_it_is(code):
    before = bits(code)
    assert pace_additions.pace_instructions(code, 3) == 0
    assert bits(code) == before


def cubin(name, code):
    """Returns a cubin with one kernel."""
    names = b"\0.text." + name.encode() + b"\0.names\0"
    text = b"".join(each.bits.to_bytes(16, "little") for each in code)
    headers = 64 + len(names) + len(text)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", header, 18, 190)
    struct.pack_into("<Q", header, 40, headers)
    struct.pack_into("<HHH", header, 58, 64, 2, 0)
    sections = struct.pack("<IIQQQQ", len(names) - 7, 3, 0, 0, 64, len(names)).ljust(64, b"\0")
    sections += struct.pack("<IIQQQQ", 1, 1, 0, 0, 64 + len(names), len(text)).ljust(64, b"\0")
    return bytes(header) + names + text + sections


def test_all_kernels_of_an_object_are_changed(tmp_path):
    kernels = [cubin("_Z3one", additions(32)), cubin("_Z5other", additions(16))]
    path = tmp_path / "object.o"
    path.write_bytes(b"host code" + kernels[0] + b"between" + kernels[1] + b"after")
    assert pace_additions.pace(path, 10) == 48
    after = path.read_bytes()
    assert after.startswith(b"host code") and after.endswith(b"after")
    assert after[9 : 9 + len(kernels[0])] != kernels[0]
    assert after[9 + len(kernels[0]) :].startswith(b"between")
    assert pace_additions.pace(path, 10) == 48
    assert path.read_bytes() == after


@pytest.mark.parametrize(
    "sources, of_one_bank",
    [
        ((8, 9, 20), 0),
        ((8, 9, 21), 0),
        ((9, 8, 20), 0),
        ((7, 9, 21), 1),
        ((8, 10, 20), 1),
        ((7, 7, 21), 0),
    ],
)
def test_additions_that_read_one_bank_are_counted(tmp_path, sources, of_one_bank):
    first, second, third = sources
    path = tmp_path / "object.o"
    others = [instruction(FFMA, 101 + 2 * i, 20 + 2 * i, 7) for i in range(20)]
    one = instruction(FFMA, third, first, second)
    path.write_bytes(cubin("_Z6kernel", [*others, one, instruction(FMUL, 7, 9, 11)]))
    assert pace_additions.count_of_one_bank(path) == of_one_bank


def test_an_object_without_kernels_stays_as_it_is(tmp_path, rng):
    path = tmp_path / "object.o"
    content = rng.bytes(1000)
    path.write_bytes(content)
    assert pace_additions.pace(path, 10) == 0
    assert path.read_bytes() == content


def compile_with(tmp_path, compiler, *options):
    """Runs a compiler, a Python program that gets the path of the object to write."""
    program = tmp_path / "compiler.py"
    program.write_text("import sys\noutput = sys.argv[sys.argv.index('-o') + 1]\n" + compiler)
    command = (sys.executable, str(program), *options)
    command += ("-c", "some/kernel.cu", "-o", str(tmp_path / "out.o"))
    status = compile_kernels.run(str(tmp_path / "logs"), *command)
    return status, (tmp_path / "logs" / "kernel.cu.log").read_text()


PACED = "-DJGG_ADDITIONS_PER_PAUSE=3"


def test_what_the_compiler_wrote_is_paced_and_logged(tmp_path):
    content = cubin("_Z6kernel", additions(32))
    status, log = compile_with(
        tmp_path, f"open(output, 'wb').write({content!r})\nprint('no spills')\n", PACED
    )
    assert (status, log) == (0, "no spills\nAdditions paced: 32 instructions, 16 of one bank\n")
    assert (tmp_path / "out.o").read_bytes() != content


def test_additions_pause_as_often_as_the_command_says(tmp_path):
    content = cubin("_Z6kernel", additions(32))
    compile_with(tmp_path, f"open(output, 'wb').write({content!r})\n", PACED)
    binary = (tmp_path / "out.o").read_bytes()
    ((_, offsets),) = machine_code.functions(binary)
    stalls = [machine_code.Instruction.read(binary, offset).stall for offset in offsets]
    assert [i for i, stall in enumerate(stalls, start=1) if stall == 2] == list(range(3, 33, 3))


def test_the_build_fails_where_there_is_nothing_to_pace(tmp_path):
    status, log = compile_with(tmp_path, "open(output, 'w').write('x')\n", PACED)
    assert status != 0
    assert "no additions of an FP8 product were found" in log


def test_other_objects_are_logged_alone(tmp_path):
    content = cubin("_Z6kernel", additions(32))
    status, log = compile_with(
        tmp_path, f"open(output, 'wb').write({content!r})\nprint('no spills')\n"
    )
    assert (status, log) == (0, "no spills\n")
    assert (tmp_path / "out.o").read_bytes() == content


def test_a_compiler_that_fails_is_reported(tmp_path):
    status, log = compile_with(tmp_path, "print('no such header')\nsys.exit(3)\n")
    assert (status, log) == (3, "no such header\n")
