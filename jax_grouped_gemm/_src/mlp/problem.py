"""What a plan is made for: one operation of an MLP, with its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax

from jax_grouped_gemm._src.mlp.operands import named
from jax_grouped_gemm._src.quantized.array import QuantizedArray

Operands = TypeVar("Operands")


@dataclasses.dataclass(frozen=True)
class MlpProblem(Generic[Operands]):
    """Static description of one operation of an MLP.

    Attributes:
      op: its name.
      operands: their shapes and dtypes.
      params: of the primitive, of which `tree` is the structure of the operands.
    """

    op: str
    operands: Operands
    params: Mapping[str, Any]

    def given(self, arrays: tuple[jax.Array, ...]) -> Operands:
        """The operands of the primitive, typed."""
        return self.params["tree"].unflatten(arrays)

    def __str__(self) -> str:
        every = named(self.operands)
        operands = (
            f"{name} {x.format if isinstance(x, QuantizedArray) else x.dtype}{list(x.shape)}"
            for name, x in every.items()
            if name not in ("sizes", "offset", "inverse")
        )
        return f"{self.op} {', '.join(operands)}, {every['sizes'].shape[0]} groups"
