"""Tests of the stress test itself, with the reference and without a GPU."""

import dataclasses
import functools
import json
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.stress import __main__ as command
from tests.stress import calls, handlers, sanitizer
from tests.stress.products import Program, run_again
from tests.stress.surroundings import SURROUNDINGS
from tests.stress.trials import IN_TURN, trial


@functools.cache
def valid_calls():
    """Records the calls once for all tests."""
    return calls.valid_calls()


def program(number: int, seed: int) -> Program:
    return Program.first_runs(seed, number, draws=2, implementation="xla", most=40)


@pytest.mark.parametrize("number", [IN_TURN.index(family) for family in dict.fromkeys(IN_TURN)])
def test_every_family_is_right_and_sees_what_is_wrong(number, rng):
    seed = int(rng.integers(2**31))
    found = program(number, seed)
    assert found.failures == []
    of_family = found.trial
    drawn = jax.device_get(found.drawn[0])
    with jax.enable_x64(of_family.x64):
        results = jax.device_get(found.run(0))
    of_family.judge(drawn, results)

    def spoiled(x):
        x = np.asarray(x)
        if x.size == 0:
            return x
        wrong = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
        return (wrong + 3 * (1 + np.abs(wrong).max())).astype(x.dtype)

    leaves, tree = jax.tree.flatten(results)
    assert any(leaf.size for leaf in leaves)
    with pytest.raises(AssertionError):
        of_family.judge(drawn, tree.unflatten(map(spoiled, leaves)))


def test_a_trial_is_made_again_from_its_number(rng):
    seed = int(rng.integers(2**31))
    for number in range(len(IN_TURN)):
        (_, one), (_, again) = (trial(seed, number, "xla", 40) for _ in "ab")
        assert one.name == again.name
        for a, b in zip(*map(jax.tree.leaves, (one.operands, again.operands)), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_other_bits_are_a_failure(rng):
    found = program(0, int(rng.integers(2**31)))
    assert run_again([(found, 0), (found, 1)]) == 2
    assert found.failures == []
    found.digests[1] = found.digests[0][::-1]
    run_again([(found, 0), (found, 1)])
    (failure,) = found.failures
    assert "run 1 has other bits" in failure and found.trial.name in failure


def test_wrong_results_of_another_program_are_a_failure(rng):
    found = program(0, int(rng.integers(2**31)))
    results = jax.device_get(found.run(0))
    assert found.is_right(0, results, "here")
    wrong = jax.tree.map(lambda x: np.asarray(x) + np.asarray(2000, x.dtype), results)
    assert not found.is_right(0, wrong, "there")
    assert "wrong there" in found.failures[-1]


def test_calls_of_every_target_are_known(extension):
    found = {call.target for call in valid_calls()}
    assert found >= calls.targets()
    assert found == set(extension.registrations()), "handlers that no operation calls"


@pytest.mark.usefixtures("extension")
def test_misfits_differ_from_the_call_in_one_thing():
    names = [field.name for field in dataclasses.fields(calls.FfiCall)]
    for call in valid_calls():
        texts = {name: repr(getattr(call, name)) for name in names}
        seen = list(handlers.misfits(call))
        assert len(seen) > 20
        for what, other in seen:
            assert what and other.target == call.target
            changed = [
                name
                for name in names
                if getattr(call, name) is not getattr(other, name)
                and repr(getattr(other, name)) != texts[name]
            ]
            assert changed, what
            assert set(changed) <= {"operands", "results", "attributes", "aliases"}
            assert len(set(changed) - {"aliases"}) <= 1, (what, changed)


def test_what_handlers_did_is_summed_up():
    def line(change, **outcome):
        return {"target": "t", "change": change} | outcome

    lines = [
        line("as it is"),
        line("as it is", ran=""),
        line("a"),
        line("a", refused="INVALID_ARGUMENT: no", by="handler"),
        line("b"),
        line("b", ran=""),
    ]
    found = handlers.summary(lines, 0)
    assert found["failures"] == [] and found["calls"] == 3
    assert found["ran"] == 2 and found["ran_though_changed"] == ["t, b"]
    crashed = handlers.summary([*lines, line("c")], -11)
    (failure,) = crashed["failures"]
    assert "-11" in failure and "'c'" in failure
    fatal = handlers.summary([*lines, line("d", fatal="illegal address", by="handler")], 0)
    assert "illegal address" in fatal["failures"][0]
    refused = handlers.summary([line("as it is", refused="no", by="compiler")], 0)
    assert "does not run" in refused["failures"][0]


@pytest.mark.usefixtures("extension")
def test_all_parts_on_any_machine(capsys, rng):
    found = command.main(["--dry-run", "--seed", str(rng.integers(2**31))])
    assert list(found) == ["products", *SURROUNDINGS, "handlers"]
    assert all(part["failures"] == [] for part in found.values())
    assert found["products"]["products"] == 42
    assert sum(found["products"]["programs_by_family"].values()) == len(IN_TURN)
    for name in SURROUNDINGS:
        assert found[name]["products"] > 0, name
    assert found["handlers"]["calls"] >= 30
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["part"] for line in lines] == list(found)


@pytest.mark.parametrize("said", ["it ran", RuntimeError("no such thing")])
def test_a_failure_ends_with_an_error(said, monkeypatch):
    def call(options):
        if isinstance(said, Exception):
            raise said
        return {"failures": [said]}

    monkeypatch.setattr(command, "call_handlers", call)
    with pytest.raises(SystemExit, match=f"1 failures.*{said}"):
        command.main(["--dry-run", "--only", "handlers"])


def test_random_operands_have_the_shape_and_dtype(rng):
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn, np.int32, np.complex64, bool, np.uint8):
        aval = jax.ShapeDtypeStruct((3, 5), dtype)
        operand = calls.random_operand(rng, aval)
        assert operand.shape == aval.shape and operand.dtype == aval.dtype


SANITIZER = """#!/usr/bin/env python3
import json, os, sys
arguments = sys.argv[1:]
json.dump([arguments, dict(os.environ)], open(os.environ["SEEN"], "w"))
log = arguments[arguments.index("--log-file") + 1]
errors = int(os.environ["ERRORS"])
with open(log, "w") as file:
    print("========= COMPUTE-SANITIZER", file=file)
    if errors > 0:
        print("========= Invalid __global__ read of size 16 bytes", file=file)
    if errors >= 0:
        print(f"========= ERROR SUMMARY: {errors} errors", file=file)
for outcome in ({}, {"ran": ""}):
    print(json.dumps({"target": "t", "change": "as it is"} | outcome))
sys.exit(86 if errors else 0)
"""


@pytest.mark.parametrize("errors", [0, 2, -1])
def test_only_the_handlers_run_under_a_sanitizer(errors, tmp_path, monkeypatch, capsys):
    """A script in the sanitizer's place records its arguments. For -1 it writes no summary."""
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    seen = tmp_path / "seen.json"
    monkeypatch.setenv("SEEN", str(seen))
    monkeypatch.setenv("ERRORS", str(errors))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if errors:
        with pytest.raises(SystemExit, match="failures"):
            command.main(["--sanitizer", "memcheck"])
    else:
        command.main(["--sanitizer", "memcheck"])
    found = json.loads(capsys.readouterr().out)
    assert found["part"] == "handlers" and found["ran"] == 1
    assert found["sanitizer_errors"] == (None if errors < 0 else errors)
    assert any("Invalid __global__ read" in x for x in found["failures"]) == (errors > 0)
    assert any("no summary" in x for x in found["failures"]) == (errors < 0)
    arguments, environment = json.loads(seen.read_text())
    assert arguments[:2] == ["--tool", "memcheck"]
    assert arguments[-2:] == ["--threads", "1"] and "tests.stress.handlers" in arguments
    assert int(arguments[arguments.index("--count") + 1]) <= sanitizer.MISFITS
    assert environment["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert environment["XLA_FLAGS"].split() == [
        "--xla_cpu_use_fusion_emitters=true",
        "--xla_gpu_force_compilation_parallelism=1",
    ]


def test_without_a_sanitizer_nothing_is_said_to_be_clean(monkeypatch):
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="compute-sanitizer is not installed"):
        command.main(["--sanitizer", "racecheck"])


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("threads", [1, 3])
def test_calls_are_the_same_however_many_threads_compile(threads, monkeypatch):
    """With one thread, the main thread compiles, so nothing else runs at the same time."""
    busy = []

    def compiled(call):
        busy.append(threading.current_thread() is threading.main_thread())

    few = valid_calls()[:7]
    monkeypatch.setattr(handlers, "compiled", compiled)
    monkeypatch.setattr(handlers, "chosen", lambda seed, count: [("as it is", x) for x in few])
    lines = list(handlers.attempts(0, 0, 60, threads))
    assert [line["target"] for line in lines[1::2]] == [call.target for call in few]
    assert busy == [threads == 1] * 7
