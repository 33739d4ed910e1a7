"""Who else multiplies FP8, and our kernels in their other forms.

Peers whose scales differ from the case's get operands quantised their way from the same data, and
are checked against the product of those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

import jax_grouped_gemm as jgg
from benchmarks import check
from benchmarks.cases import Problem
from benchmarks.fp8.cases import bf16_problem
from benchmarks.fp8.deep_gemm import DeepGemm
from benchmarks.fp8.inputs import Scaled, reference, rowwise
from benchmarks.fp8.torch_peers import DenseScaledMm, TorchScaledGroupedMm
from benchmarks.peers import variants
from benchmarks.peers.bandwidth import Bandwidth, copy_call
from benchmarks.peers.base import Call, NotOffered, Peer, Role, jax_call, on_gpu
from benchmarks.peers.ours import kernels_unavailable_reason, ragged_product


def implementation() -> str:
    """Of our products: pinned, so that nothing falls back unnoticed."""
    return "cuda" if on_gpu() else "reference"


def scaled_product(problem: Problem, **options: str) -> Callable[..., jax.Array]:
    """The function of (lhs, its scales, rhs, its scales, group sizes) that is measured."""
    options |= {
        "preferred_element_type": problem.out_dtype,
        "implementation": implementation(),
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
        if self._index is not None:
            kind = "contracting" if problem.contracting else "noncontracting"
            config = variants.config(f"scaled_ragged_{kind}", self._index)
            function, detail = variants.with_config(function, config), str(config)
        operands = (lhs.values, lhs.scales, rhs.values, rhs.scales, group_sizes)
        call = jax_call(jax.jit(function), *operands)
        call.detail = detail
        return call


class OursRowwise:
    """A scale for each row and each column, as `torch._scaled_grouped_mm` has them."""

    name = "ours_rowwise"
    role = Role.VARIANT
    slow = False

    def unavailable_reason(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return kernels_unavailable_reason()

    def prepare(self, problem: Problem, lhs: Scaled, rhs: Scaled, group_sizes: jax.Array) -> Call:
        """Quantises with scales for whole rows, and compiles the call."""
        if problem.contracting:
            raise NotOffered("a weight gradient has scales in blocks")
        lhs, rhs = (Scaled(*rowwise(x.source), x.source) for x in (lhs, rhs))
        operands = (lhs.values, lhs.scales, rhs.values, rhs.scales[..., 0], group_sizes)
        call = jax_call(jax.jit(scaled_product(problem, lhs_scaling="1xk")), *operands)
        call.reference = lambda: reference(problem, lhs, rhs, group_sizes)
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
        problem = bf16_problem(problem)
        operands = (lhs.source, rhs.source, group_sizes)
        call = jax_call(ragged_product(problem, implementation()), *operands)
        call.reference = lambda: check.reference(problem, *operands)
        return call


def all_peers(configurations: bool = False) -> tuple[Peer, ...]:
    """In the order in which the tables show them; optionally each configuration of ours too."""
    ops = "scaled_ragged_noncontracting", "scaled_ragged_contracting"
    count = variants.most(*ops) if configurations else 0
    return (
        OursScaled(),
        *map(OursScaled, range(count)),
        OursRowwise(),
        OursBf16(),
        DeepGemm(),
        TorchScaledGroupedMm(),
        DenseScaledMm("cublas_dense", fast_accumulation=True),
        DenseScaledMm("cublas_dense_exact", fast_accumulation=False),
        Bandwidth("copy", copy_call),
    )
