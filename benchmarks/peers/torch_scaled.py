"""cuBLAS's FP8 product and PyTorch's grouped one, both through PyTorch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.cases import Problem
from benchmarks.harness.fp8_inputs import (
    FAST_ACCUMULATION_ERROR,
    Scaled,
    in_columns,
    reference,
    rowwise,
)
from benchmarks.harness.peer import (
    Call,
    NotOffered,
    Role,
    TorchCall,
    as_torch,
    missing_module,
    without_gpu,
)


def fp8_as_torch(x: jax.Array) -> Any:
    """A PyTorch tensor over the same memory; as bytes on the way, which every DLPack knows."""
    import torch

    dtype = {jnp.float8_e4m3fn: torch.float8_e4m3fn, jnp.float8_e5m2: torch.float8_e5m2}
    bytes_ = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return as_torch(bytes_).view(dtype[x.dtype.type])


class DenseScaledMm:
    """One cuBLAS product of the same FLOPs with one scale a tensor: the practical ceiling."""

    role = Role.CEILING
    slow = False

    def __init__(self, name: str, fast_accumulation: bool):
        """`fast_accumulation` leaves sums in the tensor cores, without promotion to float32."""
        self.name = name
        self._fast = fast_accumulation

    def unavailable_reason(self) -> str | None:
        """Whether PyTorch or a GPU is missing."""
        return missing_module("torch") or without_gpu()

    def prepare(self, problem: Problem, lhs: Scaled, rhs: Scaled, group_sizes: jax.Array) -> Call:
        """All rows with the first group's weights; for a weight gradient, all rows in one group."""
        import torch

        if problem.contracting:
            # Without the columns that fill up groups; their number must be a multiple of 16.
            rows = problem.m // 16 * 16
            a, b = (fp8_as_torch(in_columns(x.values))[:, :rows] for x in (lhs, rhs))
        else:
            a, b = fp8_as_torch(lhs.values), fp8_as_torch(rhs.values)[0]
        one = torch.ones((), device=a.device)
        options = {
            "scale_a": one,
            "scale_b": one,
            "out_dtype": getattr(torch, problem.out_dtype),
            "use_fast_accum": self._fast,
        }
        call = TorchCall(lambda: torch._scaled_mm(a, b.T, **options))
        call.wait(call.run())
        return call


class TorchScaledGroupedMm:
    """PyTorch's grouped FP8 product, with a scale for each row and each column."""

    name = "torch_scaled_grouped_mm"
    role = Role.GROUPED
    slow = False

    def unavailable_reason(self) -> str | None:
        """Whether PyTorch or a GPU is missing, or PyTorch is too old."""
        if reason := missing_module("torch") or without_gpu():
            return reason
        import torch

        old = not hasattr(torch, "_scaled_grouped_mm")
        return "this torch has no _scaled_grouped_mm" if old else None

    def prepare(self, problem: Problem, lhs: Scaled, rhs: Scaled, group_sizes: jax.Array) -> Call:
        """Quantises with scales for whole rows, and shares the operands with PyTorch."""
        import torch

        if problem.contracting:
            raise NotOffered("its weight gradients have no scales along the rows of a group")
        lhs, rhs = (Scaled(*rowwise(x.source), x.source) for x in (lhs, rhs))
        a, b = fp8_as_torch(lhs.values), fp8_as_torch(rhs.values).mT
        scale_a = as_torch(lhs.scales).reshape(-1)
        scale_b = as_torch(rhs.scales)[..., 0]
        ends = torch.cumsum(as_torch(group_sizes), 0, dtype=torch.int32)
        call = TorchCall(
            lambda: torch._scaled_grouped_mm(
                a,
                b,
                scale_a,
                scale_b,
                offs=ends,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            ),
            "fast accumulation",
            reference=lambda: reference(problem, lhs, rhs, group_sizes),
            tolerance=FAST_ACCUMULATION_ERROR,
        )
        call.wait(call.run())
        return call
