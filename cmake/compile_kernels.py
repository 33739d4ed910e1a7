"""Runs a CUDA compiler, paces the additions of FP8 kernels, and keeps the compiler's messages.

Usage: compile_kernels.py LOG_DIR COMMAND...

The messages go to LOG_DIR/<name of the source>.log as well as to stderr. Additions are paced if the
command defines JGG_ADDITIONS_PER_PAUSE. The build then fails if it finds no additions.
"""

import subprocess
import sys
from pathlib import Path

from pace_additions import count_of_one_bank, pace


def run(log_dir: str, *command: str) -> int:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    messages, status = result.stdout, result.returncode
    if status == 0:
        for period in _additions_per_pause(command):
            path = Path(_after("-o", command))
            paced, of_one_bank = pace(path, period), count_of_one_bank(path)
            messages += f"Additions paced: {paced} instructions, {of_one_bank} of one bank\n"
            if not paced:
                messages += "error: no additions of an FP8 product were found to pace\n"
                status = 1
    sys.stderr.write(messages)
    log = Path(log_dir, f"{Path(_after('-c', command)).name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(messages)
    return status


def _additions_per_pause(command: tuple[str, ...]) -> list[int]:
    definition = "-DJGG_ADDITIONS_PER_PAUSE="
    return [int(word.removeprefix(definition)) for word in command if word.startswith(definition)]


def _after(option: str, command: tuple[str, ...]) -> str:
    return command[command.index(option) + 1]


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
