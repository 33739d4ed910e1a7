"""What a plan is: which kernel runs a call, decided from static shapes alone.

A plan is pure Python: it needs neither a device nor the compiled extension, and it never depends
on the values of the operands. Each operation makes its own, for a problem of its own type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax.numpy as jnp

from jax_grouped_gemm._src.arithmetic import is_static
from jax_grouped_gemm._src.prediction import Prediction
from jax_grouped_gemm._src.tile_config import TileConfig

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
