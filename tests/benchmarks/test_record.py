"""The command that runs everything: failures are recorded, parts can be repeated."""

from __future__ import annotations

import importlib.util
import json
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import fp8_training, grouped_gemm, muon, rank_k, record, run
from benchmarks.fp8 import __main__ as fp8


def code(text: str) -> str:
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(text)}"


def test_a_failure_is_recorded_and_the_rest_runs(tmp_path):
    parts = {
        "bad": (1, [code("import sys; sys.exit('broken')"), code("print('second')")]),
        "absent": (1, ["no-such-program-here"]),
        "good": (1, [code("import sys; print(sys.argv[1:])") + " {output} {limit}"]),
    }

    def statuses():
        found = json.loads((tmp_path / "record.json").read_text())
        assert found["commit"] == "abc"
        return {
            name: [outcome["status"].split(":")[0] for outcome in outcomes]
            for name, outcomes in found["parts"].items()
        }

    assert record.run_parts(parts, tmp_path, 600, "abc") is False
    assert statuses() == {"bad": ["failed", "ok"], "absent": ["failed"], "good": ["ok"]}
    assert "broken" in (tmp_path / "bad_0.log").read_text()
    assert "second" in (tmp_path / "bad_1.log").read_text()
    good = (tmp_path / "good_0.log").read_text()
    assert str(tmp_path) in good and "{" not in good
    # Repeating a part replaces it alone.
    assert record.run_parts({"bad": (1, [code("pass")])}, tmp_path, 600, "abc") is True
    assert statuses() == {"bad": ["ok"], "absent": ["failed"], "good": ["ok"]}


def test_time_is_shared_and_kept(tmp_path):
    sleepy = 1, [code("import time; time.sleep(600)")]
    start = time.monotonic()
    parts = {"sleepy": sleepy, "after": (3, [code("pass")])}
    assert record.run_parts(parts, tmp_path, 12) is False
    assert time.monotonic() - start < 60
    found = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert found["sleepy"][0]["status"] == "out of time" and found["after"][0]["status"] == "ok"


def test_a_dry_run_prints_every_command(capsys):
    names = list(record.parts())
    assert {"tests", "sanitizer", "main", "models", "skew", "fp8", "rank_k", "muon"} <= set(names)
    assert record.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if not line.startswith(" ")] == names
    assert record.main(["--dry-run", "--only", "fp8", "tests"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "tests"


ROOT = Path(__file__).parents[2]
PARSERS = {
    command.module: command.parse
    for command in (
        run.COMMAND,
        fp8.COMMAND,
        rank_k.COMMAND,
        muon.COMMAND,
        grouped_gemm.COMMAND,
        fp8_training.COMMAND,
    )
}
COMMANDS = [c for _, commands in record.parts("true", "abc").values() for c in commands]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_started(command):
    words = shlex.split(command.replace("{output}", "/tmp").replace("{limit}", "60"))
    if words[1:2] == ["-m"] and words[2] in PARSERS:
        options = PARSERS[words[2]](words[3:])
        assert options.output.suffix == ".json" and options.commit == "abc"
    elif words[1:2] == ["-m"]:
        assert importlib.util.find_spec(words[2])
    elif words[0] == "env":
        assert (ROOT / words[-1]).stat().st_mode & stat.S_IXUSR
    elif "tests.gpu.sanitizer_smoke" in words:
        assert importlib.util.find_spec(words[-1])
    else:
        assert words == ["true"]


def test_the_module_can_be_run():
    command = [sys.executable, "-m", "benchmarks.record", "--dry-run", "--only", "build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout
