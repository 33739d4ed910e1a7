"""DeepGEMM's grouped FP8 product. It wants every group padded to whole tiles of 128 rows.

Padding, and the order in which it wants the scales, are made outside of the timed call.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.cases import Problem, row_ranges
from benchmarks.harness.fp8_inputs import BLOCK, Scaled
from benchmarks.harness.peer import (
    Call,
    NotOffered,
    Role,
    TorchCall,
    as_torch,
    missing_module,
    without_gpu,
)
from benchmarks.peers.torch_scaled import fp8_as_torch

# Of its function and of that which orders scales, in its releases 2 and 1.
FUNCTIONS = (
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
)
LAYOUTS = ("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor")


def padded_rows(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each row goes in groups padded to 128, and the group of each row of those."""
    counts = -(-sizes // BLOCK) * BLOCK
    starts = np.cumsum(counts) - counts
    positions = [
        start + np.arange(end - begin)
        for start, (begin, end) in zip(starts, row_ranges(sizes), strict=True)
    ]
    groups = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    return np.concatenate(positions), groups


class PaddedCall(TorchCall):
    """Its result has padding between the groups."""

    positions: np.ndarray

    def to_jax(self, result) -> jax.Array:
        """The rows that belong to a group."""
        return super().to_jax(result)[self.positions]


class DeepGemm:
    """Its contiguous layout, for products that keep their rows."""

    name = "deep_gemm"
    role = Role.GROUPED
    slow = False

    def unavailable_reason(self) -> str | None:
        """Whether DeepGEMM or a GPU is missing."""
        return missing_module("torch") or missing_module("deep_gemm") or without_gpu()

    def prepare(self, problem: Problem, lhs: Scaled, rhs: Scaled, group_sizes: jax.Array) -> Call:
        """Pads the rows and lays out the scales."""
        import deep_gemm
        import torch

        if problem.contracting:
            raise NotOffered("its weight gradient needs the group sizes on the host")
        positions, groups = padded_rows(np.asarray(group_sizes))
        m = len(groups)
        # FP8 has no scatter in every version of XLA; bytes do.
        values = jax.lax.bitcast_convert_type(lhs.values, jnp.uint8)
        values = jnp.zeros((m, problem.k), jnp.uint8).at[positions].set(values)
        scales = jnp.ones((m, lhs.scales.shape[1]), jnp.float32).at[positions].set(lhs.scales)
        a = as_torch(values).view(torch.float8_e4m3fn), _first(deep_gemm, LAYOUTS)(as_torch(scales))
        b = fp8_as_torch(rhs.values), as_torch(rhs.scales)
        indices = as_torch(jnp.asarray(groups))
        out = torch.empty((m, problem.n), dtype=torch.bfloat16, device=a[0].device)
        function = _first(deep_gemm, FUNCTIONS)

        def run():
            function(a, b, out, indices)
            return out

        call = PaddedCall(run, f"{m} rows after padding")
        call.positions = positions
        call.wait(call.run())
        return call


def _first(module, names: tuple[str, ...]):
    """What a module has under the first of these names that it knows."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise NotOffered(f"this {module.__name__} has none of {', '.join(names)}")
