"""The problem of a plan of symmetric updates: static shapes and dtypes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.arrays import at_least_float32, round_up
from jax_grouped_gemm._src.fallback import Work
from jax_grouped_gemm._src.plan import unaddressable_rows


@dataclasses.dataclass(frozen=True)
class Stack:
    """Matrices of one shape: `g` results of [n, n] from operands of [n, k]."""

    g: int
    n: int
    k: int


@dataclasses.dataclass(frozen=True)
class RankKProblem:
    """Static description of the updates of a list of stacks.

    Attributes:
      op: "rank_k", "rank_2k" or "symm_product".
      stacks: the shapes.
      dtype, result_dtype: element types.
      transpose: whether operands are stored [g, k, n].
      has_c: whether c is added; the other triangle then keeps c, unless it is the mirror image.
      upper: whether the upper triangle is computed.
      symmetrize: whether the other triangle is the mirror image.
      hermitian: whether products are with the conjugate transpose.
      has_diagonal: whether a multiple of the identity is added.
      whole_tiles: whether no tile may be cut, so that the bits of a result do not depend on the
        number of results.
      c_is_factor: for each stack, whether c is also a factor. XLA would copy such a c before a
        kernel that updates it in place.
      terms: see `Plan`.
    """

    op: str
    stacks: tuple[Stack, ...]
    dtype: np.dtype
    result_dtype: np.dtype
    transpose: bool
    has_c: bool
    upper: bool
    symmetrize: bool
    hermitian: bool
    has_diagonal: bool = False
    whole_tiles: bool = False
    c_is_factor: tuple[bool, ...] = ()
    terms: int = 0

    @classmethod
    def of(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> RankKProblem:
        """Returns the problem of a `rank_k` primitive with operands of these avals."""
        count = params["num_problems"]
        operands = avals[count : 2 * count]
        n_axis, k_axis = (2, 1) if params["transpose"] else (1, 2)
        flags = ("transpose", "has_c", "upper", "symmetrize", "hermitian", "has_diagonal")
        fields = *flags, "whole_tiles", "c_is_factor"
        return cls(
            op="rank_k" if not params["has_b"] else "symm_product" if params["symm"] else "rank_2k",
            stacks=tuple(Stack(x.shape[0], x.shape[n_axis], x.shape[k_axis]) for x in operands),
            dtype=operands[0].dtype,
            result_dtype=np.dtype(params["result_dtype"]),
            terms=float32.terms_of(operands[0].dtype, params["precision"]),
            **{name: params[name] for name in fields},
        )

    @property
    def num_products(self) -> int:
        """Number of products of two factors that each result adds up."""
        return 2 if self.op == "rank_2k" else 1

    @property
    def num_factors(self) -> int:
        """Number of factors of each result."""
        return 1 if self.op == "rank_k" else 2

    @property
    def formats(self) -> tuple[str, ...]:
        """See `Kernel.takes`."""
        return self.dtype.name, self.dtype.name, self.result_dtype.name

    @property
    def nothing(self) -> str:
        """The reason why no kernel is launched, empty if one is launched."""
        return "" if launch_order(self) else "the results are empty"

    def padded(self, multiples: tuple[int, int], result_dtype: np.dtype) -> Self:
        """Pads rows of operands and rows of results to these two multiples of elements."""
        of_operands, of_results = multiples
        # Pad n for the rows of results alone, unless rows of operands have n elements too.
        n_multiple = of_operands if self.transpose else of_results
        k_multiple = 1 if self.transpose else of_operands
        stacks = tuple(
            Stack(s.g, round_up(s.n, n_multiple), round_up(max(s.k, 1), k_multiple))
            for s in self.stacks
        )
        return dataclasses.replace(self, stacks=stacks, result_dtype=result_dtype)

    def copy_reason(self, addressable: Self) -> str:
        """Returns why TMA cannot address the arrays, an empty string if it can."""
        pairs = zip(self.stacks, addressable.stacks, strict=True)
        reasons = (unaddressable_rows("nk", *pair, self.terms) for pair in pairs)
        return "; ".join(itertools.chain(*reasons))

    def sizes(self) -> dict[str, int]:
        """Returns the sizes that kernels count, by name. Rank-2k updates count twice k."""
        k = "k" if self.num_products == 1 else "twice k"
        return {
            f"{name} of stack {i}": size
            for i, s in enumerate(self.stacks)
            for name, size in {"g": s.g, "n": s.n, k: self.num_products * s.k}.items()
        }

    @property
    def multiply_adds(self) -> float:
        """Number of products of two elements that the results need."""
        per_product = sum(s.g * s.n * (s.n + 1) / 2 * s.k for s in self.stacks)
        return per_product * self.num_products

    @property
    def operand_bytes(self) -> int:
        """The size of all factors."""
        elements = self.num_factors * sum(s.g * s.n * s.k for s in self.stacks)
        return self.dtype.itemsize * elements

    @property
    def result_bytes(self) -> float:
        """Bytes of written results, and of the triangles of c that are read.

        The other triangle is also written, as a mirror image or as zeros, unless it keeps c.
        """
        triangles = sum(s.g * s.n * (s.n + 1) / 2 for s in self.stacks)
        writes = 2 if self.symmetrize or not self.has_c else 1
        return self.result_dtype.itemsize * triangles * (writes + self.has_c)

    def xla_work(self) -> Work | None:
        """Returns the work of XLA's products of whole matrices, or None if XLA is no alternative.

        `fallback` compares it with the kernel. XLA adds, mirrors and masks in another pass.
        """
        if self.dtype == jnp.complex64:
            return None  # the kernels accumulate in float64, but XLA does not
        stacks = [self.stacks[i] for i in launch_order(self)]
        elements = sum(s.g * s.n * s.n for s in stacks)
        sums_bytes = np.dtype(at_least_float32(self.result_dtype)).itemsize * elements
        # If results are symmetric, or sums of two products, the pass also reads mirror images.
        reads = 1 + (self.num_products > 1 or self.symmetrize)
        results = self.result_dtype.itemsize * elements * (1 + self.has_c)
        return Work(
            "update",
            "XLA's products of whole matrices",
            tuple((s.g, s.n, s.n, s.k) for s in stacks),
            self.dtype,
            self.terms,
            moved_bytes=self.operand_bytes + sums_bytes,
            pass_bytes=reads * sums_bytes + results,
        )

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{[s.g, s.k, s.n]}^T" if self.transpose else str([s.g, s.n, s.k]) for s in self.stacks
        )
        triangle = "upper" if self.upper else "lower"
        form = f"{triangle} triangle, {'mirrored' if self.symmetrize else 'alone'}"
        added = ", with c" if self.has_c else ""
        added += ", with a diagonal" if self.has_diagonal else ""
        return f"{self.op} {self.dtype} {shapes} -> {self.result_dtype}, {form}{added}"


def launch_order(problem: RankKProblem) -> list[int]:
    """Returns the stacks that have results, longest tiles first: short tiles even out the end."""
    stacks = problem.stacks
    nonempty = (i for i, s in enumerate(stacks) if 0 not in (s.g, s.n))
    return sorted(nonempty, key=lambda i: -stacks[i].k)
