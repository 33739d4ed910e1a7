"""Processes that take turns: the children import nothing that is slow."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def outcome(turn, log: Path, what: str) -> None:
    """What becomes of one process."""
    turn.wait()
    with log.open("a") as file:
        file.write(f"begin {what}\n")
        file.flush()
        time.sleep(0.1)
        file.write(f"end {what}\n")
    if what == "hang":
        time.sleep(60)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fail":
        raise SystemExit(3)


def test_processes_take_turns_and_one_that_fails_leaves_the_others_theirs(tmp_path):
    from benchmarks.tune_quack_moe import take_turns

    log = tmp_path / "log"
    names = ["first", "crash", "fail", "last"]
    found = dict(take_turns(outcome, {name: (log, name) for name in names}, seconds=60))
    expected = {"first": "", "crash": "exit code -9", "fail": "exit code 3", "last": ""}
    assert list(found.items()) == list(expected.items())
    assert log.read_text().split() == [x for name in names for x in ("begin", name, "end", name)]


def test_a_process_that_hangs_is_ended(tmp_path):
    from benchmarks.tune_quack_moe import take_turns

    start = time.monotonic()
    found = list(take_turns(outcome, {"hang": (tmp_path / "log", "hang")}, seconds=2))
    assert found == [("hang", "took more than 2 s")] and time.monotonic() - start < 50
