"""Which kernel runs a call: what a plan is, and the configurations that it chooses from.

A plan is pure Python: it needs neither a device nor the compiled extension, and it never depends
on the values of the operands. Each operation makes its own, for a problem of its own type, from a
table of choices that says of every configuration when it is taken and what justifies that.

`use_tiles` takes other configurations than the default. The choices of the context are read where a
ragged product is called, and from there on they travel with the product as parameters of its
primitive: `product`, which one it is; `tile`, what it must take; and `tile_choices`, what its
cotangents must take. So a plan stays a function of a primitive's operands and parameters, and
gradients follow the choices that held for the forward pass, wherever they are computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.arrays import is_static
from jax_grouped_gemm._src.device import Prediction, Target

WGMMA_ROWS = 64  # of one instruction
PINGPONG_COLUMNS = 192  # of tiles that two consumers compute in turn

KernelKind = Literal["cooperative", "pingpong", "stream_k", "swapped"]


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """One compiled kernel configuration.

    Attributes:
      tile_m: rows of the result that a thread block computes at a time.
      tile_n: columns of the result that a thread block computes at a time.
      cluster: number of thread blocks that share operand tiles.
      stream_k: whether the last wave of tiles is cut along K, see `_src.ragged.problem`.
    """

    tile_m: int
    tile_n: int
    cluster: int
    stream_k: bool = False

    @property
    def transposed(self) -> bool:
        """Whether rows and columns change places, in kernels for groups of few rows."""
        return self.tile_m <= WGMMA_ROWS

    @property
    def kind(self) -> KernelKind:
        """How the kernel of a product divides its work, in the words that its handler takes.

        One kind is compiled of each size but for the cut last wave, so that the sizes say it.
        """
        if self.stream_k:
            return "stream_k"
        if self.transposed:
            return "swapped"
        return "pingpong" if self.tile_n == PINGPONG_COLUMNS else "cooperative"

    def sizes(self) -> dict[str, int]:
        """The numbers by name, as every handler takes them."""
        return dict(tile_m=self.tile_m, tile_n=self.tile_n, cluster=self.cluster)

    def __str__(self) -> str:
        words = [f"{self.tile_m}x{self.tile_n}", f"cluster {self.cluster}"]
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.default not in (dataclasses.MISSING, value):
                words.append(option.name.replace("_", "-") if value is True else str(value))
        return ", ".join(words)


DEFAULT_TILE = TileConfig(tile_m=128, tile_n=256, cluster=2)
"""What every ragged product can be computed in."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One compiled configuration.

    Attributes:
      tile: the configuration.
      record: the file in benchmarks/results and the case in it that were measured with this choice;
        None if none was, and it is taken by a prediction.
      runs: whether it can run a problem, as the kernels get it.
      pays: whether it is faster than the default, for a problem that it can run.
      blocks: thread blocks that share a multiprocessor.
    """

    tile: TileConfig
    record: tuple[str, str] | None
    runs: Callable[[Any], bool] = lambda problem: True
    pays: Callable[[Any, Target], bool] = lambda problem, target: False
    blocks: int = 1

    def places(self, target: Target) -> int:
        """Thread blocks that the device runs at a time."""
        cluster = self.tile.cluster
        return max(target.multiprocessors // cluster, 1) * cluster * self.blocks


def runnable(table: Sequence[Choice], problem: Any) -> list[Choice]:
    """The entries of a table that can run `problem`, the default first."""
    return [choice for choice in table if choice.runs(problem)]


class Alternative(Protocol):
    """An entry of a table: taken where it pays."""

    @property
    def pays(self) -> Callable[[Any, Any], bool]: ...


A = TypeVar("A", bound=Alternative)


def choose(choices: Sequence[A], problem: Any, target: Target | None) -> A:
    """What to take of the entries that can run `problem`."""
    default, *others = choices
    return next((choice for choice in others if choice.pays(problem, target)), default)


TMA_ALIGNMENT_BYTES = 16

KERNEL_OPERAND_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
KERNEL_RESULT_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

AS_ASKED = "implementation='reference' was asked for"
"""The reason of plans whose parameter `implementation` is "reference"."""

Path = Literal["tma", "copied", "direct", "fused", "unfused", "whole", "zeros", "reference"]
ChosenBy = Literal["default", "override"]
Product = Literal["forward", "dgrad", "wgrad"]


class Problem(Protocol):
    """Static description of what one call computes; `str()` is what `explain` says of it."""

    @property
    def op(self) -> str:
        """Name of the primitive."""


P = TypeVar("P", bound=Problem, covariant=True)


@dataclasses.dataclass(frozen=True)
class Plan(Generic[P]):
    """How one call runs on a device of compute capability 9.0.

    Attributes:
      problem: what is computed.
      path: "tma" is the kernel on the arrays as they are; "copied" the kernel on copies that TMA
        can address; "direct" a kernel without TMA, on the arrays as they are; "fused" one kernel
        for what "unfused" does by several operations; "whole" XLA's product of all rows with every
        group's matrix, where that is faster; "zeros" no kernel at all; "reference" the pure JAX
        implementation.
      reason: why not "tma", "direct" or "fused", empty on those paths.
      kernel_problem: the problem that the kernel gets, None without a kernel. It equals `problem`
        on the path "tma", unless XLA converts the result to a dtype that no kernel writes.
      tile: kernel configuration, None without a kernel.
      grid: thread blocks launched.
      workspace_bytes: scratch memory of the kernel.
      terms: products of float16 parts that make up a product of float32 operands, 1 or 3; with few
        rows a group, where parts are bfloat16, the precision of as many. 0 for other operands. See
        `_src.float32`.
      utilization: share of the tensor cores' work that is useful, from the tiles' edges and from
        how tiles are dealt out, for groups of equal size. 0 without a kernel.
      prediction: how long the kernel takes, and what bounds it; None without a kernel.
      chosen_by: what the tile comes from: "default", the operation's choice, or "override", a tile
        given to `jax_grouped_gemm.use_tiles`.
      candidates: the compiled configurations that can run the problem, () without a kernel.
      product: which product of a ragged matmul it is, None if it is a cotangent's own cotangent,
        and of other operations.
      notes: what else `explain` says.
    """

    problem: P
    path: Path
    reason: str = ""
    kernel_problem: P | None = None
    tile: TileConfig | None = None
    grid: int = 0
    workspace_bytes: int = 0
    terms: int = 0
    utilization: float = 0.0
    prediction: Prediction | None = None
    chosen_by: ChosenBy = "default"
    candidates: tuple[TileConfig, ...] = ()
    product: Product | None = None
    notes: tuple[str, ...] = ()

    @property
    def kernel(self) -> tuple[P, TileConfig]:
        """The problem that the kernel gets and its configuration; only plans with a kernel."""
        assert self.kernel_problem is not None and self.tile is not None, self.path
        return self.kernel_problem, self.tile

    def __str__(self) -> str:
        label = f"{self.product}: " if self.product else ""
        path = f"{self.path} ({self.reason})" if self.reason else self.path
        lines = [f"{label}{self.problem}", f"path {path}"]
        if self.tile:
            lines.append(self.describe_launch())
        if self.prediction:
            lines.append(str(self.prediction))
        return "\n   ".join([*lines, *self.notes])

    def describe_launch(self) -> str:
        """What `explain` says of a kernel's configuration."""
        overridden = " (overridden)" if self.chosen_by == "override" else ""
        return (
            f"tile {self.tile}{overridden}, grid {self.grid}, "
            f"workspace {self.workspace_bytes} bytes"
        )


def symbolic_sizes(avals: Iterable[Any]) -> str:
    """Returns why no kernel runs operands with symbolic sizes, or an empty string."""
    shapes = [x.shape for x in avals if not is_static(*x.shape)]
    if not shapes:
        return ""
    return f"its kernels need static sizes, got {', '.join(map(str, shapes))}"


@dataclasses.dataclass(frozen=True)
class TileChoices:
    """What `use_tiles` was given, None for what it was not."""

    forward: TileConfig | None = None
    dgrad: TileConfig | None = None
    wgrad: TileConfig | None = None

    def params(self, product: Product) -> dict[str, Any]:
        """The parameters of a primitive that computes a product, its name among them."""
        chosen: dict[str, Any] = {"product": product}
        if (tile := getattr(self, product)) is not None:
            chosen["tile"] = tile
        # A cotangent's own cotangents have no name, so that nothing can be chosen for them.
        if product == "forward" and self != TileChoices():
            chosen["tile_choices"] = self
        return chosen


# Part of the key of JAX's caches: a jitted function is traced again under other choices.
_context = jax.make_user_context(TileChoices())


def current_tiles() -> TileChoices:
    """The choices of the innermost `use_tiles` and of those around it."""
    return _context.value


def for_cotangent(params: Mapping[str, Any], product: Product) -> dict[str, Any]:
    """`params` of a product without its own choices, with those for one of its cotangents."""
    own = ("product", "tile", "tile_choices")
    rest = {name: value for name, value in params.items() if name not in own}
    if params.get("product") != "forward":
        return rest
    return rest | params.get("tile_choices", TileChoices()).params(product)


@contextlib.contextmanager
def using_tiles(choices: TileChoices) -> Iterator[None]:
    """Makes `choices` the current ones."""
    with _context(choices):
        yield


@contextlib.contextmanager
def use_tiles(
    *,
    forward: TileConfig | None = None,
    dgrad: TileConfig | None = None,
    wgrad: TileConfig | None = None,
) -> Iterator[None]:
    """Context in which ragged products take the given kernel configurations.

    Holds for the products that this thread calls or traces inside, those of Flax layers and of
    functions under `jax.jit` included, and for their gradients even if those are computed outside.
    A jitted function is traced and compiled again for each set of choices it is called under.
    An inner context takes precedence over an outer one, which keeps what the inner one leaves out;
    where neither says anything, plans have their default. Can decorate a function. Products that no
    kernel runs (see `explain`), and symmetric updates, are not affected.

    Args:
      forward: the configuration of all products that are called: `ragged_dot`,
        `ragged_dot_general`, `scaled_ragged_dot`, `scaled_ragged_dot_contracting`,
        `fp8_ragged_dot`.
      dgrad: that of the cotangents of their first operands.
      wgrad: that of the cotangents of their second operands, and of `ragged_dot_accumulate`.

    The `candidates` of a plan that `explain` returns are the configurations that are compiled for
    that product. Any other raises a `ValueError` that lists them when the product is traced.

    Raises:
      TypeError: an argument is of another type.
    """
    given = TileChoices(forward, dgrad, wgrad)
    changes = {}
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if value is not None:
            if not isinstance(value, TileConfig):
                raise TypeError(
                    f"{field.name} must be a jax_grouped_gemm.TileConfig, got {value!r}"
                )
            changes[field.name] = value
    with using_tiles(dataclasses.replace(current_tiles(), **changes)):
        yield
