"""Runs a compiler and keeps what it prints of its source file.

Usage: log_compiler.py LOG_DIR COMMAND...

The messages go to LOG_DIR/<name of the source>.log as well as to stderr.
"""

import subprocess
import sys
from pathlib import Path


def run(log_dir: str, *command: str) -> int:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sys.stderr.write(result.stdout)
    source = Path(command[command.index("-c") + 1])
    log = Path(log_dir, f"{source.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(result.stdout)
    return result.returncode


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
