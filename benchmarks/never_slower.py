"""Is there a shape where ours is slower than what it replaces?

python -m benchmarks.never_slower --output never_slower.json

Small, thin, shallow and deep shapes at random, `--shapes` of them for each operation, each against
the expressions and loops that it takes the place of. The summary counts the cases under 0.98 of the
best of those and names the worst. "ours" is what the plan takes, which may be XLA's own product;
"kernel" is a variant that always is one, and "both triangles" of a symmetric update one that
computes them by our `grouped_gemm`.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks import grouped_gemm, rank_k
from benchmarks.harness.cases import OPS as RAGGED_OPS
from benchmarks.harness.cases import Case, Shape
from benchmarks.harness.command import Command
from benchmarks.harness.inputs import Inputs
from benchmarks.harness.measure import ragged_work
from benchmarks.harness.peer import JaxPeer, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session, leave_memory_to_torch
from benchmarks.peers.cublas import CublasLoop
from benchmarks.peers.ours import Kernel, Planned, kernels_unavailable_reason
from benchmarks.peers.stock import Stock
from benchmarks.peers.torch_grouped_mm import TorchGroupedMm

BAR = 0.98
MOST_FLOPS = 4e11  # a case takes a millisecond at most
MOST_LIST_FLOPS = 1e11  # lists are checked on the host
MOST_BYTES = 1 << 29
# Stock JAX copies the rows once for each group.
MOST_STOCK_BYTES = 1 << 31

# Ragged operations by name: the op, the dtype and the precision.
RAGGED = {
    "forward": ("forward", "bfloat16", "default"),
    "dgrad": ("dgrad", "bfloat16", "default"),
    "wgrad": ("wgrad", "bfloat16", "default"),
    "forward_f32": ("forward", "float32", "default"),
    "dgrad_f32": ("dgrad", "float32", "default"),
    "wgrad_f32": ("wgrad", "float32", "default"),
}
UPDATES = {
    name: rank_k.UPDATES[name] for name in ("syrk", "syr2k", "syr2k_f32_default", "her2k_c128")
} | {"syrk_f32_default": rank_k.Update("syrk_f32_default", False, "float32", (), 1e-3, "default")}
LISTS = {kind.op: kind for kind in grouped_gemm.KINDS if kind.precision == "default"}
OPS = (*RAGGED, *UPDATES, *LISTS)


def size(rng: np.random.Generator, low: int, high: int, multiple: int = 8) -> int:
    """Between `low` and `high`, as likely to be in any octave; mostly a multiple of 64."""
    drawn = math.exp(rng.uniform(math.log(low), math.log(high)))
    multiple = 64 if drawn >= 128 and rng.random() < 0.75 else multiple
    return max(multiple, multiple * round(drawn / multiple))


def ragged_shape(rng: np.random.Generator, dtype: str) -> Shape:
    """Groups of one to a thousand rows on average."""
    width = 4 if dtype == "float32" else 2
    while True:
        groups = 2 ** int(rng.integers(0, 8))
        rows = groups * int(2 ** rng.integers(0, 11))
        k, n = size(rng, 64, 8192), size(rng, 64, 8192)
        moved = width * (groups * k * n + rows * (k + n))
        if moved <= MOST_BYTES and 2 * rows * k * n <= MOST_FLOPS:
            return Shape(f"{groups}x{rows // groups}x{k}x{n}", groups, rows, k, n)


def update_shape(rng: np.random.Generator, update: rank_k.Update) -> rank_k.Shape:
    """g, n, k; a complex product counts four."""
    width = np.dtype(update.dtype if update.dtype != "bfloat16" else "float16").itemsize
    slow = {2: 1, 4: 4, 8: 16, 16: 64}[width]
    while True:
        g = 2 ** int(rng.integers(0, 8))
        n, k = size(rng, 32, 4096), size(rng, 16, 8192)
        if width * g * n * (n + 2 * k) <= MOST_BYTES and slow * 2 * g * n * n * k <= MOST_FLOPS:
            return g, n, k


def list_of_problems(rng: np.random.Generator, kind: grouped_gemm.Kind) -> list:
    """Up to 40 unequal products."""
    slow = 1 if kind.dtype == "bfloat16" else 8
    count = int(2 ** rng.uniform(0, 5.3))
    high = 2 ** rng.uniform(7, 11.5)
    problems: list = []
    while len(problems) < count:
        m, k, n = (size(rng, 16, high) for _ in "mkn")
        if slow * 2 * m * k * n * count <= MOST_LIST_FLOPS:
            problems.append((m, k, n))
    return problems


def both_triangles(update: rank_k.Update, *, summed: bool) -> Callable[..., jax.Array]:
    """The whole product A B^H by `grouped_gemm`, and the sum with its mirror image."""
    options = dict(implementation=pinned_implementation(), precision=update.precision)

    def function(a, b):
        b = (b if update.two_operands else a).conj()
        product = jgg.grouped_gemm(a, b, transpose_rhs=True, **options)
        return rank_k.mirrored(product) if summed else product

    return function


def peers_of_update(update: rank_k.Update) -> list[Peer]:
    """Ours, what a user of JAX writes, and what a plan could take."""
    summed = update.two_operands
    names = ("symmetric", *(("A@B.T + B@A.T", "P + P.T") if summed else ("A@A.T",)))
    ours = [
        JaxPeer(
            name,
            role,
            rank_k.at_precision(
                rank_k.ours(update, implementation=implementation), update.precision
            ),
            kernels_unavailable_reason,
        )
        for name, role, implementation in (
            ("ours", Role.OURS, None),
            ("kernel", Role.VARIANT, pinned_implementation()),
        )
    ]
    alternative = JaxPeer(
        "both triangles",
        Role.VARIANT,
        rank_k.at_precision(both_triangles(update, summed=summed), update.precision),
        kernels_unavailable_reason,
    )
    replaced = [peer for peer in rank_k.peers(update) if peer.name in names]
    return [*ours, *replaced, alternative]


def peers_of_ragged(shape: Shape, dtype: str) -> list[Peer]:
    """Ours, and what takes the same operands; stock JAX where its copies are not gigabytes."""
    found: list[Peer] = [Planned(), Kernel(), TorchGroupedMm(), CublasLoop()]
    width = 4 if dtype == "float32" else 2
    copies = shape.groups * shape.rows * max(shape.k, shape.n) * width
    return [*found, Stock()] if copies <= MOST_STOCK_BYTES else found


def peers_of_list(kind: grouped_gemm.Kind) -> list[Peer]:
    """What the plan takes, the kernel, and the loop."""
    planned = functools.partial(jgg.grouped_gemm, precision=kind.precision)
    kernel, *others = (
        peer for peer in grouped_gemm.peers(kind) if peer.name in ("ours", "cublas_loop")
    )
    kernel.name, kernel.role = "kernel", Role.VARIANT
    return [JaxPeer("ours", Role.OURS, planned, kernels_unavailable_reason), kernel, *others]


def job_of(op: str, number: int, options: argparse.Namespace, session: Session) -> Job:
    """Case `number` of an operation."""
    rng = np.random.default_rng([options.seed, OPS.index(op), number])

    def measure() -> dict:
        if op in RAGGED:
            name, dtype, precision = RAGGED[op]
            shape = ragged_shape(rng, dtype) if not options.dry_run else Shape("tiny", 2, 24, 16, 8)
            distribution = ("random", "uniform", "zipf")[number % 3]
            case = Case(shape, RAGGED_OPS[name], distribution, dtype, options.seed, precision)
            inputs = Inputs(shape, dtype, options.seed)
            work = ragged_work(case, inputs)
            found = session.compare(work, peers_of_ragged(shape, dtype), host=False)
        elif op in UPDATES:
            update = UPDATES[op]
            shape = update_shape(rng, update) if not options.dry_run else (2, 24, 16)
            with jax.enable_x64(True):
                work = rank_k.work(update, shape, options.seed)
                found = session.compare(work, peers_of_update(update), host=False)
        else:
            kind = LISTS[op]
            problems = list_of_problems(rng, kind) if not options.dry_run else [(8, 16, 24)] * 2
            with jax.enable_x64(kind.dtype == "float64"):
                work = grouped_gemm.work(f"random{number}", problems, kind, options.seed)
                found = session.compare(work, peers_of_list(kind), host=False)
        return found | {"case": f"{op}/{number}/{found['shape']['name']}", "op": op}

    return Job(f"{op}/{number}", measure)


def worst_ratio(record: Mapping) -> tuple[float, str] | None:
    """The ratio of the fastest thing that ours replaces, and its name."""
    replaced = [
        (ratio, name)
        for name, ratio in record["ratios"].items()
        if record["peers"].get(name, {}).get("role") in (Role.GROUPED, Role.LOOP)
    ]
    return min(replaced, default=None)


def summarize(records: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Of each operation: how many cases, how many under the bar, the worst and the median."""
    result = {}
    for op in dict.fromkeys(record["op"] for record in records):
        found = [worst_ratio(record) for record in records if record["op"] == op]
        ratios = sorted(each[0] for each in found if each)
        if ratios:
            result[op] = {
                "cases": len(ratios),
                f"under_{BAR}": sum(ratio < BAR for ratio in ratios),
                "worst": ratios[0],
                "median": ratios[len(ratios) // 2],
            }
    return result


def texts(results: Mapping) -> list[str]:
    """The summary, and every case under the bar with the variants' ratios."""
    lines = [f"{'op':26}{'cases':>6}{'under':>7}{'worst':>8}{'median':>8}"]
    for op, row in results["summary"].items():
        lines.append(
            f"{op:26}{row['cases']:6}{row[f'under_{BAR}']:7}{row['worst']:8.2f}{row['median']:8.2f}"
        )
    slow = []
    for record in results["cases"]:
        worst = worst_ratio(record)
        if worst and worst[0] < BAR:
            others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in record["ratios"].items())
            time = record["peers"]["ours"]["median_us"]
            slow.append((worst[0], f"{worst[0]:.2f} {record['case']} {time:.1f} us: {others}"))
    return ["\n".join(lines), "\n".join(line for _, line in sorted(slow))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which operations, and how many shapes."""
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=OPS, metavar="OP")
    parser.add_argument("--shapes", type=int, default=60, help="random shapes an operation")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")


def complete(options: argparse.Namespace) -> None:
    """A dry run has one shape."""
    if options.dry_run:
        options.shapes = 1


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    """In turn, so that a time limit leaves as many of each operation."""
    return [
        job_of(op, number, options, session)
        for number in range(options.first, options.first + options.shapes)
        for op in options.ops
    ]


COMMAND = Command(
    "benchmarks.never_slower",
    __doc__,
    jobs,
    add_arguments=add_arguments,
    complete=complete,
    rounds=5,
    time_limit=900,
    summarize=summarize,
    texts=texts,
)
main = COMMAND.main

if __name__ == "__main__":
    leave_memory_to_torch()
    main()
