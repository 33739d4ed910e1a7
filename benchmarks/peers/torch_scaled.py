"""cuBLAS's FP8 product and PyTorch's grouped FP8 product, both through PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.fp8_inputs import (
    FAST_ACCUMULATION_ERROR,
    Scaled,
    in_columns,
    reference,
    rowwise,
)
from benchmarks.harness.peer import NotOffered, Peer, Role, TorchCall, as_torch, once


def fp8_as_torch(x: jax.Array) -> Any:
    """Returns a PyTorch tensor over the same memory, passed as bytes, which any DLPack knows."""
    import torch

    dtype = {jnp.float8_e4m3fn: torch.float8_e4m3fn, jnp.float8_e5m2: torch.float8_e5m2}
    bytes_ = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return as_torch(bytes_).view(dtype[x.dtype.type])


class DenseScaledMm(Peer):
    """One cuBLAS product of the same FLOPs with a scale for each tensor, the practical limit."""

    role = Role.CEILING
    needs = ("torch", "GPU")

    def __init__(self, name: str, fast_accumulation: bool):
        """`fast_accumulation` leaves sums in the tensor cores, without promotion to float32."""
        self.name = name
        self._fast = fast_accumulation

    def prepare(self, problem, lhs, rhs, group_sizes):
        """Multiplies all rows by the first group's weights, or computes one weight gradient."""
        import torch

        if problem.contracting:
            # Leave out padding of groups. The number of rows must be a multiple of 16.
            rows = problem.m // 16 * 16
            a, b = (fp8_as_torch(in_columns(x.values))[:, :rows] for x in (lhs, rhs))
        else:
            a, b = fp8_as_torch(lhs.values), fp8_as_torch(rhs.values)[0]
        options = dict.fromkeys(("scale_a", "scale_b"), torch.ones((), device=a.device))
        options |= {"out_dtype": getattr(torch, problem.out_dtype), "use_fast_accum": self._fast}
        return once(TorchCall(lambda: torch._scaled_mm(a, b.T, **options)))


class TorchScaledGroupedMm(Peer):
    """PyTorch's grouped FP8 product, with a scale for each row and each column."""

    name = "torch_scaled_grouped_mm"
    role = Role.GROUPED
    needs = ("torch", "GPU")

    def prepare(self, problem, lhs, rhs, group_sizes):
        """Quantises with scales for whole rows, and shares the operands with PyTorch."""
        import torch

        if problem.contracting:
            raise NotOffered("its weight gradients have no scales along the rows of a group")
        lhs, rhs = (Scaled(*rowwise(x.source), x.source) for x in (lhs, rhs))
        operands = fp8_as_torch(lhs.values), fp8_as_torch(rhs.values).mT
        scales = as_torch(lhs.scales).reshape(-1), as_torch(rhs.scales)[..., 0]
        options = {
            "offs": torch.cumsum(as_torch(group_sizes), 0, dtype=torch.int32),
            "out_dtype": torch.bfloat16,
            "use_fast_accum": True,
        }
        return once(
            TorchCall(
                lambda: torch._scaled_grouped_mm(*operands, *scales, **options),
                "fast accumulation",
                reference=lambda: reference(problem, lhs, rhs, group_sizes),
                tolerance=FAST_ACCUMULATION_ERROR,
            )
        )
