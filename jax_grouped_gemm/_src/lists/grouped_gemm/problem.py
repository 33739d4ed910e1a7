"""The problem of a plan of a list of products: static shapes, dtypes and layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import round_up
from jax_grouped_gemm._src.fallback import Work
from jax_grouped_gemm._src.lists.schedule import Shape
from jax_grouped_gemm._src.plan import unaddressable_rows

Scheduler = Literal["device", "host_precomputed"]
SCHEDULERS: tuple[Scheduler, ...] = ("device", "host_precomputed")

LISTED = 4  # entries of a list that a description names


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stack of `g` products of [m, k] and [k, n], and how their operands are stored."""

    g: int
    m: int
    n: int
    k: int
    transpose_lhs: bool
    transpose_rhs: bool

    @property
    def shape(self) -> Shape:
        """The extents, without the layouts."""
        return Shape(self.g, self.m, self.n, self.k)

    def __str__(self) -> str:
        def stored(rows, columns, transposed):
            shape = [self.g, columns, rows] if transposed else [self.g, rows, columns]
            return f"{shape}^T" if transposed else str(shape)

        lhs = stored(self.m, self.k, self.transpose_lhs)
        return f"{lhs} x {stored(self.k, self.n, self.transpose_rhs)}"


@dataclasses.dataclass(frozen=True)
class GroupedGemmProblem:
    """Static description of the products of a list.

    Attributes:
      entries: the shapes, in the caller's order.
      dtype, result_dtype: element types.
      has_alpha, has_beta, has_c: which optional operands there are.
      alpha, beta: the numbers in place of missing operands.
      scheduler, sort_problems: as for `grouped_gemm`.
      terms: see `Plan`.
    """

    entries: tuple[Entry, ...]
    dtype: np.dtype
    result_dtype: np.dtype
    has_alpha: bool
    has_beta: bool
    has_c: bool
    alpha: complex
    beta: complex
    scheduler: Scheduler
    sort_problems: bool
    terms: int = 0
    op: str = "grouped_gemm"

    @classmethod
    def of(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> GroupedGemmProblem:
        """Returns the problem of a `grouped_gemm` primitive with operands of these avals."""
        count = params["num_problems"]
        first = count * params["has_alpha"]
        lhs, rhs = avals[first : first + count], avals[first + count : first + 2 * count]
        entries = []
        for a, b, a_transposed, b_transposed in zip(
            lhs, rhs, params["transpose_lhs"], params["transpose_rhs"], strict=True
        ):
            m, k = a.shape[1:][::-1] if a_transposed else a.shape[1:]
            n = b.shape[1 if b_transposed else 2]
            entries.append(Entry(a.shape[0], m, n, k, a_transposed, b_transposed))
        fields = ("has_alpha", "has_beta", "has_c", "alpha", "beta", "scheduler", "sort_problems")
        return cls(
            entries=tuple(entries),
            dtype=lhs[0].dtype,
            result_dtype=np.dtype(params["result_dtype"]),
            terms=float32.terms_of(lhs[0].dtype, params["precision"]),
            **{name: params[name] for name in fields},
        )

    @property
    def formats(self) -> tuple[str, ...]:
        """See `Kernel.takes`."""
        return self.dtype.name, self.dtype.name, self.result_dtype.name

    @property
    def working(self) -> list[int]:
        """The problems that have something to multiply."""
        return [i for i, entry in enumerate(self.entries) if 0 not in entry.shape]

    @property
    def nothing(self) -> str:
        """The reason why no kernel is launched, empty if one is launched."""
        return "" if self.working else "there is nothing to multiply"

    def padded(self, multiples: tuple[int, int], result_dtype: np.dtype) -> Self:
        """Pads rows of operands and rows of results to these two multiples of elements."""
        of_operands, of_results = multiples

        def pad(entry: Entry) -> Entry:
            multiples = {"n": of_results}
            multiples["m" if entry.transpose_lhs else "k"] = of_operands
            multiples["k" if entry.transpose_rhs else "n"] = of_operands
            padded = {name: round_up(getattr(entry, name), x) for name, x in multiples.items()}
            return dataclasses.replace(entry, **padded)

        entries = tuple(map(pad, self.entries))
        return dataclasses.replace(self, entries=entries, result_dtype=result_dtype)

    def copy_reason(self, addressable: Self) -> str:
        """Returns why TMA cannot address the arrays, an empty string if it can."""
        reasons = [
            reason
            for i in self.working
            for reason in unaddressable_rows(
                "mkn", self.entries[i], addressable.entries[i], self.terms, f" of problem {i}"
            )
        ]
        return listed(reasons, "; ")

    def sizes(self) -> dict[str, int]:
        """Returns the sizes that kernels count, by name."""
        return {
            f"{name} of problem {i}": size
            for i, entry in enumerate(self.entries)
            for name, size in entry.shape._asdict().items()
        }

    @property
    def multiply_adds(self) -> int:
        """Number of pairs of elements that all products multiply."""
        return sum(math.prod(entry.shape) for entry in self.entries)

    @property
    def operand_bytes(self) -> int:
        """The size of all factors."""
        return self.dtype.itemsize * sum(e.g * e.k * (e.m + e.n) for e in self.entries)

    @property
    def result_bytes(self) -> int:
        """The size of all results, and of c, which the kernel reads in the results' dtype."""
        arrays = 1 + self.has_c
        return arrays * self.result_dtype.itemsize * sum(e.g * e.m * e.n for e in self.entries)

    def xla_work(self) -> Work | None:
        """Returns the work of one XLA call for each product, or None if XLA is no alternative.

        `fallback` compares it with the kernel. XLA scales a result and adds c in another pass.
        """
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            return None  # complex64 would lose accuracy, and complex128 has not been measured
        products = tuple(self.entries[i].shape for i in self.working)
        is_scaled = self.has_alpha or self.alpha != 1 or self.has_c
        return Work(
            "list",
            "XLA's products, a call each,",
            products,
            self.dtype,
            self.terms,
            moved_bytes=self.operand_bytes + self.result_bytes,
            pass_bytes=2 * self.result_bytes * is_scaled,
            passes=len(products) * is_scaled,
        )

    def __str__(self) -> str:
        c = ", with c" if self.has_c else ""
        return f"{self.op} {self.dtype} {listed(self.entries)} -> {self.result_dtype}{c}"


def listed(items: Sequence[Any], separator: str = ", ") -> str:
    """Names the first items, and says how many more there are."""
    named = separator.join(map(str, items[:LISTED]))
    return named if len(items) <= LISTED else f"{named} and {len(items) - LISTED} more"
