"""PyTorch's grouped matmul (`torch._grouped_mm`), a CUTLASS kernel on Hopper."""

from __future__ import annotations

import jax

from benchmarks.harness.cases import Problem
from benchmarks.harness.peer import Call, NotOffered, Role, TorchCall, as_torch, missing_module


class TorchGroupedMm:
    """Row-major and column-major weights are both native: a transposed view costs nothing."""

    name = "torch_grouped_mm"
    role = Role.GROUPED
    slow = False

    def unavailable_reason(self) -> str | None:
        """Whether PyTorch is missing, or too old."""
        if reason := missing_module("torch"):
            return reason
        import torch

        return None if hasattr(torch, "_grouped_mm") else "this torch has no _grouped_mm"

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Shares the operands with PyTorch."""
        import torch

        if problem.out_dtype != problem.dtype:
            raise NotOffered(f"its result has the operands' dtype, {problem.dtype}")
        a, b = as_torch(lhs), as_torch(rhs)
        ends = torch.cumsum(as_torch(group_sizes), 0, dtype=torch.int32)
        if problem.contracting:
            a = a.mT
        elif problem.transpose_rhs:
            b = b.mT
        call = TorchCall(lambda: torch._grouped_mm(a, b, offs=ends))
        call.wait(call.run())
        return call
