"""Our FP8 products, our products with other scales, and our bfloat16 products."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

import jax_grouped_gemm as jgg
from benchmarks.harness import check
from benchmarks.harness.cases import Problem
from benchmarks.harness.fp8_inputs import FAST_ACCUMULATION_ERROR, Scaled, reference, rowwise
from benchmarks.harness.peer import NotOffered, Peer, Role, jax_call, pinned_implementation
from benchmarks.peers.ours import ragged_product


def scaled_product(problem: Problem, **options: Any) -> Callable[..., jax.Array]:
    """Returns the function of (lhs, its scales, rhs, its scales, group sizes) to measure."""
    options |= {
        "preferred_element_type": problem.out_dtype,
        "implementation": pinned_implementation(),
    }
    if problem.contracting:
        return functools.partial(jgg.scaled_ragged_dot_contracting, num_rows=problem.m, **options)
    return functools.partial(jgg.scaled_ragged_dot, transpose_rhs=True, **options)


class OursScaled(Peer):
    """Our product of the given operands."""

    name = "ours"
    role = Role.OURS

    def prepare(self, problem, lhs, rhs, group_sizes):
        operands = (lhs.values, lhs.scales, rhs.values, rhs.scales, group_sizes)
        return jax_call(jax.jit(scaled_product(problem)), *operands)


class OursRowwise(Peer):
    """Our product with a scale for each row and each column, like `torch._scaled_grouped_mm`."""

    role = Role.VARIANT

    def __init__(self, *, fast_accumulation: bool = False):
        """`fast_accumulation` leaves sums in the tensor cores, without promotion to float32."""
        self.name = "ours_rowwise_fast" if fast_accumulation else "ours_rowwise"
        self._fast = fast_accumulation

    def prepare(self, problem, lhs, rhs, group_sizes):
        if problem.contracting:
            raise NotOffered("a weight gradient has scales in blocks")
        lhs, rhs = (Scaled(*rowwise(x.source), x.source) for x in (lhs, rhs))
        operands = (lhs.values, lhs.scales, rhs.values, rhs.scales[..., 0], group_sizes)
        product = scaled_product(problem, lhs_scaling="1xk", fast_accumulation=self._fast)
        call = jax_call(jax.jit(product), *operands)
        call.reference = lambda: reference(problem, lhs, rhs, group_sizes)
        call.tolerance = FAST_ACCUMULATION_ERROR if self._fast else 0.0
        return call


class OursBf16(Peer):
    """Our bfloat16 product of the arrays from which the FP8 operands were quantised."""

    name = "ours_bf16"
    role = Role.VARIANT

    def prepare(self, problem, lhs, rhs, group_sizes):
        problem = dataclasses.replace(problem, dtype="bfloat16")
        operands = (lhs.source, rhs.source, group_sizes)
        call = jax_call(ragged_product(problem, pinned_implementation()), *operands)
        call.reference = lambda: check.reference(problem, *operands)
        return call
