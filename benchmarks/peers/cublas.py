"""cuBLAS through PyTorch: a loop over groups, and one dense product of the same FLOPs."""

from __future__ import annotations

import numpy as np

from benchmarks.harness.cases import row_ranges
from benchmarks.harness.peer import Peer, Role, TorchCall, as_torch


def _mm(a, b, out, problem):
    """a @ b into out, whose dtype may be wider than the operands'."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = problem.precision == "default"
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _empty(shape, problem, like):
    import torch

    return torch.empty(shape, dtype=getattr(torch, problem.out_dtype), device=like.device)


class CublasLoop(Peer):
    """One product a group. It needs the group sizes on the host, which a device computed."""

    name = "cublas_loop"
    role = Role.LOOP
    needs = ("torch",)

    def prepare(self, problem, lhs, rhs, group_sizes):
        """Slices the operands, so that a call does nothing but enqueue the products."""
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

        call = TorchCall(run, f"{len(products)} products")
        call.wait(call.run())
        return call


class CublasDense(Peer):
    """One product of the same FLOPs without groups: the practical ceiling if compute-bound."""

    name = "cublas_dense"
    role = Role.CEILING
    needs = ("torch",)

    def prepare(self, problem, lhs, rhs, group_sizes):
        """All rows with the first group's weights; for a weight gradient, all rows in one group."""
        a, b = as_torch(lhs), as_torch(rhs)
        if problem.contracting:
            a = a.mT
        else:
            b = b[0].mT if problem.transpose_rhs else b[0]
        out = _empty((a.shape[0], b.shape[1]), problem, a)
        call = TorchCall(lambda: _mm(a, b, out, problem))
        call.wait(call.run())
        return call
