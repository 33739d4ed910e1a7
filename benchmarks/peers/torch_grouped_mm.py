"""PyTorch's grouped matmul (`torch._grouped_mm`), a CUTLASS kernel on Hopper."""

from benchmarks.harness.peer import NotOffered, Peer, Role, TorchCall, as_torch


class TorchGroupedMm(Peer):
    """Row-major and column-major weights are both native: a transposed view costs nothing."""

    name = "torch_grouped_mm"
    role = Role.GROUPED
    needs = ("torch",)

    def prepare(self, problem, lhs, rhs, group_sizes):
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
