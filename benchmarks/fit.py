"""Fits, to measured times, the model of when plans fall back to XLA, and recipes to bf16.

python -m benchmarks.fit                            # fits to the pairs, writes the coefficients
python -m benchmarks.fit --check                    # reports present choices, writes nothing
python -m benchmarks.fit --add never_slower.json    # adds the pairs of a new record first

`benchmarks/results/xla_pairs.csv` has a line for each case of `benchmarks.never_slower`: the card,
the operation, the sizes, the microseconds of the kernel, of XLA's product and of stock JAX, and
whether the plan took the kernel or XLA in that record. If XLA's product was not measured, stock
JAX's time replaces it. Sizes are groups, rows of a group, k and n; for lists m, k and n of each
product; for symmetric updates g, n and k; for layers T, D, F, E and K. For recipes, the two times
are those of FP8 and bf16. Large cases of other benchmarks, which measured only the kernel, keep the
fitted slope right; sums leave these cases out.

The command prints for each kind of problem the number of cases, the number that XLA computes, and
three sums of times: of the records' choices ("taken"), of the present choices, and of the best.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls

import jax_grouped_gemm as jgg
from benchmarks.harness.cases import Shape
from benchmarks.harness.command import parser_of
from benchmarks.never_slower import cases, recipes, shapes
from jax_grouped_gemm._src import fallback
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8 import prediction
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.ragged.whole import xla_work

PAIRS = Path(__file__).parent / "results" / "xla_pairs.csv"
STOCK = ("stock", "tril(A@A.T)", "P + P.T")
STOCK_OF_LISTS = ("cublas_loop",)  # for lists only, because it needs the sizes on the host
MARGINS = np.arange(0.7, 1.1001, 0.025)
# The names of layers and matmuls with recipes in the records of `moe` and `fp8`.
LAYERS = {benchmark: op for op, benchmark in recipes.LAYERS.items()}
OF_RECIPES = LAYERS | {"fp8_step": "recipe_dot_step"}
UNMEASURED = 2.0  # XLA's time over the kernel's, if neither XLA nor stock JAX was measured
ROUNDS, LEAST_RESIDUAL = 20, 0.05
# The weight of a case is its time to this power. With 0 all cases count equally.
POWER = 0.25


@dataclasses.dataclass(frozen=True)
class Pair:
    """A line of the file. A time is None if it was not measured."""

    card: str
    op: str
    sizes: str
    kernel_us: float
    xla_us: float | None
    stock_us: float | None
    took: str

    @property
    def other_us(self) -> float:
        return self.xla_us or self.stock_us or UNMEASURED * self.kernel_us


def read(path: Path = PAIRS) -> list[Pair]:
    with path.open(newline="") as file:
        _, *lines = csv.reader(file)
    return [
        Pair(card, op, sizes, float(kernel), *(float(x) if x else None for x in (xla, stock)), took)
        for card, op, sizes, kernel, xla, stock, took in lines
    ]


def write(pairs: Iterable[Pair], path: Path = PAIRS) -> None:
    """Writes the last pair of each case to a file that `read` reads."""
    last = {(pair.card, pair.op, pair.sizes): pair for pair in pairs}
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([field.name for field in dataclasses.fields(Pair)])
        lines.writerows(map(dataclasses.astuple, last.values()))


def pairs_of(record: Mapping[str, Any]) -> list[Pair]:
    """Returns the pairs of a record of `never_slower`, or of another benchmark's kernels."""
    found = []
    for case in record["cases"]:
        times = {n: p["median_us"] for n, p in case["peers"].items() if p["status"] == "measured"}
        if case["op"] in OF_RECIPES:
            found += recipe_pairs(record["device"], case, times)
            continue
        op = op_of(case)
        if op is None or "ours" not in times:
            continue
        kernel, xla = times["ours"], times.get("XLA", times.get("bf16"))
        took = "kernel" if "never_slower" in (record["command"] or "") else ""
        if "kernel" in times:
            took, kernel, xla = "xla", times["kernel"], times["ours"]
        names = STOCK_OF_LISTS if op in shapes.LISTS else STOCK
        stock = next((times[name] for name in names if name in times), None)
        found.append(Pair(record["device"], op, sizes_of(case["shape"]), kernel, xla, stock, took))
    return found


def op_of(case: Mapping[str, Any]) -> str | None:
    """Returns the name of a case's operation in `never_slower`, or None if it has no name there."""
    found = case["op"], case["dtype"], case.get("precision") or "default"
    for op, (name, *types) in shapes.RAGGED.items():
        if found in ((op, *types), (name, *types)):
            return op
    return case["op"] if case["op"] in {*shapes.UPDATES, *shapes.LISTS, *shapes.RECIPES} else None


def recipe_pairs(device: str, case: Mapping[str, Any], times: Mapping[str, float]) -> list[Pair]:
    """Returns the pairs of layers and steps whose recipes quantise weights in the call."""
    op, sizes = OF_RECIPES[case["op"]], sizes_of(case["shape"])
    if op == "recipe_dot_step":
        fp8 = {"blockwise": "ours", "blockwise_bf16_wgrad": "ours_bf16_wgrad"}
        bf16 = times.get("ours_bf16")
    else:
        fp8 = {name: f"fp8_{name}" for name in recipes.RECIPES}
        bf16 = times.get("ours")
    return [
        Pair(device, f"{op} {name}", sizes, times[peer], bf16, None, "kernel")
        for name, peer in fp8.items()
        if peer in times and bf16
    ]


def sizes_of(shape: Mapping[str, Any]) -> str:
    if "problems" in shape:
        return " ".join("x".join(map(str, each)) for each in shape["problems"])
    if "tokens" in shape:
        return "{tokens}x{embed}x{hidden}x{experts}x{top_k}".format(**shape)
    if "rows" in shape:
        shape = {**shape, "m": shape["rows"] // shape["groups"]}
        return "{groups}x{m}x{k}x{n}".format(**shape)
    return "{groups}x{n}x{k}".format(**shape)


def plan_of(pair: Pair, policy: fallback.Policy) -> Any:
    sizes: Any = [tuple(map(int, each.split("x"))) for each in pair.sizes.split()]
    if pair.op in shapes.RAGGED:
        g, rows, k, n = sizes[0]
        sizes = Shape(pair.sizes, g, g * rows, k, n)
    elif pair.op in shapes.UPDATES:
        (sizes,) = sizes
    elif is_recipe(pair):
        with fallback.policy(policy):
            function = recipes.function(pair.op, *sizes, None)
            return jgg.explain(function, *recipes.operands(pair.op, *sizes)).plans[0]
    case = cases.case(pair.op, 0, 0, sizes=sizes)
    with fallback.policy(policy), jax.enable_x64(case.x64):
        return jgg.explain(case.programs[0].function, *case.operands).plans[0]


def is_recipe(pair: Pair) -> bool:
    return pair.op.split()[0] in shapes.RECIPES


@dataclasses.dataclass(frozen=True)
class Case:
    """A pair, the terms that predict its two times, and whether XLA's copies are small enough."""

    pair: Pair
    kind: str
    kernel: Mapping[str, float]
    instead: Mapping[str, float]
    fits: bool

    @classmethod
    def of(cls, pair: Pair) -> Case:
        if is_recipe(pair):
            choice = recipes.choice(pair.op, [int(size) for size in pair.sizes.split("x")])
            return cls(pair, prediction.KIND, *choice.terms(), True)
        plan = plan_of(pair, "kernels")
        problem = plan.problem
        work = xla_work(problem) if isinstance(problem, RaggedProblem) else problem.xla_work()
        kernel = work.kernel_terms(plan)
        return cls(pair, work.name, kernel, work.xla_terms(H200), work.fits)

    def takes_xla(self, factors: Mapping[str, Any]) -> bool:
        kernel = fallback.seconds(self.kernel, factors["kernel"])
        xla = fallback.seconds(self.instead, factors["instead"])
        return self.fits and xla <= factors["margin"] * kernel

    def choice(self, factors: Mapping[str, Any]) -> float:
        return self.pair.other_us if self.takes_xla(factors) else self.pair.kernel_us


def fitted(terms: Sequence[Mapping[str, float]], microseconds: Sequence[float]) -> dict[str, float]:
    """Returns non-negative coefficients with the least sum of weighted relative errors."""
    times = np.array(microseconds)
    rows = np.array([list(each.values()) for each in terms]) / times[:, None] * 1e6
    residuals = np.ones(len(rows))
    for _ in range(ROUNDS):
        weights = times**POWER / np.maximum(residuals, LEAST_RESIDUAL) ** 0.5
        found, _ = nnls(rows * weights[:, None], weights)
        residuals = np.abs(rows @ found - 1)
    return {name: float(f"{x:.3g}") for name, x in zip(terms[0], found, strict=True)}


def fit(found: Sequence[Case]) -> dict[str, dict[str, Any]]:
    result = {}
    for kind in sorted({case.kind for case in found}):
        of_kind = [case for case in found if case.kind == kind]
        measured = [case for case in of_kind if case.pair.xla_us or case.pair.stock_us]
        factors: dict[str, Any] = {
            "kernel": fitted([c.kernel for c in of_kind], [c.pair.kernel_us for c in of_kind]),
            "instead": fitted([c.instead for c in measured], [c.pair.other_us for c in measured]),
        }
        by_margin = [factors | {"margin": round(float(margin), 3)} for margin in MARGINS]
        times = [sum(case.choice(each) for case in of_kind) for each in by_margin]
        result[kind] = by_margin[int(np.argmin(times))]
    return result


def sums(found: Sequence[Case], factors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns, by kind, the numbers of cases and of cases that XLA computes, and sums of times: of
    the records' choices, of the present choices, and of the best choices."""
    rows: dict[str, np.ndarray] = {}
    for case in found:
        times = case.pair.kernel_us, case.pair.other_us
        if case.pair.took:
            was, now = times[case.pair.took == "xla"], case.choice(factors[case.kind])
            row = np.array([1, case.takes_xla(factors[case.kind]), was, now, min(times)])
            rows[case.kind] = rows.get(case.kind, 0) + row
    return rows | {"all": np.sum(list(rows.values()), axis=0)}


def table(rows: Mapping[str, np.ndarray]) -> str:
    lines = [f"{'':18}{'cases':>6}{'XLA':>5}{'taken':>10}{'now':>10}{'best':>10}{'now/taken':>11}"]
    for name, (count, xla, *times) in rows.items():
        cells = "".join(f"{us:10.1f}" for us in times)
        lines.append(f"{name:18}{count:6.0f}{xla:5.0f}{cells}{times[1] / times[0]:11.4f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.fit", __doc__)
    parser.add_argument("--check", action="store_true", help="write no coefficients")
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="RECORD")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="the file of pairs")
    parser.add_argument("--output", type=Path, default=fallback.COEFFICIENTS)
    options = parser.parse_args(arguments)
    if options.add:
        before = read(options.pairs) if options.pairs.exists() else []
        added = [pair for path in options.add for pair in pairs_of(json.loads(path.read_text()))]
        write([*before, *added], options.pairs)
    found = [Case.of(pair) for pair in read(options.pairs)]
    factors = fallback.coefficients() if options.check else fit(found)
    if not options.check:
        lines = (f"{json.dumps(kind)}: {json.dumps(each)}" for kind, each in factors.items())
        options.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(table(sums(found, factors)))


if __name__ == "__main__":
    main()
