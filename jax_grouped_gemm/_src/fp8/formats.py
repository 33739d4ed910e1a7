"""FP8 formats: element types, elements that share a scale, shapes of values and scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import canonical_dtype
from jax_grouped_gemm._src.arrays import cdiv, is_static
from jax_grouped_gemm._src.quantized.format import ScaleLayout

NO_DERIVATIVE = (
    "FP8 operands are constants to autodiff. Use jax_grouped_gemm.fp8_ragged_dot, which is "
    "differentiable once, or jax.lax.stop_gradient."
)

BLOCK = 128
"""The number of elements that share a scale, along each dimension of a block."""

FP8_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Scaling(ScaleLayout):
    """The elements of an FP8 operand that share a float32 scale: of lhs [m, k] or of rhs [k, n].

    Attributes:
      name: the name in messages and in `explain`.
      column_major: whether scales of lhs are stored as [ceil(k / 128), m or more].
    """

    dtype: np.dtype = dataclasses.field(default=np.dtype(np.float32), kw_only=True)
    name: str
    column_major: bool = False

    @property
    def is_single(self) -> bool:
        """Whether a matrix has one scale."""
        return self.block == (None, None)

    def __str__(self) -> str:
        return self.name


LhsScaling = Literal["1x128", "1xk", "tensor", "1x128 column-major"]
ROW_BLOCKS = Scaling((1, BLOCK), "1x128")
ROWS = Scaling((1, None), "1xk")
TENSOR = Scaling((None, None), "tensor")
COLUMN_MAJOR = Scaling((1, BLOCK), "1x128 column-major", column_major=True)
LHS_SCALINGS = {str(x): x for x in (ROW_BLOCKS, ROWS, TENSOR, COLUMN_MAJOR)}
"""Scales of lhs [m, k], by the names that `scaled_ragged_dot` takes."""
MATRIX_BLOCKS = Scaling((BLOCK, BLOCK), "128x128")
COLUMNS = Scaling((None, 1), "kx1")
GROUP = Scaling((None, None), "group")
"""One scale for each matrix of rhs [g, k, n]."""
IN_BLOCKS = dict(lhs_scaling=ROW_BLOCKS, rhs_scaling=MATRIX_BLOCKS)
"""The scales of recipes, as parameters of a product."""
TRANSPOSED_BLOCKS, TRANSPOSED_COLUMNS = Scaling((BLOCK, 1), "1x128"), Scaling((None, 1), "column")
"""Scales of rows [m, k] in transposed blocks, whose products contract m."""


def transposed_scaling(scale: Any) -> Scaling:
    """Returns how rows in transposed blocks are scaled: by block and column, or by column."""
    return TRANSPOSED_COLUMNS if scale.shape[-2] == 1 else TRANSPOSED_BLOCKS


COLUMN_ROWS = 256
"""Rows of a block of `column_maxima`, which computes the maximum of each column of a block."""


class Scaled(NamedTuple):
    """An FP8 operand and its scales."""

    values: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledView:
    """An FP8 operand that is a part of a larger array, and its scales.

    Attributes:
      values: a flat array.
      scales: scales of the operand alone.
      view: the operand's first element in `values`, and its shape.
    """

    values: jax.Array
    scales: jax.Array
    view: Shape = dataclasses.field(metadata=dict(static=True))


def split_e5m2(x: jax.Array) -> tuple[tuple[jax.Array, float], ...]:
    """Returns two arrays of float8_e4m3fn and a factor for each, whose products add up to `x`.

    The sum is exact for all finite values: float8_e4m3fn holds the two mantissa bits of float8_e5m2
    over 16 powers of two, from 2^-7 on, and `x` has 32 of them, from 2^-16 on. Infinities become
    NaN.
    """
    values = x.astype(jnp.float32)
    is_large = jnp.abs(values) >= 1
    return tuple(
        ((jnp.where(belongs, values, 0) / factor).astype(jnp.float8_e4m3fn), factor)
        for belongs, factor in ((is_large, 2.0**7), (~is_large, 2.0**-9))
    )


VIEWED_ROWS, VIEWED_RHS = 0, 2
"""The index of the operand that may be a view: in a product of rows by weights, and in a product of
rows by rows. See `csrc/ffi/module.cc`."""


def view_of(flat: jax.Array, view: Shape) -> jax.Array:
    """Returns the part of `flat` that `view` of a `ScaledView` describes."""
    first, *shape = view
    return flat[first : first + math.prod(shape)].reshape(shape)


def viewed(operands: Sequence[Any], operand: int, view: Shape) -> tuple[Any, ...]:
    """Returns `operands` (arrays, avals) with the part `view`, if any, in place of a flat array."""
    if not view:
        return tuple(operands)
    flat, shape = operands[operand], view[1:]
    if isinstance(flat, jax.Array):
        found = view_of(flat, view)
    else:
        whole = NamedSharding(flat.sharding.mesh, PartitionSpec(*[None] * len(shape)))
        found = flat.update(shape=shape, sharding=whole)
    return (*operands[:operand], found, *operands[operand + 1 :])


def row_blocks(m: int, num_groups: int) -> int:
    """Returns the most blocks that `m` rows in groups need, each of 128 rows of one group."""
    # `min` needs static sizes. Without them, num_groups is an upper bound.
    partial = min(num_groups, m) if is_static(m, num_groups) else num_groups
    return cdiv(m, BLOCK) + partial


def quantized_rows(rows: int, cols: int) -> tuple[Shape, Shape]:
    """Returns the shapes of values and scales of rows in blocks of 1 x 128."""
    return (rows, cols), (rows, cdiv(cols, BLOCK))


def quantized_blocks(g: int, rows: int, cols: int) -> tuple[Shape, Shape]:
    """Returns the shapes of values and scales of matrices in blocks of 128 x 128."""
    return (g, rows, cols), (g, cdiv(rows, BLOCK), cdiv(cols, BLOCK))


def letters_of_blocks(
    *, plain: bool, transposed: bool, joined: bool
) -> tuple[list[str], frozenset[str], dict[str, str]]:
    """Names the dimensions of matrices "kn" in blocks of 128 x 128, as `partition.Dims` does.

    Returns:
      The letters of values and scales in the forms asked for, plain and transposed; the letters of
      dimensions that are not split, such as joined columns; and, for each letter that counts
      blocks, the letter of the elements in the blocks.
    """
    n, r = ("p", "s") if joined else ("n", "r")
    forms = ["k" + n, "q" + r] * plain + [n + "k", r + "q"] * transposed
    if joined:
        return forms, frozenset("nps"), {"q": "k"}
    return forms, frozenset(), {"q": "k", "r": "n"}


def quantized_groups(m: int, cols: int, num_groups: int) -> tuple[Shape, Shape]:
    """Returns the shapes of values and scales of rows in transposed blocks of one group each."""
    blocks = row_blocks(m, num_groups)
    return (blocks, cols, BLOCK), (blocks, cols)


def checked_fp8_dtype(name: str, dtype: DTypeLike) -> np.dtype:
    """Returns `dtype` if kernels know it as an FP8 dtype; raises a `TypeError` otherwise."""
    dtype = canonical_dtype(name, dtype)
    if dtype not in FP8_DTYPES:
        raise TypeError(f"{name} must be float8_e4m3fn or float8_e5m2, got {dtype}")
    return dtype
