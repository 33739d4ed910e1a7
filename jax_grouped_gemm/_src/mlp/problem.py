"""The problem of a plan: one operation of an MLP, with its operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm._src.mlp.epilogue import Epilogue
from jax_grouped_gemm._src.mlp.operands import named
from jax_grouped_gemm._src.plan import (
    TMA_ALIGNMENT_BYTES,
    check_sizes_do_not_matter,
    symbolic_sizes,
)
from jax_grouped_gemm._src.quantized.array import QuantizedArray
from jax_grouped_gemm._src.sizes import too_large_operands

DTYPE = jnp.dtype(jnp.bfloat16)
"""The dtype that all fused MLP kernels take."""

BIASES = ("b0", "b1", "bo")

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


def unsuitable_operands(problem: MlpProblem) -> str:
    """Why no fused kernel takes these operands, empty if they are suitable."""
    operands, params = problem.operands, problem.params
    activation = params.get("activation")
    arrays = {n: x for n, x in named(operands).items() if x.ndim > 1 and n != "inverse"}
    dtypes = {
        x.dtype for name, x in arrays.items() if not (name in BIASES and x.dtype == jnp.float32)
    }
    if dtypes != {DTYPE}:
        found = " and ".join(sorted(map(str, dtypes)))
        return f"the kernels take operands of {DTYPE}, got {found}"
    if isinstance(params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"the kernels do not implement precision={params['precision']}"
    if activation is not None and Epilogue.of(activation) is None:
        return f"no kernel has the activation {activation}"
    every = jax.tree.leaves(operands)
    for reason in (symbolic_sizes(every), too_large_operands(every)):
        if reason:
            check_sizes_do_not_matter(problem.op, params["implementation"], reason)
            return reason
    if any(0 in x.shape for x in arrays.values()):
        return "there is nothing to multiply"
    for name, x in arrays.items():
        if x.shape[-1] * x.dtype.itemsize % TMA_ALIGNMENT_BYTES:
            return f"rows of {name} {list(x.shape)} are not a multiple of 16 bytes"
    return ""
