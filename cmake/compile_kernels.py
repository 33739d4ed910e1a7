"""Runs a CUDA compiler, paces the additions of FP8 kernels, and keeps what was said of the source.

Usage: compile_kernels.py LOG_DIR COMMAND...

The messages go to LOG_DIR/<name of the source>.log as well as to stderr.
"""

import subprocess
import sys
from pathlib import Path

from pace_additions import pace


def run(log_dir: str, *command: str) -> int:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    messages = result.stdout
    if result.returncode == 0:
        paced = pace(Path(_after("-o", command)))
        if paced:
            messages += f"Additions paced: {paced} instructions\n"
    sys.stderr.write(messages)
    log = Path(log_dir, f"{Path(_after('-c', command)).name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(messages)
    return result.returncode


def _after(option: str, command: tuple[str, ...]) -> str:
    return command[command.index(option) + 1]


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
