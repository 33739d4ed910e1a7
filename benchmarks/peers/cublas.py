"""PyTorch's grouped product, and cuBLAS through PyTorch, in a loop or as one dense product."""

import numpy as np

from benchmarks.harness.cases import row_ranges
from benchmarks.harness.peer import NotOffered, Peer, Role, TorchCall, as_torch, once


def _mm(a, b, out, problem):
    """Writes a @ b to out, whose dtype may be wider than that of the operands."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "default"
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _empty(shape, problem, like):
    import torch

    return torch.empty(shape, dtype=getattr(torch, problem.out_dtype), device=like.device)


class CublasLoop(Peer):
    """A product for each group, which needs the group sizes on the host."""

    name = "cublas_loop"
    role = Role.LOOP
    needs = ("torch",)

    def prepare(self, problem, lhs, rhs, group_sizes):
        """Slices the operands, so that a call only enqueues the products."""
        a, b = as_torch(lhs), as_torch(rhs)
        out = _empty(problem.out_shape, problem, a)
        products = []
        for group, (start, end) in enumerate(row_ranges(np.asarray(group_sizes))):
            if problem.contracting:
                products.append((a[start:end].mT, b[start:end], out[group]))
            elif end > start:
                weights = b[group].mT if problem.transpose_rhs else b[group]
                products.append((a[start:end], weights, out[start:end]))

        def run():
            for operand, weights, result in products:
                _mm(operand, weights, result, problem)
            return out

        return once(TorchCall(run, f"{len(products)} products"))


class CublasDense(Peer):
    """One product of the same FLOPs without groups, the practical limit if compute-bound."""

    name = "cublas_dense"
    role = Role.CEILING
    needs = ("torch",)

    def prepare(self, problem, lhs, rhs, group_sizes):
        """Multiplies all rows by the first group's weights, or computes one weight gradient."""
        a, b = as_torch(lhs), as_torch(rhs)
        if problem.contracting:
            a = a.mT
        else:
            b = b[0].mT if problem.transpose_rhs else b[0]
        out = _empty((a.shape[0], b.shape[1]), problem, a)
        return once(TorchCall(lambda: _mm(a, b, out, problem)))


class TorchGroupedMm(Peer):
    """PyTorch's grouped product, which reads row-major and column-major weights without a copy."""

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
        return once(TorchCall(lambda: torch._grouped_mm(a, b, offs=ends)))
