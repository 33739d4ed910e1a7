"""The problem of one step of an optimiser: matrices and their FP8 forms, which may be joined."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_grouped_gemm._src.fp8.formats import BLOCK, Shape


class AdamwScalars(NamedTuple):
    """The scalars of one step of AdamW, in the order of `AdamwScalars` in csrc/optimizer/update.h.

    With g = gradient_factor * gradient,

        mean = mean_share * g + mean_decay * mean
        square = square_share * g^2 + square_decay * square
        size = sqrt(square_factor * square + inner_epsilon) + epsilon
        master -= (mean_rate * mean + gradient_rate * g) / size + decay * master

    If `applies` is zero, nothing changes.
    """

    applies: Any
    gradient_factor: Any
    mean_decay: Any
    mean_share: Any
    square_decay: Any
    square_share: Any
    square_factor: Any
    inner_epsilon: Any
    epsilon: Any
    mean_rate: Any
    gradient_rate: Any
    decay: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a step's weights and their forms lie in its operands.

    Weights are stacks of matrices [..., k, n]. Their forms have the columns of `parts` such stacks
    next to each other. If there are several stacks, each is padded to whole blocks of columns.

    Attributes:
      plain: whether forms include values [..., k, n] and scales [..., k / 128, n / 128].
      transposed: whether forms include values [..., n, k] and scales [..., n / 128, k / 128].
      copied: whether there is a copy of the matrices in 16 bits.
      part, parts: index of this stack, and number of stacks.
    """

    plain: bool
    transposed: bool
    copied: bool
    part: int
    parts: int

    @property
    def is_joined(self) -> bool:
        """Whether forms have several parts."""
        return self.parts > 1

    def flat(self, master: Any) -> Shape:
        """Returns the shape [matrices, k, n] of `master`, its leading dimensions merged."""
        *leading, k, n = master.shape
        return math.prod(leading), k, n

    def forms(self, master: Any, dtype: np.dtype) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the forms that the custom call takes for `master`."""
        g, k, n = self.flat(master)
        rows, blocks = -(-k // BLOCK), -(-n // BLOCK)
        pitch = self.parts * blocks * BLOCK if self.is_joined else n
        f32, across = np.dtype(np.float32), self.parts * blocks
        shapes: list[tuple[Shape, np.dtype]] = []
        if self.plain:
            shapes += [((g, k, pitch), dtype), ((g, rows, across), f32)]
        if self.transposed:
            shapes += [((g, pitch, k), dtype), ((g, across, rows), f32)]
        return [jax.ShapeDtypeStruct(*shape) for shape in shapes]


@dataclasses.dataclass(frozen=True)
class UpdateProblem:
    """Static description of one step of an optimiser.

    Attributes:
      op: name of the primitive.
      shape: [matrices, k, n].
      dtypes: dtypes of the gradient or update, and of the moments if there are any.
      dtype: dtype of the FP8 weights.
      layout: layout of the operands.
      power_of_two: whether scales are rounded up to powers of two.
    """

    op: str
    shape: Shape
    dtypes: tuple[np.dtype, ...]
    dtype: np.dtype
    layout: Layout
    power_of_two: bool

    def __str__(self) -> str:
        kinds = ", ".join(map(str, self.dtypes))
        return f"{self.op} {list(self.shape)} of {kinds} -> {self.dtype}"
