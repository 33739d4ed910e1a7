"""Lines of the package, and how many of them plan: `python -m benchmarks.lines [REVISION ...]`.

Planning is what describes problems and devices, chooses kernels, predicts times and explains plans.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

PACKAGE = "jax_grouped_gemm"
PLANNING = {
    *("device", "explain", "fallback", "fp64", "kernels", "plan", "plan_fp64", "prediction"),
    *("problem", "schedule", "sizes", "split_in_kernel", "tiles", "whole"),
    *("on_the_way", "xla"),  # of older revisions
}
"""Names of the modules that plan."""


def git(*arguments: str) -> str:
    """The output of a git command."""
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def lines(revision: str) -> tuple[int, int]:
    """Lines of the modules that plan, and of all."""
    planning = every = 0
    for name in git("ls-tree", "-r", "--name-only", revision, PACKAGE).splitlines():
        if name.endswith(".py"):
            count = len(git("show", f"{revision}:{name}").splitlines())
            every += count
            planning += count * (Path(name).stem in PLANNING)
    return planning, every


def main() -> None:
    """Prints the lines of each revision, HEAD by default."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lines", description=__doc__)
    parser.add_argument("revisions", nargs="*", default=["HEAD"])
    for revision in parser.parse_args().revisions:
        planning, every = lines(revision)
        print(f"{revision}: {planning} lines of planning, {every} in all")


if __name__ == "__main__":
    main()
