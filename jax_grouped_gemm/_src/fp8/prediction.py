"""Predicts whether bf16 is faster than a recipe, for a whole layer or a single matmul.

Products in FP8 take about half the time of products in 16 bits, but quantising operands takes time
too. Quantising weights pays if experts have enough rows; quantising rows pays if matrices are large
enough. XLA pads FP8 rows that are no multiple of 16 bytes before each product. So a recipe computes
in bf16 where that is predicted to be faster. Predictions differ for training and for the forward
pass alone, and for weights that are quantised in the call and before it.

Times are sums of terms, as in `_src/fallback.py`. Their coefficients are in `fallback.json`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_grouped_gemm._src.arrays import cdiv, is_static, round_up
from jax_grouped_gemm._src.device import H200
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.plan import DEFAULT_TILE, TMA_ALIGNMENT_BYTES

KIND = "recipe"
"""The name of the coefficients in `fallback.json`."""

SOURCE_ALIGNMENT, BY_ELEMENTS = 8, 4
"""16-bit elements that the quantiser loads at once. If columns are no multiple of this number, the
quantiser loads and stores single elements, and takes BY_ELEMENTS times as long as a copy."""

TERMS = ("launch", "rows", "gradients", "wave", "moved", "weights", "unaligned")


@dataclasses.dataclass
class Cost:
    """The terms of a computation's time on an H200, which `fallback.seconds` adds up.

    Attributes:
      given: whether weights are quantised before the call.
      terms: the seconds of each term, without its coefficient. "launch" has a microsecond for each
        kernel, and "wave" one for each tile that a multiprocessor computes. "rows" and "gradients"
        are the time of the tensor cores for products of rows and for weight gradients. "moved" is
        the time of reading and writing outside products, "weights" that of reading and writing to
        quantise weights, and "unaligned" that of padding arrays whose FP8 rows are no multiple of
        16 bytes.
    """

    given: bool = False
    terms: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(TERMS, 0.0))

    def move(self, num_bytes: float, launches: int = 1) -> None:
        """Adds kernels that move bytes."""
        self.terms["moved"] += num_bytes / H200.rates.bandwidth
        self.terms["launch"] += 1e-6 * launches

    def quantize_weights(self, g: int, k: int, n: int, bytes_each: int) -> None:
        """Adds the quantiser of g matrices [k, n] if the call quantises them."""
        if self.given:
            return
        seconds = g * k * n * bytes_each / H200.rates.bandwidth
        if k % TMA_ALIGNMENT_BYTES or n % SOURCE_ALIGNMENT:
            self.terms["unaligned"] += seconds * BY_ELEMENTS
        else:
            self.terms["weights"] += seconds
        self.terms["launch"] += 1e-6

    def multiply(self, g: int, m: int, k: int, n: int, itemsize: int) -> None:
        """Adds a product of m rows by g matrices [k, n]."""
        visited = min(g, m)
        # The last tile of a group is half full on average.
        tiles = (m / BLOCK + visited / 2) * cdiv(n, DEFAULT_TILE.tile_n)
        moved = itemsize * (m * k + visited * k * n) + 2 * m * n
        self.terms["rows"] += self._product(tiles, k, moved, itemsize)
        if itemsize == 1 and k % TMA_ALIGNMENT_BYTES:
            self.terms["unaligned"] += 2 * (m * k + g * k * n) / H200.rates.bandwidth
            self.terms["launch"] += 2e-6

    def contract(self, g: int, m: int, k: int, n: int, itemsize: int) -> None:
        """Adds the gradient of g matrices [k, n] by m rows."""
        tiles = g * cdiv(k, DEFAULT_TILE.tile_m) * cdiv(n, DEFAULT_TILE.tile_n)
        moved = itemsize * m * (k + n) + 2 * g * k * n
        # Groups in FP8 are whole blocks; half of the last block is zeros on average.
        depth = m / g + (BLOCK / 2 if itemsize == 1 else 0)
        self.terms["gradients"] += self._product(tiles, depth, moved, itemsize)

    def _product(self, tiles: float, depth: float, moved: float, itemsize: int) -> float:
        waves = max(tiles / H200.multiprocessors, 1)
        self.terms["wave"] += 1e-6 * waves
        self.terms["launch"] += 1e-6
        steps = round_up(math.ceil(depth), BLOCK // itemsize)
        area = DEFAULT_TILE.tile_m * DEFAULT_TILE.tile_n
        multiply_adds = waves * H200.multiprocessors * area * steps
        rate = H200.multiply_adds(np.dtype(np.int8 if itemsize == 1 else np.float16))
        return max(multiply_adds / rate, moved / H200.rates.bandwidth)


ONCE, CAST = 3, 6
"""Bytes moved to quantise a 16-bit element, and to round a float32 element to 16 bits. For weights
quantised before the call, XLA removes the rounding unless something reads the rounded weights."""


@dataclasses.dataclass(frozen=True)
class Dot:
    """A ragged matmul: m rows by g matrices [k, n]."""

    g: int
    m: int
    k: int
    n: int

    @classmethod
    def of(cls, rows: Any, matrices: Sequence[Any], groups: Any) -> Dot:
        """Describes the matmul of the local `matrices` [g, k, n] with their share of all rows."""
        g, k, n = matrices
        return cls(g, rows * g // groups if is_static(rows, groups) and groups else 0, k, n)

    def __str__(self) -> str:
        return f"a matmul of {self.m} rows, {self.k} by {self.n}, {self.g} groups"

    @property
    def is_known(self) -> bool:
        """Whether sizes are numbers, and there is something to compute."""
        sizes = self.g, self.m, self.k, self.n
        return is_static(*sizes) and 0 not in sizes

    def in_fp8(self, recipe: Recipe, cost: Cost, *, training: bool) -> None:
        """Adds the parts of `fp8_ragged_dot`."""
        g, m, k, n = self.g, self.m, self.k, self.n
        forward, wgrad = recipe.forward == "fp8", training and recipe.wgrad == "fp8"
        dgrad = training and recipe.dgrad == "fp8"
        for columns, plain in ((k, forward), (n, dgrad)):
            if plain or wgrad:
                cost.move(m * columns * (ONCE + (plain and wgrad)))
        if forward or dgrad:
            cost.quantize_weights(g, k, n, ONCE + (forward and dgrad))
        if not forward or (training and not dgrad):
            cost.move(CAST * cost.given * g * k * n, launches=cost.given)
        cost.multiply(g, m, k, n, 1 if forward else 2)
        if training:
            cost.multiply(g, m, n, k, 1 if dgrad else 2)
            cost.contract(g, m, k, n, 1 if wgrad else 2)

    def in_bf16(self, cost: Cost, *, training: bool) -> None:
        """Adds the parts of `ragged_dot`."""
        self.in_fp8(Recipe("bf16", "bf16", "bf16"), cost, training=training)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The MLPs of experts.

    Attributes:
      g: experts.
      m: rows.
      tokens: number of tokens that rows are copies of, 0 if rows are no copies.
      embed: columns of a row.
      hidden: columns of a hidden layer.
      projections: 2 for gate and up, 1 for gate alone.
      has_down: whether there is a down projection.
    """

    g: int
    m: int
    tokens: int
    embed: int
    hidden: int
    projections: int = 2
    has_down: bool = True

    def __str__(self) -> str:
        return f"a layer of {self.m} rows, D {self.embed}, F {self.hidden}, {self.g} experts"

    @property
    def is_known(self) -> bool:
        """See `Dot.is_known`."""
        return is_static(self.tokens) and Dot(self.g, self.m, self.embed, self.hidden).is_known

    def in_fp8(self, recipe: Recipe, cost: Cost, *, training: bool) -> None:
        """Adds the parts of a layer with a recipe."""
        if (recipe.forward, recipe.dgrad) != ("fp8", "fp8"):
            return self._composed(recipe, cost, training=training)
        g, m, d, f = self.g, self.m, self.embed, self.hidden
        both = self.projections * round_up(f, BLOCK)
        each = ONCE + training
        for _ in range(self.projections):
            cost.quantize_weights(g, d, f, each)
        self._quantize_rows(cost)
        cost.multiply(g, m, d, both, 1)
        if self.has_down:
            cost.quantize_weights(g, f, d, each)
            cost.move(m * (2 * both + f))
            cost.multiply(g, m, f, d, 1)
            self._add_up(cost)
        if not training:
            return
        wgrad = 1 if recipe.wgrad == "fp8" else 2
        if self.has_down:
            self._quantize_rows(cost)
            cost.multiply(g, m, d, f, 1)
        cost.move(m * (2 * (both + f) + both + wgrad * (both + f)))
        cost.multiply(g, m, both, d, 1)
        self._add_up(cost)
        for _ in range(1 + self.has_down):  # x, and the gradient of the result
            cost.move(2 * wgrad * m * d)
            if wgrad == 1:
                cost.move(2 * (self.tokens or m) * d)
        self._gradients(wgrad, cost)

    def in_bf16(self, cost: Cost, *, training: bool) -> None:
        """Adds the parts of a layer without a recipe."""
        g, m, d, f = self.g, self.m, self.embed, self.hidden
        both = self.projections * round_up(f, BLOCK)
        casts = cost.given * (self.projections + self.has_down)
        cost.move(CAST * casts * g * d * f, launches=casts)
        self._copy(cost)
        cost.multiply(g, m, d, both, 2)
        cost.move(2 * m * (f + both * training), launches=0)
        if self.has_down:
            cost.multiply(g, m, f, d, 2)
            self._add_up(cost)
        if not training:
            return
        if self.has_down:
            self._copy(cost)
            cost.multiply(g, m, d, f, 2)
        cost.move(2 * m * (2 * both + f), launches=0)
        cost.multiply(g, m, both, d, 2)
        self._add_up(cost)
        self._copy(cost)
        self._gradients(2, cost)

    def _composed(self, recipe: Recipe, cost: Cost, *, training: bool) -> None:
        g, m, d, f = self.g, self.m, self.embed, self.hidden
        self._copy(cost)
        for _ in range(self.projections):
            Dot(g, m, d, f).in_fp8(recipe, cost, training=training)
        passes = 1 + 2 * training
        cost.move(2 * m * f * (self.projections + 1) * passes, launches=passes)
        if self.has_down:
            Dot(g, m, f, d).in_fp8(recipe, cost, training=training)
            for _ in range(1 + training):
                self._add_up(cost)
        if training:
            self._copy(cost)
            cost.move(2 * m * d * 3 * (self.projections - 1))

    def _quantize_rows(self, cost: Cost) -> None:
        cost.move(ONCE * (self.tokens or self.m) * self.embed)
        if self.tokens:
            cost.move(2 * self.m * self.embed, launches=2)

    def _copy(self, cost: Cost) -> None:
        if self.tokens:
            cost.move(4 * self.m * self.embed)

    def _add_up(self, cost: Cost) -> None:
        if self.tokens:
            cost.move(2 * (self.m + self.tokens) * self.embed)

    def _gradients(self, itemsize: int, cost: Cost) -> None:
        for _ in range(self.projections + self.has_down):
            cost.contract(self.g, self.m, self.embed, self.hidden, itemsize)
