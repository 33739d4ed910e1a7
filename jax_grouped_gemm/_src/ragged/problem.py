"""What a plan is made for: a ragged product's static shapes, dtypes and layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

ACCUMULATE = "ragged_accumulate"
STORED_TRANSPOSED = ("km", "gnk", "nm")
"""Dimensions of operands that are not stored as the product names them."""


@dataclasses.dataclass(frozen=True)
class RaggedProblem:
    """Static description of one ragged product.

    Attributes:
      op: name of the primitive.
      lhs, rhs, out: names of the dimensions of each array without its batch dimension: m is the
        ragged dimension, g the local groups, k and n are those of the product.
      lhs_dtype, rhs_dtype, out_dtype: element types.
      m, k, n, g: extents of the dimensions.
      num_groups: number of global groups.
      batch: extent of the native batch dimension, () without one.
      batched: which of lhs, rhs, group sizes and group offset have that dimension.
    """

    op: str
    lhs: str
    rhs: str
    out: str
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    m: int
    k: int
    n: int
    g: int
    num_groups: int
    batch: tuple[int, ...]
    batched: tuple[bool, ...]

    @classmethod
    def noncontracting(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> Self:
        """The problem of a `ragged_noncontracting` with operands of the given abstract values."""
        lhs = "km" if params["transpose_lhs"] else "mk"
        rhs = "gnk" if params["transpose_rhs"] else "gkn"
        return cls.of("ragged_noncontracting", avals, params, lhs=lhs, rhs=rhs, out="mn")

    @classmethod
    def contracting(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> Self:
        """The problem of a `ragged_contracting` with operands of the given abstract values."""
        lhs = "km" if params["transpose_lhs"] else "mk"
        rhs = "nm" if params["transpose_rhs"] else "mn"
        return cls.of("ragged_contracting", avals, params, lhs=lhs, rhs=rhs, out="gkn")

    @classmethod
    def of(
        cls,
        op: str,
        avals: Sequence[Any],
        params: Mapping[str, Any],
        *,
        lhs: str,
        rhs: str,
        out: str,
        **fields: Any,
    ) -> Self:
        """The problem of (lhs, rhs, group_sizes, group_offset) with dimensions named as given."""
        ranks = (len(lhs), len(rhs), 1, 1)
        sizes: dict[str, Any] = {"g": params.get("num_groups")}
        for names, aval in ((lhs, avals[0]), (rhs, avals[1])):
            sizes |= zip(names, aval.shape[-len(names) :], strict=True)
        batched = tuple(x.ndim > rank for x, rank in zip(avals, ranks, strict=True))
        batches = [x.shape[0] for x, b in zip(avals, batched, strict=True) if b]
        return cls(
            op=op,
            lhs=lhs,
            rhs=rhs,
            out=out,
            lhs_dtype=avals[0].dtype,
            rhs_dtype=avals[1].dtype,
            out_dtype=np.dtype(params["preferred_element_type"]),
            **sizes,
            num_groups=avals[2].shape[-1],
            batch=tuple(batches[:1]),
            batched=batched,
            **fields,
        )

    @property
    def arrays(self) -> tuple[tuple[str, np.dtype], ...]:
        """Dimension names and element type of lhs, rhs and the result."""
        return (
            (self.lhs, self.lhs_dtype),
            (self.rhs, self.rhs_dtype),
            (self.out, self.out_dtype),
        )

    @property
    def contracts_rows(self) -> bool:
        """Whether the ragged dimension is contracted."""
        return "m" not in self.out

    @property
    def is_float32(self) -> bool:
        """Whether operands are multiplied in parts of 16 bits."""
        return self.lhs_dtype == np.float32

    @property
    def multiply_adds(self) -> float:
        """How many pairs of elements are multiplied if groups are equal: those of local ones."""
        local = self.g / max(self.num_groups, 1)
        return math.prod(self.batch) * self.m * local * self.k * self.n

    def shape(self, names: str) -> tuple[int, ...]:
        """Extents of the named dimensions."""
        return tuple(getattr(self, name) for name in names)

    def array_bytes(self) -> tuple[float, float, float]:
        """What is read of lhs and of rhs, and the size of the result.

        That is rows of local groups, if all groups are equal, and weights of groups with rows.
        """
        batch = math.prod(self.batch)
        lhs, rhs, out = (
            math.prod(self.shape(names)) * dtype.itemsize for names, dtype in self.arrays
        )
        shares = (
            min(self.m / max(self.g, 1), 1) if "g" in names else self.g / max(self.num_groups, 1)
            for names in (self.lhs, self.rhs)
        )
        lhs_batch, rhs_batch = (batch if batched else 1 for batched in self.batched[:2])
        lhs_share, rhs_share = shares
        return lhs * lhs_share * lhs_batch, rhs * rhs_share * rhs_batch, out * batch

    def __str__(self) -> str:
        lhs, rhs, out = (
            f"{dtype}{list(self.shape(names))}{'^T' * (names in STORED_TRANSPOSED)}"
            for names, dtype in self.arrays
        )
        batch = f", batch {self.batch[0]}" if self.batch else ""
        return f"{self.op} {lhs} x {rhs} -> {out}, {self.num_groups} groups{batch}"
