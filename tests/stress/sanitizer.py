"""The command of a process under compute-sanitizer, and the tool's report about the process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# With the 65 valid calls there are about 130 calls. The tool makes kernels 20 to 50 times slower.
MISFITS = 65
ERRORS_FOUND = 86  # the exit status if the tool finds errors
INSTALLED = "/usr/local/cuda/bin/compute-sanitizer"
MOST_LINES = 12  # lines of a report that are kept


def prefix(tool: str, log: Path) -> list[str]:
    """Returns the words to put before a command.

    Raises:
      FileNotFoundError: compute-sanitizer is not installed.
    """
    program = shutil.which("compute-sanitizer") or shutil.which(INSTALLED)
    if program is None:
        raise FileNotFoundError("compute-sanitizer is not installed")
    # Libraries find out what the driver has by calls that may fail. Do not report these as errors.
    options = ["--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--log-file", str(log)]
    return [program, *options, *(["--report-api-errors", "no"] if tool == "memcheck" else [])]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with which XLA compiles in one thread and allocates each array separately.

    The tool knows where a separate allocation ends.
    """
    flags = f"{inherited.get('XLA_FLAGS', '')} --xla_gpu_force_compilation_parallelism=1"
    return {"XLA_FLAGS": flags.strip(), "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


def summary(log: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the number of errors in the tool's report, and the failures.

    The failures are the first lines of a report that has errors or lacks a summary.
    """
    text = log.read_text() if log.exists() else ""
    found = re.findall(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", text)
    if not found:
        return {"sanitizer_errors": None}, ["the sanitizer has no summary", *_first_lines(text)]
    errors = sum(int(number) for each in found for number in each if number)
    return {"sanitizer_errors": errors}, _first_lines(text) if errors else []


def _first_lines(text: str) -> list[str]:
    lines = [line.removeprefix("=========").strip() for line in text.splitlines()]
    return [line for line in lines if line][:MOST_LINES]
