"""Plans of the ragged products of 16-bit and float32 operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.plan import (
    ACCUMULATE,
    KERNEL_OPERAND_DTYPES,
    KERNEL_RESULT_DTYPES,
    KernelFamily,
    Plan,
    addressable_problem,
    default_or_stream_k,
    is_float32,
    make_plan,
)
from jax_grouped_gemm._src.ragged import pingpong
from jax_grouped_gemm._src.ragged.problem import RaggedProblem
from jax_grouped_gemm._src.tile_config import (
    DEFAULT_TILE,
    FLOAT32_FEW_ROWS_TILE,
    FLOAT32_TILE_CONFIGS,
    PINGPONG_TILE_CONFIGS,
    STREAM_K_TILE_CONFIGS,
    TILE_CONFIGS,
    TileConfig,
)


def plan_noncontracting(avals: Sequence[Any], params: Mapping[str, Any]) -> Plan:
    """Plans a `ragged_noncontracting` from its operands' abstract values and its parameters."""
    problem = RaggedProblem.noncontracting(avals, params)
    return make_plan(problem, params, _family(problem))


def plan_contracting(avals: Sequence[Any], params: Mapping[str, Any]) -> Plan:
    """Plans a `ragged_contracting` from its operands' abstract values and its parameters."""
    problem = RaggedProblem.contracting(avals, params)
    return make_plan(problem, params, _family(problem))


def plan_accumulate(avals: Sequence[Any], params: Mapping[str, Any]) -> Plan:
    """Plans a `ragged_accumulate` from its operands' abstract values and its parameters."""
    accumulator, *operands = avals
    options = {
        **params,
        "num_groups": accumulator.shape[-3],
        "preferred_element_type": accumulator.dtype,
    }
    problem = RaggedProblem.contracting(operands, options)
    problem = dataclasses.replace(problem, op=ACCUMULATE)
    return make_plan(problem, params, _accumulating(_family(problem)))


def _unsupported_reason(problem: RaggedProblem, params: Mapping[str, Any]) -> str:
    """Why no kernel for operands of one dtype can run `problem`, empty if one can."""
    dtypes = f"{problem.lhs_dtype} x {problem.rhs_dtype} -> {problem.out_dtype}"
    if (
        problem.lhs_dtype != problem.rhs_dtype
        or problem.lhs_dtype not in KERNEL_OPERAND_DTYPES
        or problem.out_dtype not in KERNEL_RESULT_DTYPES
    ):
        return (
            f"no kernel for {dtypes}: the kernels take two bfloat16, float16 or float32 operands "
            "and return bfloat16, float16 or float32"
        )
    if isinstance(params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"the kernels do not implement precision={params['precision']}"
    return ""


def _with_kernel_result(problem: RaggedProblem) -> RaggedProblem:
    """The kernels return their operands' type or float32."""
    if problem.out_dtype == problem.lhs_dtype:
        return problem
    return dataclasses.replace(problem, out_dtype=np.dtype(np.float32))


def _more_tiles(problem: RaggedProblem) -> tuple[TileConfig, ...]:
    if (problem.lhs, problem.out) == ("mk", "mn"):
        return STREAM_K_TILE_CONFIGS
    layouts = problem.lhs, problem.rhs, problem.out
    if problem.op == ACCUMULATE:
        return ()  # Their stages hold what is added to, until both consumers have read it.
    if layouts == ("mk", "mn", "gkn") and _with_kernel_result(problem).out_dtype == jnp.float32:
        return PINGPONG_TILE_CONFIGS
    return ()


def _same_dtype_tile(problem: RaggedProblem) -> TileConfig:
    tiles = _more_tiles(problem)
    if problem.op == "ragged_noncontracting":
        return default_or_stream_k(problem, tiles)
    if tiles and pingpong.pays(rows=problem.m, groups=problem.num_groups):
        return tiles[0]
    return DEFAULT_TILE


SAME_DTYPE = KernelFamily(
    TILE_CONFIGS, _unsupported_reason, _with_kernel_result, _more_tiles, _same_dtype_tile
)
"""The kernels for two operands of bfloat16 or float16."""


def _more_float32_tiles(problem: RaggedProblem) -> tuple[TileConfig, ...]:
    return (FLOAT32_FEW_ROWS_TILE,) if (problem.lhs, problem.out) == ("mk", "mn") else ()


def _float32_tile(problem: RaggedProblem) -> TileConfig:
    tiles = _more_float32_tiles(problem)
    return tiles[0] if tiles and float32.has_few_rows(problem) else DEFAULT_TILE


FLOAT32 = KernelFamily(
    FLOAT32_TILE_CONFIGS,
    _unsupported_reason,
    _with_kernel_result,
    _more_float32_tiles,
    _float32_tile,
)
"""The kernels for two operands of float32."""


def _family(problem: RaggedProblem) -> KernelFamily:
    return FLOAT32 if is_float32(problem) else SAME_DTYPE


def _accumulating(family: KernelFamily) -> KernelFamily:
    """The kernels of `family`: to results that TMA can address as they are, some add in place."""

    def kernel_form(problem: RaggedProblem) -> RaggedProblem:
        form = family.kernel_form(problem)
        is_padded = addressable_problem(form).shape(form.out) != form.shape(form.out)
        if is_padded or is_float32(form):
            return dataclasses.replace(form, op="ragged_contracting")
        return form

    return dataclasses.replace(family, kernel_form=kernel_form)
