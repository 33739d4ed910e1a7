"""Products of lists of matrices through the public API, and their exact results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from tests.support import oracle
from tests.support.ops import random, swap

LAYOUTS = list(product((False, True), repeat=2))
FORMS = pytest.mark.parametrize("transpose_lhs, transpose_rhs", LAYOUTS)
# The list of four problems in CUTLASS's notes on its grouped schedulers, as (m, k, n).
FOUR_PROBLEMS = [(1152, 128, 768), (1152, 1024, 768), (768, 128, 1152), (768, 1024, 1152)]


@dataclass(frozen=True)
class List:
    """The operands of one call. `transposes` says how matrices are stored."""

    lhs: list[np.ndarray]
    rhs: list[np.ndarray]
    c: list[np.ndarray] | None
    alpha: Any = 1.0
    beta: Any = 0.0
    transposes: dict[str, list[bool]] = field(default_factory=dict)

    def __call__(self, **options) -> list[jax.Array]:
        """Calls grouped_gemm under jit, so that operands are arguments of the program."""

        scales = {"alpha": self.alpha} | ({} if self.c is None else {"beta": self.beta})

        def call(lhs, rhs, c):
            return jgg.grouped_gemm(lhs, rhs, c, **scales, **self.transposes, **options)

        return jax.jit(call)(self.lhs, self.rhs, self.c)

    def check(self, outs, **options) -> None:
        """Asserts that results are exact up to an accumulation in float32 and one rounding."""
        assert len(outs) == len(self.lhs)
        for i, out in enumerate(outs):
            self.check_one(i, out, **options)

    def check_one(self, i: int, out, **options) -> None:
        """Asserts that result i is right."""
        exact = self.exact(i)
        assert out.shape == exact.value.shape
        if out.size:
            oracle.check(out, exact, **options)

    def check_double(self, outs) -> None:
        """Asserts that results were accumulated in float64 and rounded to their dtype."""
        assert len(outs) == len(self.lhs)
        for i, out in enumerate(outs):
            exact = self.exact(i)
            assert out.shape == exact.value.shape
            unit, rounding = np.finfo(np.float64).eps / 2, np.finfo(out.dtype).eps / 2
            error = np.abs(np.asarray(out) - exact.value)
            allowed = 2 * rounding * np.abs(exact.value) + 4 * unit * exact.depth * exact.magnitude
            assert (error <= allowed).all()
            # Errors of the result and of the exact value have random signs and add up to less.
            if out.size >= 512:
                allowed = rounding + 4 * unit * (2 + np.sqrt(exact.depth.flat[0]))
                assert np.linalg.norm(error) <= allowed * np.linalg.norm(exact.value)

    def num_results(self) -> int:
        """Returns the number of elements of all results."""
        sizes = (
            math.prod(swapped(lhs.shape, self._is_swapped("transpose_lhs", i))[:-1])
            * swapped(rhs.shape, self._is_swapped("transpose_rhs", i))[-1]
            for i, (lhs, rhs) in enumerate(zip(self.lhs, self.rhs, strict=True))
        )
        return sum(sizes)

    def _is_swapped(self, name: str, i: int) -> bool:
        return name in self.transposes and self.transposes[name][i]

    def exact(self, i: int) -> oracle.Exact:
        """Returns result i in float64 or complex128."""
        wide = np.complex128 if np.iscomplexobj(self.lhs[i]) else np.float64
        lhs, rhs = (
            np.asarray(swap(x, self._is_swapped(name, i))).astype(wide)
            for name, x in (("transpose_lhs", self.lhs[i]), ("transpose_rhs", self.rhs[i]))
        )
        alpha, beta = (_scale(x, i, wide) for x in (self.alpha, self.beta))
        value, magnitude = alpha * (lhs @ rhs), np.abs(alpha) * (np.abs(lhs) @ np.abs(rhs))
        if self.c is not None:
            c = np.where(beta == 0, 0, np.asarray(self.c[i]).astype(wide))
            value, magnitude = value + beta * c, magnitude + np.abs(beta * c)
        # Errors of few elements do not average out.
        blocks = [...] if value.size >= 512 else []
        return oracle.Exact(value, magnitude, np.full(value.shape, lhs.shape[-1] + 2.0), blocks)


def _scale(scale, i: int, dtype) -> np.ndarray:
    scale = np.asarray(scale[i] if isinstance(scale, Sequence) else scale, dtype)
    return scale.reshape(-1, 1, 1) if scale.ndim else scale


def random_list(
    rng: np.random.Generator,
    shapes,
    dtype,
    *,
    c_dtype=None,
    transpose_lhs=False,
    transpose_rhs=False,
    **scales,
) -> List:
    """Returns random operands for products of (m, k, n) or (g, m, k, n).

    Args:
      rng: draws the operands.
      shapes: the shapes of the products.
      dtype: the dtype of lhs and rhs.
      c_dtype: the dtype of c. If it is None, there is no c.
      transpose_lhs: how matrices of lhs are stored, for all matrices or for each.
      transpose_rhs: how matrices of rhs are stored.
      **scales: alpha and beta.
    """
    transposes = {
        name: [x] * len(shapes) if isinstance(x, bool) else list(x)
        for name, x in (("transpose_lhs", transpose_lhs), ("transpose_rhs", transpose_rhs))
    }
    lhs, rhs, c = [], [], []
    for i, (*g, m, k, n) in enumerate(shapes):
        lhs.append(draw(rng, swapped((*g, m, k), transposes["transpose_lhs"][i]), dtype))
        rhs.append(draw(rng, swapped((*g, k, n), transposes["transpose_rhs"][i]), dtype))
        c.append(draw(rng, (*g, m, n), c_dtype or dtype))
    return List(lhs, rhs, c if c_dtype else None, transposes=transposes, **scales)


def draw(rng: np.random.Generator, shape, dtype) -> np.ndarray:
    """Returns normal values in all digits of `dtype`, with imaginary parts if it is complex."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.standard_normal(shape) if dtype == np.float64 else random(rng, shape, dtype)


def swapped(shape, transpose: bool):
    """Returns a shape, with its last two dimensions exchanged if `transpose`."""
    return (*shape[:-2], shape[-1], shape[-2]) if transpose else tuple(shape)


def cutlass_like(rng: np.random.Generator, count: int, multiple: int = 8) -> list[tuple[int, ...]]:
    """Returns unequal problems as in CUTLASS's tests, with sides of 24 to 24 + 63 `multiple`."""
    return [tuple(int(x) for x in multiple * rng.integers(0, 64, 3) + 24) for _ in range(count)]


def any_list(rng: np.random.Generator, count: int, multiple: int, dtype, **scales) -> List:
    """Returns a list of all layouts, with stacks, empty problems and c, as in CUTLASS's tests.

    Args:
      rng: draws the operands.
      count: the number of problems.
      multiple: see `cutlass_like`.
      dtype: the dtype of all operands.
      **scales: alpha and beta.
    """
    shapes = cutlass_like(rng, count, multiple)
    if count > 20:
        shapes[2], shapes[5], shapes[7] = (0, 8, 16), (40, 0, 24), (16, 8, 0)
        shapes[11] = (3, *shapes[11])
    layouts = rng.integers(0, 2, (2, count)).astype(bool)
    return random_list(
        rng,
        shapes,
        dtype,
        c_dtype=dtype,
        transpose_lhs=layouts[0].tolist(),
        transpose_rhs=layouts[1].tolist(),
        **scales,
    )


def mixed_layouts(count: int) -> dict[str, list[bool]]:
    """Returns transposes for `count` problems that take every layout in turn."""
    cycle = [LAYOUTS[i % 4] for i in range(count)]
    return dict(transpose_lhs=[a for a, _ in cycle], transpose_rhs=[b for _, b in cycle])
