"""A process under compute-sanitizer, and what the tool says of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# About 130 with each of the 65 calls as it is: kernels are 20 to 50 times as slow.
MISFITS = 65
ERRORS_FOUND = 86  # the exit status
INSTALLED = "/usr/local/cuda/bin/compute-sanitizer"
MOST_LINES = 12  # of a report that are kept


def prefix(tool: str, log: Path) -> list[str]:
    """The words to put before the command.

    Raises:
      FileNotFoundError: compute-sanitizer is not installed.
    """
    program = shutil.which("compute-sanitizer") or shutil.which(INSTALLED)
    if program is None:
        raise FileNotFoundError("compute-sanitizer is not installed")
    # Calls of the driver's interface that fail are how libraries ask what it has.
    options = ["--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--log-file", str(log)]
    return [program, *options, *(["--report-api-errors", "no"] if tool == "memcheck" else [])]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """XLA compiles in one thread, and every array is an allocation, with an end that is known."""
    flags = f"{inherited.get('XLA_FLAGS', '')} --xla_gpu_force_compilation_parallelism=1"
    return {"XLA_FLAGS": flags.strip(), "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def summary(log: Path) -> tuple[dict[str, Any], list[str]]:
    """How many errors the tool found, and failures: its first lines, or that it says nothing."""
    text = log.read_text() if log.exists() else ""
    found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
    if not found:
        return {"sanitizer_errors": None}, ["the sanitizer has no summary", *_first_lines(text)]
    errors = sum(int(number) for each in found for number in each if number)
    return {"sanitizer_errors": errors}, _first_lines(text) if errors else []


def _first_lines(text: str) -> list[str]:
    lines = [line.removeprefix("=========").strip() for line in text.splitlines()]
    return [line for line in lines if line][:MOST_LINES]
