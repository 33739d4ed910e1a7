"""Orthogonalisation of lists of matrices by Newton-Schulz iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import ArrayLike, DTypeLike

from jax_grouped_gemm._src.arguments import (
    Implementation,
    as_array,
    checked_boolean,
    checked_choice,
    checked_implementation,
)
from jax_grouped_gemm._src.arrays import at_least_float32
from jax_grouped_gemm._src.fallback import policy
from jax_grouped_gemm._src.muon import iteration
from jax_grouped_gemm._src.muon.coefficients import Coefficients, iterations, segments
from jax_grouped_gemm._src.muon.exchange import Split, on_split_matrices, split_of

# Do not use the class `jnp.float16`, because `optax.inject_hyperparams` would take it for a
# schedule.
ITERATION_DTYPE = jnp.dtype(jnp.float16)

Method = Literal["auto", "gram", "standard"]
Preconditioning = Literal["frobenius", "schatten"]

# If the longer side is at least this many times the shorter one (`a` times), Gram Newton-Schulz
# multiplies less: 6 a + 14 instead of 15 a + 5 times the cube of the shorter side.
LEAST_GRAM_RATIO = 1.2


def orthogonalize(
    matrices: Iterable[jax.Array],
    *,
    steps: int = 5,
    coefficients: Coefficients = "classic",
    eps: ArrayLike = 1e-8,
    dtype: DTypeLike = ITERATION_DTYPE,
    method: Method = "auto",
    restarts: Sequence[int] | None = None,
    scale: ArrayLike | Sequence[ArrayLike] = 1.0,
    preconditioning: Preconditioning = "frobenius",
    shardings: Sequence[NamedSharding | None] | None = None,
    blockwise: bool | jax.Array = False,
    implementation: Implementation = None,
) -> list[jax.Array]:
    """Approximates U V^T of each matrix U S V^T by Newton-Schulz iteration.

    On a GPU, the bits of a result depend on its matrix alone, not on the other matrices of a call,
    if the iteration has 16 bits, a static number of steps, and the preconditioning "frobenius".

    Stacks that are split over devices along their leading axis are not moved. If matrices are split
    along rows or columns, devices exchange the parts: each device gets some whole matrices, and
    afterwards its part of all results. Two all-to-alls exchange all matrices. Two devices use
    ppermutes and send large stacks in parts. With `moe.expert_parallel_compiler_options` they send
    some parts while they iterate on others. If the iteration is in 16 bits, float32 matrices are
    sent as bfloat16, so the results are those of the rounded matrices. An exchange has no
    derivative.

    Args:
      matrices: arrays [..., m, n] of any shapes, floating point; leading dimensions count matrices.
      steps: iterations, possibly traced. Five iterations with "classic" coefficients bring singular
        values above 0.002 of the Frobenius norm into the range 0.68 to 1.21.
      coefficients: (a, b, c) of the iteration X <- a X + (b A + c A^2) X with A = X X^T; or a
        sequence of such triples, one for each iteration, whose length then replaces `steps`; or a
        name. "classic" is one triple, which Optax calls "standard"; "dion" and "polar_express"
        (arXiv:2505.16932, made for singular values up to 1.05) are five triples each.
      eps: added to the Frobenius norm. Every matrix is first divided by this sum.
      dtype: dtype of the iteration. The CUDA kernels support bfloat16, float16 and float32. float16
        is as fast as bfloat16 and eight times as accurate.
      method: "standard" multiplies each matrix in every step. "gram", Gram Newton-Schulz, iterates
        on the Gram matrix, and multiplies the matrix only at `restarts` and after the last step.
        The less square a matrix is, the more operations this saves. "gram" does not support
        bfloat16 or a traced number of steps. "auto" takes "gram" in float16 if the longer side is
        at least 1.2 times the shorter one.
      restarts: for "gram", increasing step numbers after which the iteration computes new Gram
        matrices from the matrices. In 16 bits they may be at most three steps apart. None means
        every second step, but if the number of steps is odd the first restart is after three steps.
        With five steps this is (3,), which is as accurate as "standard"; (2,) is as fast and
        several times less accurate.
      scale: a factor of the results, one number or one for each entry of `matrices`.
      preconditioning: the norm by which each matrix is divided before the first step: "frobenius",
        or "schatten" for the Schatten-4 norm. The Schatten-4 norm is smaller, so that the first
        step starts with larger singular values.
      shardings: how the rows and columns of each entry are split, a `NamedSharding` or None. Pass
        it over auto axes, because a traced function cannot see how auto axes split its arguments.
        Over explicit axes it is not needed, because the types of the arrays say how they are split.
      blockwise: a boolean, possibly traced: whether each device orthogonalises its own block of a
        matrix whose rows or columns are split, in place of the whole matrix. Nothing is exchanged
        then, but float32 is rounded as before an exchange. A block's result is multiplied by the
        square root of the longer side of the block over the longer side of the matrix, so that its
        elements are as large as those of whole matrices.
      implementation: as for `grouped_syrk`. None takes kernels wherever they can run.

    Returns:
      Arrays shaped like `matrices`, of their dtypes.

    Raises:
      TypeError: `matrices` is not a sequence of real floating-point arrays of two dimensions or
        more, `dtype` is not floating point, or `blockwise` is not a boolean.
      ValueError: `steps` is negative, `coefficients` are not triples, an option is invalid, or
        both rows and columns are split.
    """
    triples, steps = iterations(coefficients, steps)
    dtype = np.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype must be real floating point, got {dtype}")
    method = _checked_method(method, steps, dtype)
    checked_choice("preconditioning", preconditioning, get_args(Preconditioning))
    checked_implementation(implementation)
    blockwise = _checked_blockwise(blockwise)
    is_traced = isinstance(steps, jax.Array)
    parts = [] if is_traced or method == "standard" else segments(triples, restarts, dtype)
    matrices = _checked_matrices(matrices)
    scales = _scales(scale, len(matrices))
    shardings = [None] * len(matrices) if shardings is None else list(shardings)
    if len(shardings) != len(matrices):
        raise ValueError(
            f"shardings has {len(shardings)} entries, but matrices has {len(matrices)}"
        )
    if is_traced and preconditioning == "schatten":
        raise ValueError("preconditioning='schatten' needs a static number of steps")

    def iterate(xs: list[jax.Array]) -> list[jax.Array]:
        """Iterates on matrices [..., m, n], with results in `dtype`."""
        outs: list[jax.Array] = list(xs)
        for is_gram in (False, True):
            own = [i for i, x in enumerate(xs) if _takes_gram(x, method, dtype) == is_gram]
            if not own:
                continue
            products = iteration.Products(implementation, [_is_tall(xs[i]) for i in own])
            ys = [xs[i].reshape(-1, *xs[i].shape[-2:]) for i in own]
            precondition = None
            if is_traced or not triples or dtype.itemsize > 2:
                ys = [_normalized(y, eps).astype(dtype) for y in ys]
            else:
                powers = list(map(_power_of_two, ys))
                precondition = iteration.frobenius([jnp.asarray(eps * power) for power in powers])
                ys = [_times(y, power).astype(dtype) for y, power in zip(ys, powers, strict=True)]
            if preconditioning == "schatten":
                precondition = iteration.schatten
            if is_traced:
                ys = iteration.traced(ys, jnp.asarray(steps), triples[0], products)
            elif is_gram:
                ys = iteration.gram(ys, parts, products, precondition)
            else:
                ys = iteration.standard(ys, triples, products, precondition)
            for i, y in zip(own, ys, strict=True):
                outs[i] = y.reshape(xs[i].shape)
        return outs

    # A matrix without elements has no norm.
    chosen = [i for i, x in enumerate(matrices) if x.size]
    splits = {i: split_of(f"shardings[{i}]", matrices[i], shardings[i]) for i in chosen}
    outs = list(matrices)
    with policy("kernels") if implementation is None else contextlib.nullcontext():
        for group in _together(splits):
            xs = [matrices[i] for i in group]
            own = [split for i in group if (split := splits[i])]
            if own:
                xs = [_travelling(x, dtype) for x in xs]
                ys = on_split_matrices(iterate, xs, own, blockwise)
            else:
                ys = iterate(xs)
            for i, y in zip(group, ys, strict=True):
                outs[i] = _scaled(y, scales[i], matrices[i].dtype)
    return outs


def _together(splits: Mapping[int, Split | None]) -> list[list[int]]:
    """Groups entries that are exchanged in the same way, to iterate on each group together."""
    groups: dict[Any, list[int]] = {}
    for i, split in splits.items():
        groups.setdefault(split and (split.mesh, split.names), []).append(i)
    return list(groups.values())


def _travelling(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds to bfloat16, which has the range of float32, if the iteration is in 16 bits."""
    if dtype.itemsize > 2:
        return x.astype(at_least_float32(x.dtype))
    return x if x.dtype == jnp.float16 else x.astype(jnp.bfloat16)


def _checked_method(method: Method, steps: int | jax.Array, dtype: np.dtype) -> Method:
    checked_choice("method", method, get_args(Method))
    if method == "gram" and dtype == jnp.bfloat16:
        raise ValueError(
            "method='gram' would amplify the rounding errors of bfloat16, which has 8 bits: use "
            "dtype=float16, which is as fast"
        )
    if isinstance(steps, jax.Array):
        if method == "gram":
            raise ValueError("method='gram' needs a static number of steps, got a traced one")
        return "standard"
    return method


def _checked_blockwise(blockwise: bool | jax.Array) -> bool | jax.Array:
    if not isinstance(blockwise, jax.Array):
        return checked_boolean("blockwise", blockwise)
    if blockwise.dtype != bool or blockwise.ndim:
        raise TypeError(f"blockwise must be one boolean, got {jax.typeof(blockwise)}")
    return blockwise


def _takes_gram(x: jax.Array, method: Method, dtype: np.dtype) -> bool:
    """Whether to take "gram". This depends only on the matrix's shape, not on other matrices."""
    if method == "auto":
        shorter, longer = sorted(x.shape[-2:])
        return dtype == jnp.float16 and longer >= LEAST_GRAM_RATIO * shorter
    return method == "gram"


def _checked_matrices(matrices: Iterable[jax.Array]) -> list[jax.Array]:
    if hasattr(matrices, "ndim") or not isinstance(matrices, Iterable):
        shape = f" of shape {matrices.shape}" if hasattr(matrices, "shape") else ""
        raise TypeError(
            f"matrices must be a sequence of arrays, got {type(matrices).__name__}{shape}; "
            "orthogonalize([x]) takes one"
        )
    arrays = [as_array(f"matrices[{i}]", x) for i, x in enumerate(matrices)]
    for i, x in enumerate(arrays):
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"matrices[{i}] must be [..., m, n] of a real floating-point dtype, got {x.dtype} "
                f"of shape {x.shape}"
            )
    return arrays


def _scales(scale: ArrayLike | Sequence[ArrayLike], count: int) -> list[ArrayLike]:
    """Returns a scale for each entry."""
    scales = list(scale) if isinstance(scale, Sequence) else [scale] * count
    if len(scales) != count:
        raise ValueError(f"scale has {len(scales)} entries, but matrices has {count}")
    for x in scales:
        if isinstance(x, str) or jnp.ndim(x):
            raise ValueError(f"scale must be a number, or one for each entry, got {x!r}")
    return scales


def _is_tall(x: jax.Array) -> bool:
    return x.shape[-2] > x.shape[-1]


def _normalized(x: jax.Array, eps: ArrayLike) -> jax.Array:
    """Scales matrices so that no singular value exceeds one."""
    x = x.astype(at_least_float32(x.dtype))
    return x / (_norm(x)[..., None, None] + eps)


def _norm(x: jax.Array) -> jax.Array:
    """Returns Frobenius norms, also where squares would be too small for float32."""
    small, large = 2.0**-40, 2.0**64
    norm = jnp.linalg.norm(x, axis=(-2, -1))
    return jnp.where(norm < small, jnp.linalg.norm(x * large, axis=(-2, -1)) / large, norm)


def _power_of_two(x: jax.Array) -> jax.Array:
    """Returns [g], the power of two that brings each Frobenius norm between 1/2 and 1.

    A product with it is exact in floating point, and does not depend on the last bits of the norm.
    """
    norm = _norm(x.astype(at_least_float32(x.dtype)))
    # Work on bits, because `jnp.frexp` of a split norm gathers it in JAX 0.12.
    biased = lax.bitcast_convert_type(norm.astype(jnp.float32), jnp.int32) >> 23
    # A matrix whose norm underflows float32 counts as zero, and stays unscaled.
    inverse = jnp.where(biased == 0, 127, jnp.clip(253 - biased, 1, 253))
    return lax.bitcast_convert_type(inverse << 23, jnp.float32)


def _times(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies each matrix by its scale."""
    return x.astype(scale.dtype) * scale[:, None, None]


def _scaled(x: jax.Array, scale: ArrayLike, dtype: np.dtype) -> jax.Array:
    """Multiplies by a number that may not fit 16 bits, and rounds once."""
    if isinstance(scale, int | float) and scale == 1:
        return x.astype(dtype)
    wide = x.astype(at_least_float32(dtype))
    return (wide * jnp.asarray(scale, wide.dtype)).astype(dtype)
