"""The problem of a plan: one operation of an MLP, with its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax

from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import dtypes_of, named
from jax_grouped_gemm._src.plan import (
    TMA_ALIGNMENT_BYTES,
    Kernel,
    algorithm_reason,
    operand_reason,
    sizes_reason,
)
from jax_grouped_gemm._src.quantized.array import QuantizedArray

Operands = TypeVar("Operands")


@dataclasses.dataclass(frozen=True)
class MlpProblem(Generic[Operands]):
    """Static description of one operation of an MLP.

    Attributes:
      op: name of the operation.
      operands: shapes and dtypes of the operands.
      params: parameters of the primitive; `tree` is the structure of the operands.
    """

    op: str
    operands: Operands
    params: Mapping[str, Any]

    @property
    def formats(self) -> tuple[str, ...]:
        """See `Kernel.takes`."""
        return (dtypes_of(self.operands),) * 3

    def given(self, arrays: tuple[jax.Array, ...]) -> Operands:
        """Returns the operands of the primitive, in their structure."""
        return self.params["tree"].unflatten(arrays)

    def __str__(self) -> str:
        every = named(self.operands)
        operands = (
            f"{name} {x.format if isinstance(x, QuantizedArray) else x.dtype}{list(x.shape)}"
            for name, x in every.items()
            if name not in ("sizes", "offset", "inverse")
        )
        groups = every["sizes"].shape[0] if "sizes" in every else self.params["num_experts"]
        return f"{self.op} {', '.join(operands)}, {groups} groups"


def unsuitable_operands(problem: MlpProblem, kernel: Kernel) -> str:
    """Returns why a fused kernel does not take these operands, an empty string if it does."""
    operands, params = problem.operands, problem.params
    activation = params.get("activation")
    arrays = {n: x for n, x in named(operands).items() if x.ndim > 1 and n != "inverse"}
    of_dtypes = operand_reason(kernel, dtypes_of(operands))
    if reason := of_dtypes or algorithm_reason(params["precision"]):
        return reason
    if activation is not None and Epilogue.of(activation) is None:
        return f"no kernel has the activation {activation}"
    if reason := sizes_reason(problem.op, jax.tree.leaves(operands), params["implementation"]):
        return reason
    if any(0 in x.shape for x in arrays.values()):
        return "there is nothing to multiply"
    for name, x in arrays.items():
        if x.shape[-1] * x.dtype.itemsize % TMA_ALIGNMENT_BYTES:
            return f"rows of {name} {list(x.shape)} are not a multiple of 16 bytes"
    return ""
