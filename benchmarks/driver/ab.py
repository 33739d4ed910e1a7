"""Times the kernels of one build of the driver, or of two against each other, without JAX.

python -m benchmarks.driver.ab old_driver new_driver --shapes dsv3_up qwen3_up --ops forward wgrad

The two take turns, a process each, in a new random order every round; the ratio is the first one's
time over the second one's in the same round. `build.sh` builds a driver.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fp8.cases import PRODUCTS, QUANTIZERS
from benchmarks.harness.cases import DISTRIBUTIONS, OPS, Case, select_shapes
from benchmarks.rank_k import UPDATES

UPDATE_OPS = ("syrk", "syr2k", "syr2k_f64", "her2k_c128")
# Weight gradients that are added to what is there, by the kernel or by a pass of its own.
SUMS = {"wgrad_add": "tn_f32_add", "wgrad_then_add": "tn_f32_then_add"}
MEMORY = (*QUANTIZERS, "copy")  # their TFLOP/s are TB/s
ALL_OPS = {**OPS, **PRODUCTS}


@dataclass(frozen=True)
class Timing:
    """What the driver says of one problem."""

    us: float
    tflops: float  # TB/s where bytes are what counts
    worst_error: float  # over what rounding explains


def problem_line(case: Case) -> str:
    """A ragged product in the driver's terms: see problem.h."""
    problem = case.problem
    if problem.contracting:
        kind = "tn"
    else:
        kind = "nt" if problem.transpose_rhs else "nn"
    if case.op.name in PRODUCTS:
        kind = f"fp8_{kind}"
    if problem.contracting and problem.out_dtype == "float32":
        kind += "_f32"
    numbers = (problem.groups, problem.m, problem.k, problem.n, *case.group_sizes)
    return " ".join(map(str, (kind, case.name, *numbers)))


def sum_line(op: str, case: Case) -> str:
    """A weight gradient that is added to others, in the driver's terms."""
    _, _, numbers = problem_line(case).split(maxsplit=2)
    return f"{SUMS[op]} {case.shape.name}/{op}/{case.distribution} {numbers}"


def memory_line(op: str, case: Case) -> str:
    """A quantiser of a forward product's operand, or a copy, in the driver's terms."""
    shape = case.shape
    numbers = (shape.groups, shape.rows, shape.k, shape.n, *case.group_sizes)
    return " ".join(map(str, (op, f"{shape.name}/{op}/{case.distribution}", *numbers)))


def update_line(op: str, shape: tuple[int, int, int]) -> str:
    """A symmetric update in the driver's terms."""
    g, n, k = shape
    return f"{op} {g}x{n}x{k}/{op} {g} {n} {k} {n}"


def problem_lines(options: argparse.Namespace) -> list[str]:
    """All problems that the options ask for."""

    def line(op, shape, distribution):
        case = functools.partial(Case, shape, distribution=distribution, seed=options.seed)
        if op in MEMORY:
            return memory_line(op, case(op=OPS["forward"]))
        if op in SUMS:
            return sum_line(op, case(op=OPS["wgrad_f32"]))
        return problem_line(case(op=ALL_OPS[op]))

    lines = [
        line(op, shape, distribution)
        for shape in select_shapes(options.shapes)
        for op in options.ops
        if op not in UPDATE_OPS
        for distribution in options.distributions
    ]
    return lines + [
        update_line(op, shape)
        for op in options.ops
        if op in UPDATE_OPS
        for shape in UPDATES[op].shapes
    ]


def run_driver(driver: Path, lines: Sequence[str], arguments: Sequence[str]) -> dict[str, Timing]:
    """One process of a driver over all problems.

    Raises:
      RuntimeError: if it fails, or finds a result wrong.
    """
    done = subprocess.run(
        [str(driver.resolve()), *arguments],
        input="\n".join(lines) + "\n",
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    wrong = [row[0] for row in rows if row[-1] != "ok"]
    if wrong or done.returncode:
        raise RuntimeError(f"{driver} exited with {done.returncode}; wrong: {wrong}")
    return {row[0]: Timing(float(row[1]), float(row[3]), float(row[4])) for row in rows}


def alternate(
    drivers: Sequence[Path], lines: Sequence[str], arguments: Sequence[str], rounds: int
) -> list[list[dict[str, Timing]]]:
    """For each driver, what it found in every round."""
    found: list[list[dict[str, Timing]]] = [[] for _ in drivers]
    for _ in range(rounds):
        for index in random.sample(range(len(drivers)), len(drivers)):
            found[index].append(run_driver(drivers[index], lines, arguments))
    return found


def table(found: Sequence[Sequence[dict[str, Timing]]]) -> list[str]:
    """A line a problem: microseconds and TFLOP/s of each driver, and the median of the ratios."""
    lines = []
    for label in found[0][0]:
        columns = [label.ljust(36)]
        for rounds in found:
            us = statistics.median(each[label].us for each in rounds)
            tflops = statistics.median(each[label].tflops for each in rounds)
            columns.append(f"{us:9.1f} us {tflops:7.0f}")
        if len(found) == 2:
            pairs = zip(*found, strict=True)
            ratios = [first[label].us / second[label].us for first, second in pairs]
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            columns.append(f"ratio {statistics.median(ratios):.3f} ({spread})")
        lines.append("  ".join(columns))
    return lines


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.driver.ab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("drivers", type=Path, nargs="+", help="one or two builds of the driver")
    parser.add_argument("--shapes", nargs="+", default=["main"], metavar="NAME")
    parser.add_argument(
        "--ops",
        nargs="+",
        default=["forward", "dgrad", "wgrad"],
        choices=[*ALL_OPS, *SUMS, *MEMORY, *UPDATE_OPS],
        metavar="OP",
    )
    parser.add_argument("--distributions", nargs="+", default=["random"], choices=DISTRIBUTIONS)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each driver")
    parser.add_argument("--seed", type=int, default=0, help="of the group sizes")
    parser.add_argument(
        "--driver-options", default="", metavar="TEXT", help='for the driver: "--rounds 10"'
    )
    options = parser.parse_args(arguments)
    if len(options.drivers) > 2:
        parser.error("more than two drivers")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    lines = problem_lines(options)
    found = alternate(options.drivers, lines, options.driver_options.split(), options.rounds)
    print("\n".join(table(found)))


if __name__ == "__main__":
    sys.exit(main())
