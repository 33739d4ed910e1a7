"""What a plan is made for: the operands of an operation of an MLP, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

_WITH_ROWS = ("rows", "x", "hidden", "gate")


@dataclasses.dataclass(frozen=True)
class MlpProblem:
    """Static description of one operation of an MLP.

    Attributes:
      op: its name.
      operands: their shapes and dtypes by name.
      params: of the primitive.
    """

    op: str
    operands: Mapping[str, jax.ShapeDtypeStruct]
    params: Mapping[str, Any]

    @property
    def num_rows(self) -> Any:
        """Rows of x, of the rows that are copies of it, or of hidden."""
        return next(self.operands[name] for name in _WITH_ROWS if name in self.operands).shape[0]

    def __str__(self) -> str:
        operands = (
            f"{name} {x.dtype}{list(x.shape)}"
            for name, x in self.operands.items()
            if name not in ("group_sizes", "group_offset", "inverse")
        )
        return f"{self.op} {', '.join(operands)}, {self.operands['group_sizes'].shape[0]} groups"


def has_up(operands: Mapping[str, Any]) -> bool:
    """Whether a hidden layer has a gate and an up projection, in one matrix or in two."""
    return "wi" in operands or "wi_1" in operands


def hidden_columns(operands: Mapping[str, Any]) -> int:
    """F."""
    return operands["wi"].shape[2] // 2 if "wi" in operands else operands["wi_0"].shape[2]
