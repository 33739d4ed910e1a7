"""Plans of the FP8 operations: scaled ragged products and quantisers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_grouped_gemm._src.fp8.formats import (
    Shape,
    quantized_blocks,
    quantized_groups,
    quantized_rows,
)
from jax_grouped_gemm._src.plan import (
    KERNEL_RESULT_DTYPES,
    KernelFamily,
    Plan,
    default_or_stream_k,
    make_plan,
)
from jax_grouped_gemm._src.ragged import stream_k
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.tile_config import DEFAULT_TILE, TileConfig

TRANSPOSED_TILE = TileConfig(tile_m=32, tile_n=128, cluster=1)
FEW_ROWS = 16
"""Rows a group, on average, up to which the transposed tile is the faster one."""

NONCONTRACTING_TILES = (DEFAULT_TILE, TRANSPOSED_TILE)
STREAM_K_TILES = (dataclasses.replace(DEFAULT_TILE, stream_k=True),)
"""Of non-contracting products, like NONCONTRACTING_TILES, but with the last wave cut along K."""
CONTRACTING_TILES = (DEFAULT_TILE,)


@dataclasses.dataclass(frozen=True)
class ScaledProblem(RaggedProblem):
    """Static description of one product of FP8 operands with scales.

    Attributes:
      lhs_scaling, rhs_scaling: which elements share a scale.
      b: blocks of 128 rows of a contracting product, each of one group; 0 otherwise.
      r: rows of such a block; 0 otherwise.
    """

    lhs_scaling: str
    rhs_scaling: str
    b: int
    r: int

    @classmethod
    def noncontracting(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> ScaledProblem:
        """The problem of a `scaled_ragged_noncontracting` with operands of the given avals."""
        return cls.of(
            "scaled_ragged_noncontracting",
            _without_scales(avals),
            params,
            lhs="mk",
            rhs="gnk" if params["transpose_rhs"] else "gkn",
            out="mn",
            lhs_scaling=params["lhs_scaling"],
            rhs_scaling=params["rhs_scaling"],
            b=0,
            r=0,
        )

    @classmethod
    def contracting(cls, avals: Sequence[Any], params: Mapping[str, Any]) -> ScaledProblem:
        """The problem of a `scaled_ragged_contracting` with operands of the given avals."""
        return cls.of(
            "scaled_ragged_contracting",
            _without_scales(avals),
            params,
            lhs="bkr",
            rhs="bnr",
            out="gkn",
            lhs_scaling="1x128",
            rhs_scaling="1x128",
            m=params["num_rows"],
        )

    def __str__(self) -> str:
        scaling = f"scaled by {self.lhs_scaling} and {self.rhs_scaling}"
        return f"{super().__str__()}, {scaling}"


def plan_scaled_noncontracting(avals: Sequence[Any], params: Mapping[str, Any]) -> Plan:
    """Plans a `scaled_ragged_noncontracting` from its operands' avals and its parameters."""
    problem = ScaledProblem.noncontracting(avals, params)
    return make_plan(problem, params, NONCONTRACTING)


def plan_scaled_contracting(avals: Sequence[Any], params: Mapping[str, Any]) -> Plan:
    """Plans a `scaled_ragged_contracting` from its operands' avals and its parameters."""
    return make_plan(ScaledProblem.contracting(avals, params), params, CONTRACTING)


def _without_scales(avals: Sequence[Any]) -> Sequence[Any]:
    lhs, _, rhs, _, group_sizes, group_offset = avals
    return lhs, rhs, group_sizes, group_offset


def _unsupported_reason(problem: ScaledProblem, params: Mapping[str, Any]) -> str:
    if problem.out_dtype in KERNEL_RESULT_DTYPES:
        return ""
    return (
        f"no kernel for {problem.lhs_dtype} x {problem.rhs_dtype} -> {problem.out_dtype}: the "
        "kernels return bfloat16, float16 or float32"
    )


def _contracted_last(problem: ScaledProblem) -> ScaledProblem:
    """FP8 tensor cores read both operands along the contracted dimension."""
    return dataclasses.replace(problem, rhs="gnk" if "g" in problem.rhs else problem.rhs)


def _noncontracting_tile(problem: RaggedProblem) -> TileConfig:
    if problem.m <= FEW_ROWS * problem.num_groups:
        return TRANSPOSED_TILE
    return default_or_stream_k(problem, STREAM_K_TILES, stream_k.LEAST_STEPS_FP8)


NONCONTRACTING = KernelFamily(
    NONCONTRACTING_TILES,
    _unsupported_reason,
    _contracted_last,
    more_tiles=lambda problem: STREAM_K_TILES,
    choose=_noncontracting_tile,
    blocks=lambda tile: 3 if tile.transposed else 1,
)
CONTRACTING = KernelFamily(CONTRACTING_TILES, _unsupported_reason, _contracted_last)


@dataclasses.dataclass(frozen=True)
class QuantizePlan:
    """How one quantiser runs on a device of compute capability 9.0.

    Attributes:
      op: name of the primitive.
      path: "kernel", or "reference" for the pure JAX implementation.
      reason: why not "kernel", empty on that path.
      power_of_two: whether scales are rounded up to powers of two.
      results: all that the kernel can write, None for what was not asked for.
    """

    op: str
    path: Literal["kernel", "reference"]
    reason: str
    power_of_two: bool
    results: tuple[jax.ShapeDtypeStruct | None, ...]


def plan_quantize_rows(avals: Sequence[Any], params: Mapping[str, Any]) -> QuantizePlan:
    """Plans a `quantize_rows` from its operands' avals and its parameters."""
    return _plan_quantizer("quantize_rows", params, (), [quantized_rows(*avals[0].shape)])


def plan_quantize_blocks(avals: Sequence[Any], params: Mapping[str, Any]) -> QuantizePlan:
    """Plans a `quantize_blocks` from its operands' avals and its parameters."""
    g, rows, cols = avals[0].shape
    forms = [
        quantized_blocks(g, rows, cols) if params["plain"] else None,
        quantized_blocks(g, cols, rows) if params["transposed"] else None,
    ]
    return _plan_quantizer("quantize_blocks", params, (), forms)


def plan_quantize_ragged(avals: Sequence[Any], params: Mapping[str, Any]) -> QuantizePlan:
    """Plans a `quantize_ragged` from its operands' avals and its parameters."""
    x, group_sizes = avals
    m, cols = x.shape[-2:]
    batch = x.shape[:-2] or group_sizes.shape[:-1]
    forms = [
        quantized_rows(m, cols) if params["plain"] else None,
        quantized_groups(m, cols, group_sizes.shape[-1]) if params["transposed"] else None,
    ]
    return _plan_quantizer("quantize_ragged", params, batch, forms)


def _plan_quantizer(
    op: str,
    params: Mapping[str, Any],
    batch: Shape,
    forms: Sequence[tuple[Shape, Shape] | None],
) -> QuantizePlan:
    is_reference = params["implementation"] == "reference"
    results = []
    for form in forms:
        for i, dtype in enumerate((params["dtype"], jnp.float32)):
            results.append(form and jax.ShapeDtypeStruct((*batch, *form[i]), dtype))
    return QuantizePlan(
        op,
        path="reference" if is_reference else "kernel",
        reason="implementation='reference' was asked for" if is_reference else "",
        power_of_two=params["power_of_two"],
        results=tuple(results),
    )
