"""Measures lists of unequal products: our schedulers, CUTLASS's kernels, and a loop of cuBLAS.

python -m benchmarks.grouped_gemm --output benchmarks/results/grouped_gemm.json
python -m benchmarks.grouped_gemm --dtype float32 --precision highest
python -m benchmarks.grouped_gemm --dtype float64

`ours` is the default: a schedule that is made at trace time, with the longest tiles first. Variants
have the other scheduler, or unsorted lists. The loop is a `jnp.matmul` for each problem, all in one
jitted function, without XLA's autotuner and matmul kernels, so that cuBLAS computes all of them.
`benchmarks/cutlass/build.sh` builds CUTLASS's bfloat16 kernels, those of its examples 24 and 57.
Gaps between the loop's kernels count only in the wall time.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm as jgg
from benchmarks.harness import exact
from benchmarks.harness.command import Command
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import JaxPeer, Peer, Role, on_gpu, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.peers import cutlass

Problem = tuple[int, int, int]  # m, k, n

# The list with which CUTLASS's notes on its grouped schedulers explain sorting.
FOUR_PROBLEMS = ((1152, 128, 768), (1152, 1024, 768), (768, 128, 1152), (768, 1024, 1152))
DEFAULT = "host_precomputed sorted"
VARIANTS = {
    f"{scheduler} {'sorted' if sort else 'unsorted'}": dict(scheduler=scheduler, sort_problems=sort)
    for scheduler in ("host_precomputed", "device")
    for sort in (True, False)
}
CUBLAS_ONLY = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


@dataclass(frozen=True)
class Kind:
    """The operands, and the error that a result may have, relative to the largest element."""

    op: str  # in the results
    dtype: str
    precision: str
    error_limit: float


KINDS = (
    Kind("grouped_gemm", "bfloat16", "default", 0.02),
    Kind("grouped_gemm_f32_default", "float32", "default", 2e-3),
    Kind("grouped_gemm_f32", "float32", "highest", 5e-6),
    Kind("grouped_gemm_f64", "float64", "default", 1e-13),
)
BFLOAT16 = KINDS[0]


def random_problems(count: int, low: int, high: int, multiple: int, seed: int) -> list[Problem]:
    """Returns problems whose sides are random multiples of `multiple` in [low, high]."""
    sides = np.random.default_rng(seed).integers(low // multiple, high // multiple + 1, (count, 3))
    return [tuple(int(x) for x in multiple * row) for row in sides]


def lists() -> dict[str, list[Problem]]:
    """Returns the lists by name. Random lists are the same in every run."""
    return {
        "four": list(FOUR_PROBLEMS),
        # The sides of CUTLASS's tests of its grouped kernels.
        "cutlass_24": random_problems(24, 24, 24 + 8 * 63, 8, seed=0),
        **{
            f"random_{count}": random_problems(count, 24, 1024, 8, seed=count)
            for count in (24, 79, 150, 300)
        },
        "big_8": random_problems(8, 2048, 8192, 256, seed=1),
        "deep_and_shallow": [(2048, k, 2048) for k in (256, 8192) * 8],
    }


TINY = {"tiny": random_problems(5, 8, 40, 8, seed=0)}


def loop(lhs: list[jax.Array], rhs: list[jax.Array], precision: str) -> list[jax.Array]:
    return [jnp.matmul(a, b, precision=precision) for a, b in zip(lhs, rhs, strict=True)]


def ours(variant: str, precision: str) -> Callable[..., Sequence[jax.Array]]:
    implementation = pinned_implementation()
    options = dict(implementation=implementation, precision=precision)
    return functools.partial(jgg.grouped_gemm, **options, **VARIANTS[variant])


class OursList(JaxPeer):
    """One of our schedulers. `detail` has the predicted number of steps of each launch."""

    def __init__(self, variant: str, kind: Kind):
        role = Role.OURS if variant == DEFAULT else Role.VARIANT
        name = "ours" if role == Role.OURS else variant
        super().__init__(name, role, ours(variant, kind.precision))

    def prepare(self, kind, lhs, rhs):
        call = super().prepare(kind, lhs, rhs)
        plan = jgg.explain(self.function, lhs, rhs).plans[0]
        if plan.launches:
            steps = ", ".join(f"{launch.steps:.5g}" for launch in plan.launches)
            call.detail = f"predicted steps {steps}"
        return call


def peers(kind: Kind) -> list[Peer]:
    """Returns our schedulers, the loop, and CUTLASS's kernels with and without sorting."""
    one_by_one = functools.partial(loop, precision=kind.precision)
    options = CUBLAS_ONLY if on_gpu() else None
    sorts = [(kernel, sort) for kernel in cutlass.PRODUCTS for sort in (True, False)]
    return [
        *(OursList(variant, kind) for variant in VARIANTS),
        JaxPeer("cublas_loop", Role.LOOP, one_by_one, compiler_options=options),
        *(cutlass.CutlassList(*each) for each in sorts),
    ]


def work(name: str, problems: Sequence[Problem], kind: Kind, seed: Sequence[int]) -> Workload:

    def random(side: int, shapes: Sequence[tuple[int, int]]) -> list[jax.Array]:
        return [exact.normal(x, kind.dtype, (*seed, side, i)) for i, x in enumerate(shapes)]

    lhs = random(0, [(m, k) for m, k, _ in problems])
    rhs = random(1, [(k, n) for _, k, n in problems])
    expected = exact.list_products(lhs, rhs)
    judge = exact.judged(
        lambda outs: exact.list_error(outs, expected),
        lambda error, call: error.within(kind.error_limit),
    )
    width = lhs[0].dtype.itemsize
    written = width * sum(m * n for m, _, n in problems)
    return Workload(
        f"{name}/{kind.op}",
        kind,
        (lhs, rhs),
        judge,
        description=dict(shape=dict(name=name, problems=[*map(list, problems)]), op=kind.op)
        | dict(dtype=kind.dtype, precision=kind.precision, out_dtype=kind.dtype),
        flops=sum(2 * m * k * n for m, k, n in problems),
        bytes=width * sum(m * k + k * n for m, k, n in problems) + written,
        written_bytes=written,
        seed=seed[0],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lists", nargs="+", choices=list(lists()), help="default: all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="bfloat16")
    parser.add_argument(
        "--precision", choices=("default", "highest"), default="default", help="for float32"
    )


def complete(options: argparse.Namespace) -> None:
    asked = options.dtype, options.precision
    found = [kind for kind in KINDS if (kind.dtype, kind.precision) == asked]
    if not found:
        raise ValueError(f"--precision {options.precision} is for --dtype float32")
    (options.kind,) = found


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:
    kind = options.kind
    chosen = TINY if options.dry_run else {x: lists()[x] for x in options.lists or lists()}

    def measure(name: str, problems: Sequence[Problem]) -> dict:
        with jax.enable_x64(kind.dtype == "float64"):
            return session.compare(work(name, problems, kind, (options.seed,)), peers(kind))

    return [
        Job(f"{name}/{kind.op}", functools.partial(measure, name, problems))
        for name, problems in chosen.items()
    ]


COMMAND = Command("benchmarks.grouped_gemm", __doc__, jobs, add_arguments, complete, time_limit=900)

if __name__ == "__main__":
    COMMAND.main()
