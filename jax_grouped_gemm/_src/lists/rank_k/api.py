"""Grouped symmetric and Hermitian updates: SYRK, HERK, SYR2K and HER2K over many matrices at once.

The conventions are those of the level 3 BLAS (Dongarra et al., 1990), with functional results and
gradients. The kernel computes only the tiles of one triangle, as CUTLASS's grouped rank-2k does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, get_args, overload

import jax
import jax.numpy as jnp
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
from jax_grouped_gemm._src.lists.op import problems_of
from jax_grouped_gemm._src.lists.rank_k import primitive

Uplo = Literal["lower", "upper"]
Stacks = Sequence[Stack]


class Options(TypedDict, total=False):
    """The keyword arguments of all updates; `update` has their defaults."""

    alpha: Scale
    beta: Scale
    diagonal: Scale
    uplo: Uplo
    symmetrize_output: bool
    transpose: bool
    precision: lax.PrecisionLike
    preferred_element_type: DTypeLike | None
    implementation: Implementation


Function = TypeVar("Function", bound=Callable[..., Any])


def update(
    factors: dict[str, Matrices],
    c: Matrices | None,
    hermitian: bool = False,
    symm: bool = False,
    whole_tiles: bool = False,
    *,
    alpha: Scale = 1.0,
    beta: Scale = 0.0,
    diagonal: Scale = 0.0,
    uplo: Uplo = "lower",
    symmetrize_output: bool = False,
    transpose: bool = False,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    implementation: Implementation = None,
) -> Results:
    """Computes any of the updates; `symm` and `whole_tiles` are parameters of the primitive."""
    uplo = checked_choice("uplo", uplo, get_args(Uplo))
    implementation = checked_implementation(implementation)
    symmetrize_output = checked_boolean("symmetrize_output", symmetrize_output)
    transpose = checked_boolean("transpose", transpose)
    check_beta(beta, c)
    lists = MatrixLists.of(factors, c)
    _check_shapes(lists.entries, transpose)
    dtype, result_dtype = lists.dtypes(preferred_element_type)

    hermitian = hermitian and is_complex(result_dtype)
    wide = at_least_float32(result_dtype)
    real = jnp.finfo(wide).dtype if hermitian else wide
    alpha_dtype = wide if len(factors) == 2 else real
    operands = {"alpha": lists.scales("alpha", alpha, alpha_dtype, keep_single=True)}
    if c is not None:
        operands["beta"] = lists.scales("beta", beta, real, keep_single=True)
    if not (is_number(diagonal) and diagonal == 0):
        operands["diagonal"] = lists.scales("diagonal", diagonal, real, keep_single=True)
    for name in lists.entries:
        operands[name] = lists.stacks(name, result_dtype if name == "c" else dtype)
    outs = primitive.rank_k(
        problems_of(operands),
        hermitian=hermitian,
        transpose=transpose,
        upper=uplo == "upper",
        symmetrize=symmetrize_output,
        result_dtype=result_dtype,
        precision=canonical_precision(precision),
        implementation=implementation,
        symm=symm,
        whole_tiles=whole_tiles,
        c_is_factor=_c_is_factor(lists),
    )
    return lists.results(outs)


def _c_is_factor(lists: MatrixLists) -> tuple[bool, ...]:
    """Returns, for each entry, whether its c is the same array as one of its factors."""
    none = [None] * len(lists)
    factors = [xs for name, xs in lists.entries.items() if name != "c"]
    return tuple(
        any(c is factor for factor in own)
        for c, *own in zip(lists.entries.get("c", none), *factors, strict=True)
    )


def _with_options(function: Function) -> Function:
    """Returns `function` with the options of `update` in its signature, not `**options`."""
    own = inspect.signature(function)
    parameters = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
    options = inspect.signature(update).parameters.values()
    parameters += [x for x in options if x.kind is x.KEYWORD_ONLY]
    signature = own.replace(parameters=parameters)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in signature.parameters:
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}"
                )
        return function(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    return checked  # type: ignore[return-value]  # of the same type by construction


@overload
def grouped_syrk(a: Stack, c: Stack | None = None, **options: Unpack[Options]) -> jax.Array: ...


@overload
def grouped_syrk(
    a: Stacks, c: Stacks | None = None, **options: Unpack[Options]
) -> list[jax.Array]: ...


@_with_options
def grouped_syrk(a: Matrices, c: Matrices | None = None, **options: Unpack[Options]) -> Results:
    """Computes symmetric rank-k updates: one triangle of `alpha A A^T + beta C` for each matrix.

    The updates take half the work of `A @ A.T`, and one kernel launch for all matrices, whatever
    their shapes.

    The other triangle of a result comes from C, or is zero without `c`. With `symmetrize_output` it
    mirrors the computed triangle, so that the result is exactly symmetric. As in BLAS,
    arithmetic uses only the `uplo` triangle of C, and does not use C at all if `beta` is zero.

    Gradients follow the same rules: those of the factors use the `uplo` triangle of the cotangent,
    and the other triangle goes to the gradient of C. With `symmetrize_output` the gradients of the
    factors use both triangles of the cotangent.

    Args:
      a: a stack [g, n, k], or a sequence of matrices [n_i, k_i] and stacks [g_i, n_i, k_i] whose
        shapes need not agree. Floating point or complex; different dtypes are promoted.
      c: shaped like the results. It is updated in place where XLA finds it unused afterwards, for
        example because it is donated. With `symmetrize_output` it may be `a` itself, uncopied.
      alpha: a scalar, possibly traced; or an array or sequence with one value for each entry of
        `a`. The value of a stack may itself have one scalar for each matrix.
      beta: like `alpha`, for `c`. Without `c` it must be zero.
      diagonal: a scalar or values like `alpha`, added to the diagonal of each result before it is
        rounded. The kernels of float64 and complex numbers do not support it, so that the reference
        runs instead.
      uplo: "lower" or "upper", the triangle that is computed.
      symmetrize_output: whether to mirror the computed triangle into the other one.
      transpose: whether matrices are stored [k, n]. The product of a stored matrix S is then S^T S.
        This costs no copy.
      precision: as in `jax.lax.dot`, for float32 and wider. HIGH means HIGHEST, never TF32. The
        kernel multiplies float32 as float16 parts. DEFAULT is as accurate as TF32, HIGHEST as
        float32. complex64 has a kernel at HIGHEST only, and this kernel accumulates in float64.
      preferred_element_type: dtype of the results, by default the promoted dtype of `a` and `c`.
        Accumulation is in float32 at least.
      implementation: None takes the CUDA kernel where it applies (bfloat16, float16, float32,
        float64, complex128, and complex64 at the highest precision) and the reference elsewhere;
        "cuda" insists on the kernel; "xla" is pure JAX.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError: an argument is not an array, or neither floating point nor complex, or shapes do
        not fit together.
      ValueError: lists are of unequal lengths, or an option is invalid.
      NotImplementedError: `implementation` is "cuda", but no kernel can run the call. This is
        raised when the function is lowered, with the reason.
    """
    return update({"a": a}, c, hermitian=False, **options)


@overload
def grouped_herk(a: Stack, c: Stack | None = None, **options: Unpack[Options]) -> jax.Array: ...


@overload
def grouped_herk(
    a: Stacks, c: Stacks | None = None, **options: Unpack[Options]
) -> list[jax.Array]: ...


@_with_options
def grouped_herk(a: Matrices, c: Matrices | None = None, **options: Unpack[Options]) -> Results:
    """Computes Hermitian rank-k updates: a triangle of `alpha A A^H + beta C`, with real scalars.

    Diagonals are exactly real. For real matrices this is `grouped_syrk`. With `transpose` the
    product of a stored matrix S is `S^T conj(S)`, the conjugate of BLAS's result with trans='C'.

    Args:
      a: [g, n, k], or a sequence of [n_i, k_i] and [g_i, n_i, k_i].
      c: shaped like the results.
      alpha, beta, diagonal: real scalars, or one for each entry or matrix.
      uplo, symmetrize_output, transpose, precision, preferred_element_type, implementation: as for
        `grouped_syrk`. The mirror image is conjugated.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError: as for `grouped_syrk`, and for a complex alpha or beta.
      ValueError, NotImplementedError: as for `grouped_syrk`.
    """
    return update({"a": a}, c, hermitian=True, **options)


@overload
def grouped_syr2k(
    a: Stack, b: Stack, c: Stack | None = None, **options: Unpack[Options]
) -> jax.Array: ...


@overload
def grouped_syr2k(
    a: Stacks, b: Stacks, c: Stacks | None = None, **options: Unpack[Options]
) -> list[jax.Array]: ...


@_with_options
def grouped_syr2k(
    a: Matrices, b: Matrices, c: Matrices | None = None, **options: Unpack[Options]
) -> Results:
    """Computes symmetric rank-2k updates: one triangle of `alpha (A B^T + B A^T) + beta C`.

    The updates take the work of one `A @ B.T`, and one kernel launch for all matrices.

    Args:
      a: [g, n, k], or a sequence of [n_i, k_i] and [g_i, n_i, k_i].
      b: shaped like `a`.
      c: shaped like the results.
      alpha, beta, diagonal, uplo, symmetrize_output, precision: as for `grouped_syrk`.
      transpose: as for `grouped_syrk`. The result is then `A^T B + B^T A` of the stored matrices.
      preferred_element_type, implementation: as for `grouped_syrk`.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError, ValueError, NotImplementedError: as for `grouped_syrk`.
    """
    return update({"a": a, "b": b}, c, hermitian=False, **options)


@overload
def grouped_her2k(
    a: Stack, b: Stack, c: Stack | None = None, **options: Unpack[Options]
) -> jax.Array: ...


@overload
def grouped_her2k(
    a: Stacks, b: Stacks, c: Stacks | None = None, **options: Unpack[Options]
) -> list[jax.Array]: ...


@_with_options
def grouped_her2k(
    a: Matrices, b: Matrices, c: Matrices | None = None, **options: Unpack[Options]
) -> Results:
    """Computes Hermitian rank-2k updates: a triangle of `alpha A B^H + conj(alpha) B A^H + beta C`.

    Diagonals are exactly real. For real matrices this is `grouped_syr2k`. With `transpose` the
    result is `alpha A^T conj(B) + conj(alpha) B^T conj(A)` of the stored matrices, the conjugate of
    BLAS's result with trans='C'.

    Args:
      a: [g, n, k], or a sequence of [n_i, k_i] and [g_i, n_i, k_i].
      b: shaped like `a`.
      c: shaped like the results.
      alpha: as for `grouped_syrk`. It may be complex.
      beta, diagonal: as for `grouped_syrk`, but real.
      uplo, symmetrize_output, transpose, precision, preferred_element_type, implementation: as for
        `grouped_herk`.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError: as for `grouped_syrk`, and for a complex beta.
      ValueError, NotImplementedError: as for `grouped_syrk`.
    """
    return update({"a": a, "b": b}, c, hermitian=True, **options)


@overload
def grouped_symm_product(
    a: Stack, b: Stack, c: Stack | None = None, **options: Unpack[Options]
) -> jax.Array: ...


@overload
def grouped_symm_product(
    a: Stacks, b: Stacks, c: Stacks | None = None, **options: Unpack[Options]
) -> list[jax.Array]: ...


@_with_options
def grouped_symm_product(
    a: Matrices, b: Matrices, c: Matrices | None = None, **options: Unpack[Options]
) -> Results:
    """Computes symmetric products: one triangle of `alpha A B^T + beta C` for each matrix.

    The products take half the work of `A @ B.T`, and one kernel launch for all matrices. A B^T is
    symmetric if A and B are symmetric and commute, as polynomials of one matrix do. The function
    does not check this: it computes one triangle of A B^T in any case.

    Args:
      a: [g, n, k], or a sequence of [n_i, k_i] and [g_i, n_i, k_i]. Floating point or complex.
      b: shaped like `a`.
      c: shaped like the results. With `symmetrize_output` it may be `a` or `b` itself.
      alpha, beta, diagonal, uplo, symmetrize_output, precision: as for `grouped_syrk`.
      transpose: as for `grouped_syrk`. The result is then `A^T B` of the stored matrices.
      preferred_element_type, implementation: as for `grouped_syrk`. The kernel takes bfloat16,
        float16 and float32.

    Returns:
      [g, n, n] for a stack, else a list of [n_i, n_i] and [g_i, n_i, n_i].

    Raises:
      TypeError, ValueError, NotImplementedError: as for `grouped_syrk`.
    """
    return update({"a": a, "b": b}, c, symm=True, **options)


def _check_shapes(operands: dict[str, list[jax.Array]], transpose: bool) -> None:
    for i, a in enumerate(operands["a"]):
        n = a.shape[-1 if transpose else -2]
        expected = {"b": a.shape, "c": (*a.shape[:-2], n, n)}
        for name in operands.keys() - {"a"}:
            shape = operands[name][i].shape
            if shape != expected[name]:
                raise TypeError(
                    f"{name} must have shape {expected[name]} where a has {a.shape}"
                    f"{' transposed' if transpose else ''}, got {shape} (entry {i})"
                )
