"""Plans, which say which kernel runs a call, and the tables of kernels to choose from.

Planning needs neither a device nor the compiled extension, and never depends on the values of
operands. Each operation has its own type of problem, and a table of kernels. The table says when to
take each kernel, and which record justifies this choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from jax import lax

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Prediction, Target, predict
from jax_grouped_gemm._src.invariance import is_invariant
from jax_grouped_gemm._src.sizes import too_large_operands

Schedule = Literal[
    "cooperative",
    "pingpong",
    "stream_k",
    "swapped",
    "quantizing",
    "few_rows",
    "triangular",
    "fine",
    "square",
    "streamed",
    "decoded",
]


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One compiled kernel configuration.

    Attributes:
      tile_m: rows of the result that a thread block computes at a time.
      tile_n: columns of the result that a thread block computes at a time.
      cluster: number of thread blocks that share operand tiles.
      stream_k: whether the last wave of tiles is cut along K, so that all thread blocks share it.
    """

    tile_m: int
    tile_n: int
    cluster: int
    stream_k: bool = False

    def sizes(self) -> dict[str, int]:
        """Returns tile_m, tile_n and cluster by name, as attributes of a custom call."""
        return dict(tile_m=self.tile_m, tile_n=self.tile_n, cluster=self.cluster)

    def __str__(self) -> str:
        cut = ", stream-k" * self.stream_k
        return f"{self.tile_m}x{self.tile_n}, cluster {self.cluster}{cut}"


DEFAULT_TILE = TileConfig(tile_m=128, tile_n=256, cluster=2)
"""The tile that runs every ragged product."""


Formats = tuple[str, ...]
"""Names of dtypes, or of the formats of quantised operands."""
FLOATS_16: Formats = ("bfloat16", "float16")
FLOATS_8: Formats = ("float8_e4m3fn", "float8_e5m2")
FLOATS: Formats = (*FLOATS_16, "float32")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to compute an operation, and a row of the operation's table.

    Attributes:
      name: the kernel's name in `explain`.
      record: the file in benchmarks/results, and the case in it, that measured this choice; None
        if a prediction justifies it.
      lhs, rhs: formats of the operands. () means any format, None means rhs has the format of lhs.
      out: formats of the results; None means the format of lhs.
      refuses: returns why the kernel cannot run a problem of these formats, empty if it can.
      pays: returns whether the kernel is faster than the first row, for a problem that it can run.
      in_order: returns whether each element of the result is summed along k in ascending order and
        in the same steps, whatever else is in the tile. All such kernels of a table give the same
        bits; tests on a GPU compare them. Batch invariance takes only such kernels.
      work: in a row of XLA's products, returns their `fallback.Work` for a problem; None if XLA has
        no such products. The prediction of their time justifies this row.
    """

    name: str
    record: tuple[str, str] | None = None
    lhs: Formats = ()
    rhs: Formats | None = None
    out: Formats | None = None
    refuses: Callable[[Any], str] = lambda problem: ""
    pays: Callable[[Any, Any], bool] = lambda problem, target: False
    in_order: Callable[[Any], bool] = lambda problem: False
    # Rows are equal if they run the same program, whatever predicts its time.
    work: Callable[[Any], Any] = dataclasses.field(default=lambda problem: None, compare=False)

    def takes(self, lhs: str, rhs: str, out: str) -> bool:
        """Returns whether operands and results may have these formats."""
        rest = ((self.rhs, rhs), (self.out, out))
        return not self.lhs or (
            lhs in self.lhs
            and all(given in ((lhs,) if own is None else own) for own, given in rest)
        )


XLA = Kernel("xla")
"""The pure JAX implementation, which XLA compiles. Every operation has it."""
COMPOSED = Kernel("composed")
"""Several operations, each with its own plan."""
NOTHING = Kernel("nothing")
"""No kernel, because there is nothing to compute. The result is zeros, or the accumulator."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledKernel(Kernel):
    """A compiled kernel whose thread blocks compute tiles.

    Attributes:
      tile: the kernel's configuration.
      schedule: how the kernel divides its work. Handlers in C++ use the same names.
      blocks: number of thread blocks on a multiprocessor.
      alignment: rows of arrays must be multiples of this number of bytes, because of TMA.
      splits: whether the kernel splits float32 operands itself, without passes before it.
    """

    name: str = dataclasses.field(init=False)
    tile: TileConfig
    schedule: Schedule = "cooperative"
    blocks: int = 1
    alignment: int = 16
    splits: bool = False

    def __post_init__(self) -> None:
        name = f"{self.schedule}_{self.tile.tile_m}x{self.tile.tile_n}"
        object.__setattr__(self, "name", name)

    def precision_reason(self, precision: Any, implementation: Any) -> str:
        """Returns why the kernel does not multiply with `precision`, empty if it does."""
        return algorithm_reason(precision)

    def places(self, target: Target) -> int:
        """Returns the number of thread blocks that the device runs at a time."""
        cluster = self.tile.cluster
        return target.clusters(cluster) * cluster * self.blocks


class Table(NamedTuple):
    """The rows that an operation chooses from: compiled kernels, the default first, and XLA.

    XLA has a separate field, because a plan compares XLA with the kernel that it would take
    otherwise. XLA takes all formats and has no tile, so messages about formats and tiles omit XLA.
    """

    compiled: Sequence[TiledKernel]
    xla: Kernel = XLA


K = TypeVar("K", bound=Kernel)


def always(problem: Any) -> bool:
    """Returns True, as the `in_order` of kernels that sum in order for every problem."""
    return True


def refusals(table: Sequence[K], problem: Any, implementation: Any = None) -> dict[K, str]:
    """Returns why each kernel for the formats of `problem` cannot run it, empty if it can."""
    taking = [kernel for kernel in table if kernel.takes(*problem.formats)]
    unfit = [k for k in taking if is_invariant(implementation) and not k.in_order(problem)]
    return {k: k.refuses(problem) or "not batch invariant" * (k in unfit) for k in taking}


def able(reasons: Mapping[K, str]) -> list[K]:
    """Returns the kernels that can run a problem, the default first, from `refusals`."""
    return [kernel for kernel, reason in reasons.items() if not reason]


def passed_over(reasons: Mapping[K, str], *taken: K) -> tuple[str, ...]:
    """Returns the names of the kernels that are not taken, each with the reason."""
    left = ((kernel, reason) for kernel, reason in reasons.items() if kernel not in taken)
    return tuple(f"{kernel.name} ({reason or 'not faster'})" for kernel, reason in left)


def format_reason(table: Sequence[Kernel], problem: Any) -> str:
    """Returns why no kernel of `table` takes the formats of `problem`, empty if a kernel does."""
    lhs, rhs, out = problem.formats
    if any(kernel.takes(lhs, rhs, out) for kernel in table):
        return ""
    every = {(kernel.lhs, kernel.rhs): kernel.out for kernel in reversed(table)}
    taken = "; ".join(
        f"{either(own)}{'' if other is None else f' x {either(other)}'} -> "
        f"{'the same' if result is None else either(result)}"
        for (own, other), result in reversed(every.items())
    )
    operands = lhs if lhs == rhs else f"{lhs} x {rhs}"
    return f"no kernel for {operands} -> {out}: there are kernels for {taken}"


def either(formats: Formats) -> str:
    """Returns formats as a list in words, such as "bfloat16, float16 or float32"."""
    return " or ".join(filter(None, (", ".join(formats[:-1]), formats[-1])))


def operand_reason(kernel: Kernel, dtypes: str, operands: str = "operands") -> str:
    """Returns why a kernel does not take operands of these dtypes, empty if it does."""
    if dtypes in kernel.lhs:
        return ""
    return f"the kernels take {operands} of {either(kernel.lhs)}, got {dtypes}"


def choose(kernels: Sequence[K], problem: Any, target: Target | None) -> K:
    """Returns the first kernel that pays, among those that can run `problem`, else the default."""
    default, *others = kernels
    return next((kernel for kernel in others if kernel.pays(problem, target)), default)


def predict_problem(
    problem: Any, kernel: TiledKernel, utilization: float, target: Target
) -> Prediction:
    """Returns the bounds of a kernel's time, if all global groups have equal sizes."""
    terms, split_bytes = problem.terms, 0.0
    products, operand_bytes = max(terms, 1), problem.operand_bytes
    if kernel.splits:
        products = float32.products_in_kernel(terms)
    else:
        operand_bytes, split_bytes = float32.bytes_of_split(operand_bytes, terms)
    return predict(
        np.dtype(problem.formats[0]),
        multiply_adds=problem.multiply_adds * products,
        utilization=utilization,
        num_bytes=operand_bytes + problem.result_bytes,
        target=target,
        split_bytes=split_bytes,
    )


TMA_ALIGNMENT_BYTES = 16

AS_ASKED = "implementation='xla' was asked for"
"""The reason in plans whose parameter `implementation` is "xla"."""


def algorithm_reason(precision: Any) -> str:
    """Returns why no kernel multiplies with `precision`, empty if a kernel may."""
    is_algorithm = isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset))
    return f"the kernels do not implement precision={precision}" if is_algorithm else ""


ChosenBy = Literal["default", "override"]
Product = Literal["forward", "dgrad", "wgrad"]


class Problem(Protocol):
    """Static description of one call's computation; `explain` prints its `str()`."""

    @property
    def op(self) -> str:
        """Name of the primitive."""


P = TypeVar("P", bound=Problem, covariant=True)


@dataclasses.dataclass(frozen=True)
class Plan(Generic[P]):
    """How one call runs on a device of compute capability 9.0.

    Attributes:
      problem: the problem to compute.
      kernel: a compiled kernel, `XLA`, `COMPOSED` for several operations, or `NOTHING`.
      reason: why no kernel computes the call, or why the kernel gets copies of arrays that TMA
        cannot address.
      kernel_problem: the problem that the kernel gets, None without a kernel. It equals `problem`
        if nothing is copied, unless XLA converts the result to a dtype that no kernel writes.
      grid: number of thread blocks.
      workspace_bytes: size of the kernel's scratch memory in bytes.
      terms: number of products of float16 parts for one float32 product, 1 or 3, or of bfloat16
        parts if groups have few rows, 3 or 6; 0 for operands of other dtypes.
      utilization: share of the tensor cores' work that is useful, for groups of equal size. Tiles
        at edges and idle multiprocessors reduce it. 0 without a kernel.
      prediction: the predicted time of the kernel, and what bounds it; None without a kernel.
      chosen_by: "default" if the operation chose the tile, or "override" if
        `jax_grouped_gemm.use_tiles` did.
      candidates: the compiled configurations that can run the problem, () without a kernel.
      passed_over: the other kernels for these formats, each with the reason. It is empty if
        `use_tiles` chose the tile, or if sizes are symbolic.
      product: which product of a ragged matmul the call is; None for second derivatives and for
        other operations.
      notes: more lines for `explain` to print.
    """

    problem: P
    kernel: Kernel
    reason: str = ""
    kernel_problem: P | None = None
    grid: int = 0
    workspace_bytes: int = 0
    terms: int = 0
    utilization: float = 0.0
    prediction: Prediction | None = None
    chosen_by: ChosenBy = "default"
    candidates: tuple[TileConfig, ...] = ()
    passed_over: tuple[str, ...] = ()
    product: Product | None = None
    notes: tuple[str, ...] = ()

    @property
    def tile(self) -> TileConfig | None:
        """The kernel's configuration, None if the plan has no kernel with tiles."""
        return self.kernel.tile if isinstance(self.kernel, TiledKernel) else None

    @property
    def launched(self) -> tuple[P, TiledKernel]:
        """The problem that the kernel gets, and the kernel, which must have tiles."""
        assert self.kernel_problem is not None and isinstance(self.kernel, TiledKernel)
        return self.kernel_problem, self.kernel

    def __str__(self) -> str:
        label = f"{self.product}: " if self.product else ""
        kernel = f"kernel {self.kernel.name}" + ", on copies" * self.copies
        if self.reason:
            kernel += f" ({self.reason})"
        lines = [f"{label}{self.problem}", kernel]
        if self.tile:
            lines.append(self.describe_launch())
        if self.prediction:
            lines.append(str(self.prediction))
        lines += [f"passed over: {', '.join(self.passed_over)}"] * bool(self.passed_over)
        return "\n   ".join([*lines, *self.notes])

    @property
    def copies(self) -> bool:
        """Whether the kernel gets copies of arrays."""
        return self.kernel_problem is not None and bool(self.reason)

    def describe_launch(self) -> str:
        """Returns the text of `explain` for a kernel's configuration."""
        tile = f"tile {self.tile}" + " (overridden)" * (self.chosen_by == "override")
        return f"{tile}, grid {self.grid}, workspace {self.workspace_bytes} bytes"


def unaddressable_rows(
    names: str, problem: Any, addressable: Any, terms: int, of_what: str = ""
) -> list[str]:
    """Returns which of the named extents of `problem` are padded in `addressable`, and why."""
    parts = " of float16 parts" if terms else ""
    return [
        f"rows of {name}={getattr(problem, name)} elements{of_what} are not a multiple of 16 bytes"
        f"{parts}"
        for name in names
        if getattr(problem, name) != getattr(addressable, name)
    ]


def symbolic_sizes(avals: Iterable[Any]) -> str:
    """Returns why no kernel runs operands with symbolic sizes, or an empty string."""
    shapes = [x.shape for x in avals if not is_static(*x.shape)]
    if not shapes:
        return ""
    return f"its kernels need static sizes, got {', '.join(map(str, shapes))}"


def sizes_reason(op: str, avals: Sequence[Any], implementation: Any) -> str:
    """Returns why no kernel runs operands of these sizes, empty if a kernel does.

    Raises:
      NotImplementedError: no kernel does, and `implementation` asks for batch invariance.
    """
    reason = symbolic_sizes(avals) or too_large_operands(avals)
    if reason and is_invariant(implementation):
        raise NotImplementedError(f"batch_invariant is impossible for {op}: {reason}")
    return reason
