"""Scratch memory of the kernels of the ragged products."""

from __future__ import annotations

import math

import numpy as np

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.ragged import schedules
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.target import Target
from jax_grouped_gemm._src.tile_config import TileConfig

LEAST_BYTES = 16
"""A kernel's buffers are never empty."""


def workspace_bytes(problem: RaggedProblem, tile: TileConfig, terms: int, target: Target) -> int:
    """What the kernel of a plan asks for."""
    if tile.stream_k:
        return schedules.sums_bytes(tile.tile_m, tile.tile_n, target.multiprocessors)
    if schedules.can_be_skewed(problem):
        return max(schedules.skew_bytes(problem, target.multiprocessors), LEAST_BYTES)
    needs_parts = terms and not tile.transposed
    return _float32_bytes(problem, terms) if needs_parts else LEAST_BYTES


def _float32_bytes(problem: RaggedProblem, terms: int) -> int:
    """Bytes of the parts of both operands, and of what is noted of groups, rows and matrices.

    The layout is that of `csrc/ragged/parts_workspace.cc`.
    """
    lhs_batched, rhs_batched, sizes_batched, offset_batched = problem.batched
    owners_batched = sizes_batched or offset_batched
    lhs_batched |= owners_batched
    is_contracting = problem.contracts_rows
    rhs_batched |= owners_batched and is_contracting
    batch = math.prod(problem.batch)
    lhs_batches, rhs_batches, owner_batches = (
        batch if batched else 1 for batched in (lhs_batched, rhs_batched, owners_batched)
    )
    parts = float32.num_parts(terms)
    sections = (
        (lhs_batches * problem.g, np.uint32),
        (rhs_batches * problem.g, np.uint32),
        (0 if is_contracting else rhs_batches * problem.g, np.int32),
        (owner_batches * problem.m, np.int32),
        (parts * lhs_batches * math.prod(problem.shape(problem.lhs)), float32.PART_DTYPE),
        (parts * rhs_batches * math.prod(problem.shape(problem.rhs)), float32.PART_DTYPE),
    )
    return sum(float32.section_bytes(*section) for section in sections)
