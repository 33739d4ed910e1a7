"""QuACK's variable-length GEMM (CuTe DSL), where it is installed."""

from __future__ import annotations

import jax

from benchmarks.cases import Problem
from benchmarks.peers.base import Call, Role, TorchCall, as_torch, missing_module, without_gpu


class Quack:
    """With its default configuration: its autotuner takes minutes and did not help these shapes."""

    name = "quack"
    role = Role.GROUPED
    slow = False

    def unavailable_reason(self) -> str | None:
        """Whether PyTorch, QuACK or a GPU is missing."""
        return missing_module("torch") or missing_module("quack") or without_gpu()

    def prepare(
        self, problem: Problem, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
    ) -> Call:
        """Shares the operands with PyTorch and compiles the kernel."""
        import torch
        from quack.gemm_interface import gemm

        a, b = as_torch(lhs), as_torch(rhs)
        ends = torch.cumsum(as_torch(group_sizes), 0, dtype=torch.int32)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        options = {"out_dtype": getattr(torch, problem.out_dtype), "tuned": False}
        if problem.contracting:
            a = a.mT
            options["cu_seqlens_k"] = offsets
        else:
            b = b.mT if problem.transpose_rhs else b
            options["cu_seqlens_m"] = offsets
        call = TorchCall(lambda: gemm(a, b, **options))
        call.wait(call.run())
        return call
