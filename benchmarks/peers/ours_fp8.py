"""Our FP8 products, and what is compared with them of ours: other scales, and bfloat16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import jax_grouped_gemm as jgg
from benchmarks.harness import check
from benchmarks.harness.cases import Problem
from benchmarks.harness.fp8_inputs import (
    FAST_ACCUMULATION_ERROR,
    Scaled,
    reference,
    rowwise,
)
from benchmarks.harness.peer import Call, NotOffered, Role, jax_call, pinned_implementation
from benchmarks.peers import variants
from benchmarks.peers.ours import kernels_unavailable_reason, ragged_product


def scaled_product(problem: Problem, **options: Any) -> Callable[..., jax.Array]:
    """The function of (lhs, its scales, rhs, its scales, group sizes) that is measured."""
    options |= {
        "preferred_element_type": problem.out_dtype,
        "implementation": pinned_implementation(),
    }
    if problem.contracting:
        return functools.partial(jgg.scaled_ragged_dot_contracting, num_rows=problem.m, **options)
    return functools.partial(jgg.scaled_ragged_dot, transpose_rhs=True, **options)


class OursScaled:
    """Our product of the operands as they are given, or in one of the compiled configurations."""

    slow = False

    def __init__(self, index: int | None = None):
        self.name = "ours" if index is None else f"config{index}"
        self.role = Role.OURS if index is None else Role.VARIANT
        self._index = index

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return kernels_unavailable_reason()

    def prepare(self, problem: Problem, lhs: Scaled, rhs: Scaled, group_sizes: jax.Array) -> Call:
        """Compiles the call."""
        function, detail = scaled_product(problem), ""
        operands = (lhs.values, lhs.scales, rhs.values, rhs.scales, group_sizes)
        if self._index is not None:
            function, detail = variants.configured(function, self._index, *operands)
        call = jax_call(jax.jit(function), *operands)
        call.detail = str(detail)
        return call


class OursRowwise:
    """A scale for each row and each column, as `torch._scaled_grouped_mm` has them."""

    role = Role.VARIANT
    slow = False

    def __init__(self, *, fast_accumulation: bool = False):
        """`fast_accumulation` leaves sums in the tensor cores, without promotion to float32."""
        self.name = "ours_rowwise_fast" if fast_accumulation else "ours_rowwise"
        self._fast = fast_accumulation

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return kernels_unavailable_reason()

    def prepare(self, problem: Problem, lhs: Scaled, rhs: Scaled, group_sizes: jax.Array) -> Call:
        """Quantises with scales for whole rows, and compiles the call."""
        if problem.contracting:
            raise NotOffered("a weight gradient has scales in blocks")
        lhs, rhs = (Scaled(*rowwise(x.source), x.source) for x in (lhs, rhs))
        operands = (lhs.values, lhs.scales, rhs.values, rhs.scales[..., 0], group_sizes)
        product = scaled_product(problem, lhs_scaling="1xk", fast_accumulation=self._fast)
        call = jax_call(jax.jit(product), *operands)
        call.reference = lambda: reference(problem, lhs, rhs, group_sizes)
        call.tolerance = FAST_ACCUMULATION_ERROR if self._fast else 0.0
        return call


class OursBf16:
    """The bfloat16 product of what the FP8 operands were made of."""

    name = "ours_bf16"
    role = Role.VARIANT
    slow = False

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return kernels_unavailable_reason()

    def prepare(self, problem: Problem, lhs: Scaled, rhs: Scaled, group_sizes: jax.Array) -> Call:
        """Compiles the call."""
        problem = dataclasses.replace(problem, dtype="bfloat16")
        operands = (lhs.source, rhs.source, group_sizes)
        call = jax_call(ragged_product(problem, pinned_implementation()), *operands)
        call.reference = lambda: check.reference(problem, *operands)
        return call
