"""The operands of the kernels of unequal products and of symmetric updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src import float32
from jax_grouped_gemm._src.lists import fp64 as fp64_kernels
from jax_grouped_gemm._src.plan import (
    AS_ASKED,
    KERNEL_OPERAND_DTYPES,
    KERNEL_RESULT_DTYPES,
    TMA_ALIGNMENT_BYTES,
)
from jax_grouped_gemm._src.sizes import too_large


def unsupported_reason(problem: fp64_kernels.ListProblem, params: Mapping[str, Any]) -> str:
    """Why no kernel can run `problem`, empty if one can."""
    if params["implementation"] == "xla":
        return AS_ASKED
    if reason := too_large(problem.sizes()):
        return reason
    if problem.dtype in fp64_kernels.DTYPES:
        return fp64_kernels.unsupported_reason(problem, params)
    if (
        problem.dtype not in KERNEL_OPERAND_DTYPES
        or problem.result_dtype not in KERNEL_RESULT_DTYPES
    ):
        return (
            f"no kernel for {problem.dtype} -> {problem.result_dtype}: the kernels take bfloat16, "
            "float16 or float32 and return bfloat16, float16 or float32, or take and return "
            "float64, complex64 or complex128"
        )
    if isinstance(params["precision"], (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"the kernels do not implement precision={params['precision']}"
    return ""


def written_dtype(problem: fp64_kernels.ListProblem) -> np.dtype:
    """The type that a kernel writes: that of its operands, or float32."""
    is_same = problem.result_dtype == problem.dtype
    return problem.result_dtype if is_same else np.dtype(np.float32)


def row_multiples(problem: fp64_kernels.ListProblem) -> tuple[int, int]:
    """The multiples of elements that TMA wants rows of operands and of results to have."""
    # TMA addresses the float16 parts of float32 operands.
    is_float32 = problem.dtype == jnp.float32
    operand_dtype = float32.PART_DTYPE if is_float32 else problem.dtype
    return (
        TMA_ALIGNMENT_BYTES // operand_dtype.itemsize,
        TMA_ALIGNMENT_BYTES // written_dtype(problem).itemsize,
    )
