"""Grouped symmetric and Hermitian updates: SYRK, HERK, SYR2K and HER2K over many matrices at once.

The conventions are those of the level 3 BLAS (Dongarra et al., 1990), with functional results and
gradients. The kernel walks the tiles of one triangle alone, as CUTLASS's grouped rank-2k does.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import canonical_precision, checked_implementation
from jax_grouped_gemm._src.lists.arguments import (
    Matrices,
    Results,
    Scale,
    as_stack,
    check_counts,
    entries_of,
    is_one_stack,
    like_entry,
    scales_of,
)
from jax_grouped_gemm._src.lists.rank_k import primitive

Uplo = Literal["lower", "upper"]


def grouped_syrk(
    a: Matrices,
    c: Matrices | None = None,
    *,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    uplo: Uplo = "lower",
    symmetrize_output: bool = False,
    transpose: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> Results:
    """Symmetric rank-k updates: one triangle of `alpha A A^T + beta C` for each matrix.

    Half the work of `A @ A.T`, in one kernel launch for all matrices, whatever their shapes.

    The other triangle of a result is C's; without `c` it is zero; with `symmetrize_output` it is
    the mirror image of the computed one, so that the result is exactly symmetric. As in BLAS, only
    the `uplo` triangle of C is ever used in arithmetic, and not even that where `beta` is zero.

    Gradients follow the same rules: the cotangent of a result is read in the `uplo` triangle, what
    it holds in the other one goes to C, and with `symmetrize_output` both triangles count.

    Args:
      a: a stack [g, n, k], or a sequence of matrices [n_i, k_i] and stacks [g_i, n_i, k_i] whose
        shapes need not agree. Floating point or complex; different dtypes are promoted.
      c: shaped like the results. Updated in place where XLA finds it unused afterwards, for example
        because it is donated.
      alpha: a scalar, possibly traced; or one for each entry of `a`, which for an entry that is a
        stack can again be one for each of its matrices.
      beta: the same for `c`.
      uplo: "lower" or "upper", the triangle that is computed.
      symmetrize_output: whether to mirror it into the other triangle.
      transpose: whether matrices are stored [k, n], which makes it `A^T A` of what is stored. Costs
        no copy.
      precision: as in `jax.lax.dot`, for float32 and wider. HIGH means HIGHEST, never TF32. The
        kernel multiplies float32 as float16 parts, see `_src.float32`: at DEFAULT as
        accurate as TF32, at HIGHEST as float32. What complex64 has a kernel for is HIGHEST: it
        accumulates in float64.
      preferred_element_type: dtype of the results, by default the promoted dtype of `a` and `c`.
        Accumulation is in float32 at least.
      implementation: None takes the CUDA kernel where it applies (bfloat16, float16, float32,
        float64, complex128, and complex64 at the highest precision) and the reference elsewhere;
        "cuda" insists on the kernel; "reference" is pure JAX.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError: an argument is no array, or neither floating point nor complex.
      ValueError: shapes do not fit, or an option is invalid.
      NotImplementedError: `implementation="cuda"` and the kernel cannot run this; raised when the
        function is lowered, with the reason.
    """
    return _update(
        a,
        None,
        c,
        alpha,
        beta,
        hermitian=False,
        uplo=uplo,
        symmetrize_output=symmetrize_output,
        transpose=transpose,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )


def grouped_herk(
    a: Matrices,
    c: Matrices | None = None,
    *,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    uplo: Uplo = "lower",
    symmetrize_output: bool = False,
    transpose: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> Results:
    """Hermitian rank-k updates: one triangle of `alpha A A^H + beta C`, alpha and beta real.

    Diagonals are exactly real. For real matrices this is `grouped_syrk`; with `transpose` it is
    `A^T conj(A)` of what is stored.

    Args:
      a: [g, n, k], or a sequence of [n_i, k_i] and [g_i, n_i, k_i].
      c: shaped like the results.
      alpha, beta: real scalars, or one for each entry or matrix.
      uplo, symmetrize_output, transpose, precision, preferred_element_type, implementation: as for
        `grouped_syrk`; the mirror image is the conjugate one.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError: as for `grouped_syrk`, and for a complex alpha or beta.
      ValueError, NotImplementedError: as for `grouped_syrk`.
    """
    return _update(
        a,
        None,
        c,
        alpha,
        beta,
        hermitian=True,
        uplo=uplo,
        symmetrize_output=symmetrize_output,
        transpose=transpose,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )


def grouped_syr2k(
    a: Matrices,
    b: Matrices,
    c: Matrices | None = None,
    *,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    uplo: Uplo = "lower",
    symmetrize_output: bool = False,
    transpose: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> Results:
    """Symmetric rank-2k updates: one triangle of `alpha (A B^T + B A^T) + beta C`.

    The work of one `A @ B.T`, in one kernel launch for all matrices.

    Args:
      a: [g, n, k], or a sequence of [n_i, k_i] and [g_i, n_i, k_i].
      b: shaped like `a`.
      c: shaped like the results.
      alpha, beta, uplo, symmetrize_output, transpose, precision, preferred_element_type,
        implementation: as for `grouped_syrk`; with `transpose` it is `A^T B + B^T A` of what is
        stored.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError, ValueError, NotImplementedError: as for `grouped_syrk`.
    """
    return _update(
        a,
        b,
        c,
        alpha,
        beta,
        hermitian=False,
        uplo=uplo,
        symmetrize_output=symmetrize_output,
        transpose=transpose,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )


def grouped_her2k(
    a: Matrices,
    b: Matrices,
    c: Matrices | None = None,
    *,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    uplo: Uplo = "lower",
    symmetrize_output: bool = False,
    transpose: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
) -> Results:
    """Hermitian rank-2k updates: one triangle of `alpha A B^H + conj(alpha) B A^H + beta C`.

    Diagonals are exactly real. For real matrices this is `grouped_syr2k`.

    Args:
      a: [g, n, k], or a sequence of [n_i, k_i] and [g_i, n_i, k_i].
      b: shaped like `a`.
      c: shaped like the results.
      alpha: as for `grouped_syrk`, may be complex.
      beta: the same, real.
      uplo, symmetrize_output, transpose, precision, preferred_element_type, implementation: as for
        `grouped_herk`.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError: as for `grouped_syrk`, and for a complex beta.
      ValueError, NotImplementedError: as for `grouped_syrk`.
    """
    return _update(
        a,
        b,
        c,
        alpha,
        beta,
        hermitian=True,
        uplo=uplo,
        symmetrize_output=symmetrize_output,
        transpose=transpose,
        precision=precision,
        preferred_element_type=preferred_element_type,
        implementation=implementation,
    )


def _update(
    a,
    b,
    c,
    alpha,
    beta,
    *,
    hermitian,
    uplo,
    symmetrize_output,
    transpose,
    precision,
    preferred_element_type,
    implementation,
) -> Results:
    if uplo not in ("lower", "upper"):
        raise ValueError(f"uplo must be 'lower' or 'upper', got {uplo!r}")
    implementation = checked_implementation(implementation)
    is_stack = is_one_stack(a)
    operands = {"a": entries_of("a", a, is_stack)}
    if b is not None:
        operands["b"] = entries_of("b", b, is_stack)
    if c is not None:
        operands["c"] = entries_of("c", c, is_stack)
    _check_shapes(operands, transpose)

    dtype = jnp.result_type(*operands["a"], *operands.get("b", ()))
    result_dtype = jnp.result_type(dtype, *operands.get("c", ()))
    if preferred_element_type is not None:
        result_dtype = jax.dtypes.canonicalize_dtype(preferred_element_type)
    for name, x in (("a and b", dtype), ("the results", result_dtype)):
        if not jnp.issubdtype(x, jnp.inexact):
            raise TypeError(f"{name} must be floating point or complex, got dtype {x}")
    if jnp.issubdtype(dtype, jnp.complexfloating) > jnp.issubdtype(
        result_dtype, jnp.complexfloating
    ):
        raise TypeError(f"complex operands give complex results, got dtype {result_dtype}")

    hermitian = hermitian and jnp.issubdtype(result_dtype, jnp.complexfloating)
    complex_alpha = not hermitian or b is not None

    def scales_for(name, scale, may_be_complex):
        return scales_of(
            name, scale, operands["a"], is_stack, result_dtype, may_be_complex, keep_single=True
        )

    scales = {"alpha": scales_for("alpha", alpha, complex_alpha)}
    if c is not None:
        scales["beta"] = scales_for("beta", beta, not hermitian)

    missing = [None] * len(operands["a"])
    casts = {"a": dtype, "b": dtype, "c": result_dtype}
    stacks = {
        name: [as_stack(x.astype(casts[name])) for x in entries]
        for name, entries in operands.items()
    }
    outs = primitive.rank_k(
        primitive.Stacks(
            alpha=scales["alpha"],
            a=stacks["a"],
            b=stacks.get("b", missing),
            beta=scales.get("beta", missing),
            c=stacks.get("c", missing),
        ),
        hermitian=hermitian,
        transpose=transpose,
        upper=uplo == "upper",
        symmetrize=symmetrize_output,
        result_dtype=np.dtype(result_dtype),
        precision=canonical_precision(precision),
        implementation=implementation,
    )
    outs = [like_entry(out, x) for out, x in zip(outs, operands["a"], strict=True)]
    return outs[0] if is_stack else outs


def _check_shapes(operands: dict[str, list[jax.Array]], transpose: bool) -> None:
    check_counts(operands)
    for i, a in enumerate(operands["a"]):
        n = a.shape[-1 if transpose else -2]
        expected = {"b": a.shape, "c": (*a.shape[:-2], n, n)}
        for name in operands.keys() - {"a"}:
            shape = operands[name][i].shape
            if shape != expected[name]:
                raise ValueError(
                    f"{name} must have shape {expected[name]} where a has {a.shape}"
                    f"{' transposed' if transpose else ''}, got {shape} (entry {i})"
                )
