"""Measures grouped rank-k and rank-2k updates, and the expressions and calls that they replace.

python -m benchmarks.rank_k --output benchmarks/results/rank_k.json

All peers take the same stacks [g, n, k]. "ours" writes one triangle, as BLAS does. FLOPs are those
of one triangle, and a complex multiply-add counts as four. In double precision, CUTLASS's grouped
rank-2k kernels are peers too; `benchmarks/cutlass/build.sh` builds them.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import jax_grouped_gemm as jgg
from benchmarks.harness import exact
from benchmarks.harness.cases import by_name
from benchmarks.harness.command import Command, add_choices
from benchmarks.harness.measure import Workload
from benchmarks.harness.peer import JaxPeer, Peer, Role, pinned_implementation
from benchmarks.harness.session import Job, Session
from benchmarks.peers import cutlass
from benchmarks.peers.cublas_symmetric import CublasSymmetric

Shape = tuple[int, int, int]  # g, n, k
BF16_SHAPES = (
    (8, 2048, 2048), (2, 4096, 4096), (1, 8192, 8192), (16, 1024, 1024),
    (64, 256, 1024), (16, 512, 512), (32, 1024, 256),
)  # fmt: skip
WIDE_SHAPES = ((16, 1024, 1024), (8, 2048, 2048))
TINY_SHAPES = ((2, 24, 16), (1, 40, 8))


@dataclass(frozen=True)
class Update:
    """One of the four symmetric updates in one dtype."""

    name: str
    two_operands: bool
    dtype: str
    shapes: tuple[Shape, ...]
    tolerance: float  # relative error of the triangle
    precision: str | None = None  # for float32 operands; "default" is as accurate as TF32

    @property
    def hermitian(self) -> bool:
        return self.dtype.startswith("complex")


UPDATES = by_name(
    Update("syrk", False, "bfloat16", BF16_SHAPES, 2.0**-8),
    Update("syr2k", True, "bfloat16", BF16_SHAPES, 2.0**-8),
    Update("syrk_f32", False, "float32", WIDE_SHAPES, 1e-5, "highest"),
    Update("syr2k_f32", True, "float32", WIDE_SHAPES, 1e-5, "highest"),
    Update("syr2k_f32_default", True, "float32", WIDE_SHAPES, 1e-3, "default"),
    Update("syr2k_f64", True, "float64", WIDE_SHAPES, 1e-13),
    Update("her2k_c128", True, "complex128", WIDE_SHAPES, 1e-13),
)


def product(a, b):
    return jnp.einsum("gik,gjk->gij", a, b.conj())


def mirrored(p):
    return p + jnp.swapaxes(p, 1, 2).conj()


# The expressions that a JAX user would write. All compute both triangles. The ceiling is one of the
# two products.
EXPRESSIONS: dict[bool, dict[str, tuple[Role, Callable[..., jax.Array]]]] = {
    False: {"A@A.T": (Role.GROUPED, lambda a, b: product(a, a))},
    True: {
        "A@B.T + B@A.T": (Role.GROUPED, lambda a, b: product(a, b) + product(b, a)),
        "P + P.T": (Role.GROUPED, lambda a, b: mirrored(product(a, b))),
        "A@B.T": (Role.CEILING, product),
    },
}


def ours(update: Update, **options) -> Callable[..., jax.Array]:
    functions = {
        (False, False): jgg.grouped_syrk,
        (True, False): jgg.grouped_syr2k,
        (False, True): jgg.grouped_herk,
        (True, True): jgg.grouped_her2k,
    }
    options = {"implementation": pinned_implementation()} | options
    function = functools.partial(functions[update.two_operands, update.hermitian], **options)
    return function if update.two_operands else lambda a, b: function(a)


def at_precision(function: Callable[..., jax.Array], precision: str | None):
    """Returns the function with a fixed default precision.

    The context is inside the function, because JAX traces a jitted function again in a new context.
    """

    @functools.wraps(function)
    def with_precision(a, b):
        with jax.default_matmul_precision(precision):
            return function(a, b)

    return with_precision


def peers(update: Update) -> list[Peer]:
    """Returns the peers for an update. Operands are `a`, and `b` if the update takes two."""

    def jax_peer(name: str, role: Role, function: Callable[..., jax.Array]) -> Peer:
        return JaxPeer(name, role, at_precision(function, update.precision))

    names = cutlass.UPDATES.get(update.dtype, ()) if update.two_operands else ()
    return [
        jax_peer("ours", Role.OURS, ours(update)),
        jax_peer("symmetric", Role.VARIANT, ours(update, symmetrize_output=True)),
        *(jax_peer(name, *of) for name, of in EXPRESSIONS[update.two_operands].items()),
        CublasSymmetric(),
        *map(cutlass.CutlassRank2k, names),
    ]


def work(update: Update, shape: Shape, seed: Sequence[int]) -> Workload:
    a, b = (exact.normal(shape, update.dtype, (*seed, i)) for i in range(2))
    expected = exact.triangles(a, b if update.two_operands else None)
    judge = exact.judged(
        lambda out: exact.triangle_error(out, expected),
        lambda error, call: error.within(update.tolerance),
    )
    g, n, k = shape
    written = g * n * (n + 1) // 2 * a.dtype.itemsize
    read = a.nbytes + (b.nbytes if update.two_operands else 0)
    return Workload(
        f"{named(shape)}/{update.name}",
        update,
        (a, b),
        judge,
        description=dict(shape=dict(name=named(shape), groups=g, n=n, k=k), op=update.name)
        | dict(distribution="equal", dtype=update.dtype, out_dtype=update.dtype)
        | dict(precision=update.precision or "default"),
        flops=(2 if update.two_operands else 1) * (4 if update.hermitian else 1) * g * n * n * k,
        bytes=read + written,
        written_bytes=written,
        seed=seed[0],
    )


def named(shape: Shape) -> str:
    return "x".join(map(str, shape))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choices(parser, "--ops", UPDATES)


def jobs(options: argparse.Namespace, session: Session) -> list[Job]:

    def measure(update: Update, shape: Shape) -> dict:
        with jax.enable_x64(True):
            return session.compare(work(update, shape, (options.seed,)), peers(update), host=False)

    return [
        Job(f"{named(shape)}/{update.name}", functools.partial(measure, update, shape))
        for update in map(UPDATES.get, options.ops)
        for shape in (TINY_SHAPES if options.dry_run else update.shapes)
    ]


COMMAND = Command("benchmarks.rank_k", __doc__, jobs, add_arguments)

if __name__ == "__main__":
    COMMAND.main()
