"""Makes a case of a random shape: its programs, its peers, and the judge of their results."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import jax_grouped_gemm as jgg
from benchmarks import grouped_gemm, rank_k
from benchmarks.harness import exact
from benchmarks.harness.cases import OPS as RAGGED_OPS
from benchmarks.harness.cases import Case as RaggedCase
from benchmarks.harness.cases import Problem, Shape
from benchmarks.harness.inputs import abstract_operands
from benchmarks.harness.measure import Workload, ragged_workload
from benchmarks.harness.peer import Peer, Role, on_gpu, pinned_implementation
from benchmarks.never_slower import recipes, shapes
from benchmarks.never_slower.programs import Program
from benchmarks.peers import ours, stock
from benchmarks.peers.cublas import CublasLoop, TorchGroupedMm

# Limits for stock JAX, which multiplies rows by all groups' matrices, or copies rows for each.
MOST_STOCK_BYTES = 1 << 31
MOST_STOCK_FLOPS = 2e10  # 25 us at 800 TFLOP/s
MOST_STOCK_GROUPS = 4
# XLA's autotuner takes half a second for each product.
MOST_XLA_PROBLEMS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """One random shape.

    Attributes:
      label: operation and number of the case.
      operands: shapes and dtypes of the programs' operands.
      x64: whether programs are traced with 64-bit types.
      programs: the programs to compile.
      others: peers of other frameworks.
      work: returns the workload, with operands on the device.
    """

    label: str
    operands: tuple[Any, ...]
    x64: bool
    programs: tuple[Program, ...]
    others: tuple[Peer, ...]
    work: Callable[[], Workload]


def case(op: str, number: int, seed: int, *, tiny: bool = False, sizes: Any = None) -> Case:
    """Returns case `number` of an operation, or a case of `sizes`. Tiny cases run anywhere."""
    rng = shapes.generator(op, number, seed)
    label, data_seed = f"{op}/{number}", (seed, shapes.OPS.index(op), number)
    if op in shapes.RAGGED:
        name, dtype, precision = shapes.RAGGED[op]
        shape = sizes or (Shape("tiny", 2, 24, 16, 8) if tiny else shapes.ragged_shape(rng, dtype))
        distribution = shapes.DISTRIBUTIONS[number % len(shapes.DISTRIBUTIONS)]
        found = RaggedCase(shape, RAGGED_OPS[name], distribution, dtype, seed, precision)
        return _ragged(label, found, data_seed)
    if op in shapes.UPDATES:
        update = shapes.UPDATES[op]
        if not sizes and not tiny and update.dtype == "bfloat16" and number % 4 == 3:
            sizes = shapes.stack_of_hundreds(rng)
        sizes = sizes or ((2, 24, 16) if tiny else shapes.update_shape(rng, update))
        return _update(label, update, sizes, data_seed)
    if op in shapes.RECIPES:
        sizes = sizes or (recipes.TINY[op] if tiny else recipes.random_sizes(op, rng))
        return _recipe(label, op, sizes, data_seed)
    kind = shapes.LISTS[op]
    sizes = sizes or ([(8, 16, 24)] * 2 if tiny else shapes.list_of_problems(rng, kind))
    return _list(label, kind, sizes, data_seed)


def _ours(function: Callable[[str | None], Callable], *, xla: bool = True) -> list[Program]:
    """Returns three programs for a function of `implementation`: the one that the plan chooses, our
    kernel and, with `xla`, XLA's product."""
    planned, pinned = function(None), function(pinned_implementation())
    return [
        Program("ours", Role.OURS, planned),
        Program("kernel", Role.VARIANT, pinned, unplanned=planned),
        *([Program("XLA", Role.VARIANT, planned, left_to_xla=True)] if xla else []),
    ]


class TorchLoop(TorchGroupedMm):
    """PyTorch's grouped product of float32, which copies the sizes to the host and calls cuBLAS."""

    role = Role.LOOP


def _ragged(label: str, case: RaggedCase, seed: Sequence[int]) -> Case:
    problem, sizes = case.problem, case.group_sizes
    lhs, rhs, group_sizes = abstract_operands(problem)
    function = functools.partial(ours.product, problem)
    programs = _ours(function, xla=offers_stock(problem))
    if offers_stock(problem):
        programs.append(Program(stock.Stock.name, Role.GROUPED, stock.ragged_product(problem)))

    def work() -> Workload:
        a, b = (exact.normal(x.shape, str(x.dtype), (*seed, i)) for i, x in enumerate((lhs, rhs)))
        expected = exact.ragged_product(problem, a, b, sizes)
        judge = exact.judged(
            lambda out: exact.row_errors(out, expected),
            lambda error, call: error.acceptable(problem, call.tolerance),
        )
        return ragged_workload(case, jax.block_until_ready((a, b, jax.numpy.asarray(sizes))), judge)

    grouped = TorchLoop() if problem.dtype == "float32" else TorchGroupedMm()
    return Case(
        label, (lhs, rhs, group_sizes), False, tuple(programs), (grouped, CublasLoop()), work
    )


def offers_stock(problem: Problem) -> bool:
    """Returns whether the work of stock JAX is small enough to measure stock JAX."""
    if problem.groups * problem.m * max(problem.k, problem.n) * 4 > MOST_STOCK_BYTES:
        return False
    flops = 2 * problem.groups * problem.m * problem.k * problem.n
    return problem.groups <= MOST_STOCK_GROUPS or flops <= MOST_STOCK_FLOPS


def masked(update: rank_k.Update, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the triangle that our function returns, and zeros elsewhere, from a JAX product."""
    product = rank_k.product(a, b if update.two_operands else a)
    return jax.numpy.tril(rank_k.mirrored(product) if update.two_operands else product)


# This expression computes both triangles, which may not be exact mirror images.
UNMASKED = "A@A.T"


def _update(label: str, update: rank_k.Update, shape: rank_k.Shape, seed: Sequence[int]) -> Case:
    def of(function: Callable) -> Callable:
        return rank_k.at_precision(function, update.precision)

    def symmetric(implementation: str | None) -> Callable:
        return of(rank_k.ours(update, implementation=implementation))

    role, whole = rank_k.EXPRESSIONS[update.two_operands][
        "P + P.T" if update.two_operands else UNMASKED
    ]
    programs = [
        *_ours(symmetric),
        Program("P + P.T" if update.two_operands else UNMASKED, role, of(whole)),
    ]
    if not update.two_operands:
        programs.append(Program("tril(A@A.T)", role, of(functools.partial(masked, update))))
    stack = jax.ShapeDtypeStruct(shape, update.dtype)

    work = functools.partial(rank_k.work, update, shape, seed)
    return Case(label, (stack, stack), True, tuple(programs), (), work)


def _list(
    label: str, kind: grouped_gemm.Kind, problems: Sequence[Any], seed: Sequence[int]
) -> Case:
    def function(implementation: str | None) -> Callable:
        return functools.partial(
            jgg.grouped_gemm, implementation=implementation, precision=kind.precision
        )

    loop = functools.partial(grouped_gemm.loop, precision=kind.precision)
    programs = _ours(function, xla=len(problems) <= MOST_XLA_PROBLEMS)
    options: Mapping[str, Any] | None = grouped_gemm.CUBLAS_ONLY if on_gpu() else None
    programs.append(Program("cublas_loop", Role.LOOP, loop, options))
    lhs = [jax.ShapeDtypeStruct((m, k), kind.dtype) for m, k, _ in problems]
    rhs = [jax.ShapeDtypeStruct((k, n), kind.dtype) for _, k, n in problems]

    name = f"random{label.split('/')[1]}"
    work = functools.partial(grouped_gemm.work, name, problems, kind, seed)
    return Case(label, (lhs, rhs), kind.dtype == "float64", tuple(programs), (), work)


def _recipe(label: str, op: str, sizes: Sequence[int], seed: Sequence[int]) -> Case:
    programs = recipes.programs(op, sizes)
    work = functools.partial(recipes.work, op, sizes, seed)
    return Case(label, recipes.operands(op, sizes), False, tuple(programs), (), work)
