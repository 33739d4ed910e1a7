"""Times the kernels of one build of the driver, or of two against each other, without JAX.

python -m benchmarks.driver.ab old_driver new_driver --shapes dsv3_up qwen3_up --ops forward wgrad

In each round, both drivers run once, in a random order, each in a process of its own. The ratio is
the first driver's time over the second driver's in the same round. `build.sh` builds a driver.
"""

import argparse
import random
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fp8.cases import PRODUCTS, QUANTIZERS
from benchmarks.harness.cases import DISTRIBUTIONS, OPS, Case, Shape, select_shapes
from benchmarks.harness.command import add_choices, parser_of
from benchmarks.harness.report import table
from benchmarks.rank_k import UPDATES

UPDATE_OPS = ("syrk", "syr2k", "syr2k_f64", "her2k_c128")
# Weight gradients that the kernel, or a separate pass, adds to an accumulator.
SUMS = {"wgrad_add": "tn_f32_add", "wgrad_then_add": "tn_f32_then_add"}
MEMORY = (*QUANTIZERS, "copy")  # the driver gives TB/s for these, not TFLOP/s
ALL_OPS = {**OPS, **PRODUCTS}


@dataclass(frozen=True)
class Timing:
    """The driver's times of one problem."""

    us: float
    tflops: float  # TB/s for `MEMORY`
    worst_error: float  # relative to the error that rounding explains


def problem_line(op: str, shape: Shape, distribution: str, seed: int) -> str:
    """Returns the driver's line for a ragged product, a sum or a quantiser; see problem.h."""
    of = "forward" if op in MEMORY else "wgrad_f32" if op in SUMS else op
    case = Case(shape, ALL_OPS[of], distribution, seed=seed)
    problem = case.problem
    if op in MEMORY:
        kind = op
    elif op in SUMS:
        kind = SUMS[op]
    else:
        kind = "tn" if problem.contracting else "nt" if problem.transpose_rhs else "nn"
        kind = f"fp8_{kind}" if op in PRODUCTS else kind
        kind += "_f32" if problem.contracting and problem.out_dtype == "float32" else ""
    sizes = (problem.groups, problem.m, problem.k, problem.n, *case.group_sizes)
    return " ".join(map(str, (kind, f"{shape.name}/{op}/{distribution}", *sizes)))


def update_line(op: str, shape: tuple[int, int, int]) -> str:
    g, n, k = shape
    return f"{op} {g}x{n}x{k}/{op} {g} {n} {k} {n}"


def problem_lines(options: argparse.Namespace) -> list[str]:
    lines = [
        problem_line(op, shape, distribution, options.seed)
        for shape in select_shapes(options.shapes)
        for op in options.ops
        if op not in UPDATE_OPS
        for distribution in options.distributions
    ]
    updates = [op for op in options.ops if op in UPDATE_OPS]
    return lines + [update_line(op, shape) for op in updates for shape in UPDATES[op].shapes]


def run_driver(driver: Path, lines: Sequence[str], arguments: Sequence[str]) -> dict[str, Timing]:
    """Runs all problems in one process of a driver, and returns the times by problem."""
    command, given = [str(driver.resolve()), *arguments], "\n".join(lines) + "\n"
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    wrong = [row[0] for row in rows if row[-1] != "ok"]
    if wrong or done.returncode:
        raise RuntimeError(f"{driver} exited with {done.returncode}; wrong: {wrong}")
    return {row[0]: Timing(float(row[1]), float(row[3]), float(row[4])) for row in rows}


def alternate(
    drivers: Sequence[Path], lines: Sequence[str], arguments: Sequence[str], rounds: int
) -> list[list[dict[str, Timing]]]:
    found: list[list[dict[str, Timing]]] = [[] for _ in drivers]
    for _ in range(rounds):
        for index in random.sample(range(len(drivers)), len(drivers)):
            found[index].append(run_driver(drivers[index], lines, arguments))
    return found


def summary(found: Sequence[Sequence[dict[str, Timing]]]) -> str:
    """Returns a table of us and TFLOP/s of each problem and driver, and the median ratios."""
    rows = []
    for label in found[0][0]:
        row = [label]
        for rounds in found:
            for number in ("us", "tflops"):
                row.append(f"{statistics.median(getattr(x[label], number) for x in rounds):.1f}")
        if len(found) == 2:
            ratios = [a[label].us / b[label].us for a, b in zip(*found, strict=True)]
            row += [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}"]
        rows.append(row)
    header = ["problem", "us", "TFLOP/s", "us", "TFLOP/s", "ratio", "range"]
    return table(header[: len(rows[0])], rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("benchmarks.driver.ab", __doc__)
    add = parser.add_argument
    add("drivers", type=Path, nargs="+", help="one or two builds of the driver")
    add("--shapes", nargs="+", default=["main"], metavar="NAME")
    ops = [*ALL_OPS, *SUMS, *MEMORY, *UPDATE_OPS]
    add_choices(parser, "--ops", ops, ["forward", "dgrad", "wgrad"])
    add_choices(parser, "--distributions", DISTRIBUTIONS, ["random"])
    add("--rounds", type=int, default=5, help="processes of each driver")
    add("--seed", type=int, default=0, help="seed of the group sizes")
    add("--driver-options", default="", metavar="TEXT", help='such as "--rounds 10"')
    options = parser.parse_args(arguments)
    if len(options.drivers) > 2:
        parser.error("more than two drivers")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    lines = problem_lines(options)
    print(
        summary(alternate(options.drivers, lines, options.driver_options.split(), options.rounds))
    )


if __name__ == "__main__":
    main()
