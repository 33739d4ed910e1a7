"""Products of lists of matrices of unequal shapes, in one launch of a persistent kernel.

The scheduler modes and the sorting of problems are those of CUTLASS's grouped kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack, overload

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    canonical_precision,
    checked_boolean,
    checked_choice,
    checked_implementation,
)
from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.lists.arguments import (
    Matrices,
    MatrixLists,
    Results,
    Scale,
    Stack,
    check_beta,
    is_complex,
    is_number,
)
from jax_grouped_gemm._src.lists.grouped_gemm import primitive
from jax_grouped_gemm._src.lists.grouped_gemm.problem import SCHEDULERS, Scheduler
from jax_grouped_gemm._src.lists.op import problems_of


class GroupedGemmOptions(TypedDict, total=False):
    """The keyword arguments of `grouped_gemm`."""

    alpha: Scale
    beta: Scale
    transpose_lhs: bool | Sequence[bool]
    transpose_rhs: bool | Sequence[bool]
    precision: lax.PrecisionLike
    preferred_element_type: DTypeLike | None
    scheduler: Scheduler
    sort_problems: bool
    implementation: Implementation


@overload
def grouped_gemm(
    lhs: Stack, rhs: Stack, c: Stack | None = None, **options: Unpack[GroupedGemmOptions]
) -> jax.Array: ...


@overload
def grouped_gemm(
    lhs: Sequence[Stack],
    rhs: Sequence[Stack],
    c: Sequence[Stack] | None = None,
    **options: Unpack[GroupedGemmOptions],
) -> list[jax.Array]: ...


def grouped_gemm(
    lhs: Matrices,
    rhs: Matrices,
    c: Matrices | None = None,
    *,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    transpose_lhs: bool | Sequence[bool] = False,
    transpose_rhs: bool | Sequence[bool] = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    scheduler: Scheduler = "host_precomputed",
    sort_problems: bool = True,
    implementation: Implementation = None,
) -> Results:
    """Computes alpha_i A_i B_i + beta_i C_i for each problem i of a list, whatever their shapes.

    One launch computes up to 79 problems whose operands have the same layout. Longer lists, and
    lists that mix layouts, take several launches. A stack of matrices counts as one problem. The
    function is differentiable to any order. Gradients are lists of products too, computed in the
    same way.

    bfloat16, float16 and float32 have a CUDA kernel. Operands in float32 are first split into
    float16 parts. The results are as accurate as TF32's at the default precision, and as float32's
    at the highest. float64, complex64 and complex128 have a kernel on the FP64 tensor cores. This
    kernel returns the dtype of its operands, reads matrices of any size in place, and takes up to
    128 matrices in a launch. For complex64 it is used at `precision="highest"` or with
    `implementation="cuda"`, and sums in float64. All other calls run the reference, one
    `jax.lax.dot_general` for each problem; `explain` says so.

    Args:
      lhs: a sequence of matrices [m_i, k_i] and stacks [g_i, m_i, k_i], or one stack [g, m, k].
        Floating point or complex; different dtypes are promoted. Any dimension may be zero; if k_i
        is zero, the result is beta_i C_i.
      rhs: like `lhs`, with [k_i, n_i] and [g_i, k_i, n_i].
      c: shaped like the results. It is updated in place where XLA finds it unused afterwards, for
        example because it is donated. It is not read where beta is zero.
      alpha: a scalar, or an array or sequence with one entry for each problem. The entry of a stack
        may itself have one scalar for each matrix. Python and NumPy scalars are compiled in; arrays
        may be traced.
      beta: like `alpha`, for `c`. Without `c` it must be zero.
      transpose_lhs: whether matrices of lhs are stored [k_i, m_i]: a boolean, or one for each
        problem. This costs no copy.
      transpose_rhs: whether matrices of rhs are stored [n_i, k_i].
      precision: as in `jax.lax.dot`, for float32 and wider. HIGH means HIGHEST, never TF32.
      preferred_element_type: dtype of the results, by default the promoted dtype of all operands.
        Accumulation is in float32 at least.
      scheduler: how tiles are assigned to thread blocks. "host_precomputed": by a table made when
        the function is traced, which assigns the longest tiles first, each to the cluster of blocks
        that is free first. "device": clusters take tiles in order, and search the list for their
        next tile. The kernel of the FP64 tensor cores always uses "device", with the longest tiles
        of a launch first.
      sort_problems: whether problems are computed in the order of decreasing k. If False, both
        schedulers assign tiles in the order of the list. On the FP64 tensor cores this option only
        decides which problems share a launch. Results are always in the caller's order.
      implementation: None takes the CUDA kernel where it applies and the reference elsewhere;
        "cuda" insists on the kernel; "xla" is pure JAX.

    Returns:
      A list of arrays [m_i, n_i] and [g_i, m_i, n_i], or one array [g, m, n] if lhs is a stack.

    Raises:
      TypeError: an argument is not an array, or neither floating point nor complex, or shapes do
        not fit together.
      ValueError: lists are of unequal lengths, or an option is invalid.
      NotImplementedError: `implementation` is "cuda", but no kernel can run the call. This is
        raised when the function is lowered, with the reason.
    """
    implementation = checked_implementation(implementation)
    scheduler = checked_choice("scheduler", scheduler, SCHEDULERS)
    sort_problems = checked_boolean("sort_problems", sort_problems)
    check_beta(beta, c)
    lists = MatrixLists.of({"lhs": lhs, "rhs": rhs}, c)
    transposes = {
        "transpose_lhs": _booleans("transpose_lhs", transpose_lhs, len(lists)),
        "transpose_rhs": _booleans("transpose_rhs", transpose_rhs, len(lists)),
    }
    _check_shapes(lists.entries, **transposes)
    dtype, result_dtype = lists.dtypes(preferred_element_type)

    # Numbers are parameters of the primitive, arrays are operands.
    numbers: dict[str, complex] = {"alpha": 1.0, "beta": 0.0}
    operands: dict[str, list[jax.Array]] = {}
    for name, scale in (("alpha", alpha), ("beta", beta)):
        if is_number(scale):
            numbers[name] = _checked_number(name, scale, is_complex(result_dtype))
        else:
            operands[name] = lists.scales(name, scale, at_least_float32(result_dtype))
    if c is not None and ("beta" in operands or numbers["beta"] != 0):
        operands["c"] = lists.stacks("c", result_dtype)
    operands |= {"a": lists.stacks("lhs", dtype), "b": lists.stacks("rhs", dtype)}
    outs = primitive.grouped_gemm(
        problems_of(operands),
        **numbers,
        **transposes,
        result_dtype=result_dtype,
        precision=canonical_precision(precision),
        scheduler=scheduler,
        sort_problems=sort_problems,
        implementation=implementation,
    )
    return lists.results(outs)


def _booleans(name: str, value: bool | Sequence[bool], count: int) -> tuple[bool, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return (checked_boolean(name, value),) * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries, but lhs has {count}")
    return tuple(checked_boolean(f"{name}[{i}]", x) for i, x in enumerate(value))


def _check_shapes(
    operands: dict[str, list[jax.Array]],
    transpose_lhs: Sequence[bool],
    transpose_rhs: Sequence[bool],
) -> None:
    rows = zip(operands["lhs"], operands["rhs"], transpose_lhs, transpose_rhs, strict=True)
    for i, (lhs, rhs, lhs_transposed, rhs_transposed) in enumerate(rows):
        (m, k), (rhs_k, n) = _meant(lhs, lhs_transposed), _meant(rhs, rhs_transposed)
        if lhs.ndim != rhs.ndim or lhs.shape[:-2] != rhs.shape[:-2] or k != rhs_k:
            raise TypeError(
                f"lhs[{i}] of shape {lhs.shape}{_transposed(lhs_transposed)} and rhs[{i}] of shape "
                f"{rhs.shape}{_transposed(rhs_transposed)} must agree in their contracted "
                "dimension and their number of matrices"
            )
        expected = (*lhs.shape[:-2], m, n)
        if "c" in operands and operands["c"][i].shape != expected:
            raise TypeError(
                f"c[{i}] must have the shape {expected} of its result, got {operands['c'][i].shape}"
            )


def _meant(x: jax.Array, transposed: bool) -> tuple[int, int]:
    rows, columns = x.shape[-2:]
    return (columns, rows) if transposed else (rows, columns)


def _transposed(transposed: bool) -> str:
    return " (transposed)" if transposed else ""


def _checked_number(name: str, scale: complex, may_be_complex: bool) -> complex:
    if isinstance(scale, (complex, np.complexfloating)):
        if not may_be_complex:
            raise TypeError(f"{name} must be real here, got {scale!r}")
        return complex(scale)
    return float(scale)
