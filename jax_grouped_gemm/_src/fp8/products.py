"""The three products of a ragged matmul with a recipe, and the quantised operands of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.fp8.formats import IN_BLOCKS, Scaled, ScaledView
from jax_grouped_gemm._src.fp8.quantize import primitive as quantizers
from jax_grouped_gemm._src.fp8.recipe import Recipe
from jax_grouped_gemm._src.fp8.scaled import primitive as scaled
from jax_grouped_gemm._src.plan import Product
from jax_grouped_gemm._src.ragged import primitive as ragged
from jax_grouped_gemm._src.tile_choices import TileChoices

FP8_LHS, FP8_RHS = "fp8_lhs", "fp8_rhs"
"""The names of quantised operands that backward passes keep."""


@dataclasses.dataclass(frozen=True)
class Fp8Products:
    """The static parameters that a call's products share."""

    recipe: Recipe
    implementation: Implementation
    tiles: TileChoices

    def quantize_rows(
        self,
        x: jax.Array,
        group_sizes: jax.Array,
        dtype: DTypeLike,
        *,
        plain: bool,
        transposed: bool = False,
    ) -> tuple[Any, Any]:
        """Quantises x [m, k]; returns (plain, transposed), None for a form not asked for."""
        params = self._quantize_params(dtype)
        rows = columns = None
        if transposed:
            *rest, values, scales = quantizers.quantize_ragged(
                x, group_sizes, plain=plain, transposed=True, **params
            )
            columns = Scaled(values, scales)
            rows = Scaled(*rest) if plain else None
        elif plain:
            rows = Scaled(*quantizers.quantize_rows(x, **params))
        return rows, columns

    def quantize_weights(self, x: jax.Array, *, plain: bool, transposed: bool) -> tuple[Any, Any]:
        """Quantises x [g, k, n]; returns (plain, transposed), None for a form not asked for."""
        if not (plain or transposed):
            return None, None
        forms = dict(plain=plain, transposed=transposed)
        params = self._quantize_params(self.recipe.forward_dtype)
        return _in_forms(quantizers.quantize_blocks, x, **forms, **params)

    def quantize_joined(
        self, x: jax.Array, y: jax.Array, *, plain: bool, transposed: bool
    ) -> tuple[Any, Any]:
        """Quantises x and y [g, k, n] side by side, as `quantize_weights` does. Zeros fill up
        x and y to multiples of 128 columns."""
        forms = dict(plain=plain, transposed=transposed)
        params = self._quantize_params(self.recipe.forward_dtype)
        return _in_forms(quantizers.quantize_joined, x, y, **forms, **params)

    def _quantize_params(self, dtype: DTypeLike) -> dict[str, Any]:
        return dict(
            dtype=np.dtype(dtype),
            power_of_two=self.recipe.power_of_two_scales,
            implementation=self.implementation,
        )

    def rows_by_weights(
        self,
        which: Product,
        rows: Scaled | ScaledView,
        weights: Scaled,
        group_sizes: jax.Array,
        offset: jax.Array,
        dtype: np.dtype,
    ) -> jax.Array:
        """Multiplies rows [m, k] by weights [g, n, k]: [m, n], for "forward" or "dgrad"."""
        params = self.product_params(which, dtype) | _view(rows)
        operands = (rows.values, rows.scales, *weights, group_sizes, offset)
        return scaled.scaled_ragged_noncontracting(*operands, **params)

    def tokens_by_weights(
        self,
        which: Product,
        tokens: Scaled,
        rows: jax.Array,
        copied: Callable[[], Scaled],
        weights: Scaled,
        group_sizes: jax.Array,
        offset: jax.Array,
        dtype: np.dtype,
    ) -> jax.Array:
        """Computes `rows_by_weights` of the rows `rows` (int32 [m]) of tokens [T, k]. A kernel
        reads them in place, or reads the copies that `copied` returns."""
        params = self.product_params(which, dtype)
        operands = (*tokens, *weights, group_sizes, offset, rows)
        return scaled.gathered_scaled_noncontracting(*operands, copied=copied, **params)

    def product_params(self, which: Product, dtype: np.dtype) -> dict[str, Any]:
        """Returns the parameters of a product of rows with results of `dtype`."""
        return dict(
            transpose_rhs=True,
            **IN_BLOCKS,
            fast_accumulation=False,
            preferred_element_type=dtype,
            implementation=self.implementation,
            **self.tiles.params(which),
        )

    def rows_by_rows(
        self,
        lhs: Scaled | jax.Array,
        rhs: Scaled | ScaledView | jax.Array,
        group_sizes: jax.Array,
        offset: jax.Array,
        dtype: np.dtype,
        *,
        num_rows: int,
        num_groups: int,
    ) -> jax.Array:
        """Returns the cotangent of weights [g, k, n], from transposed blocks [b, k, 128] and
        [b, n, 128], or from rows [m, k] and [m, n] of one 16-bit dtype."""
        common = self._wgrad_params(dtype, num_groups)
        if isinstance(lhs, Scaled):
            assert isinstance(rhs, Scaled | ScaledView)
            return scaled.scaled_ragged_contracting(
                lhs.values,
                lhs.scales,
                rhs.values,
                rhs.scales,
                group_sizes,
                offset,
                num_rows=num_rows,
                **common,
                **_view(rhs),
            )
        assert isinstance(rhs, jax.Array)
        return ragged.ragged_contracting(
            lhs,
            rhs.astype(lhs.dtype),
            group_sizes,
            offset,
            transpose_lhs=False,
            transpose_rhs=False,
            precision=None,
            **common,
        )

    def rows_by_each(
        self,
        lhs: Scaled,
        rhs: Sequence[Scaled],
        group_sizes: jax.Array,
        offset: jax.Array,
        dtype: np.dtype,
        *,
        num_rows: int,
        num_groups: int,
    ) -> list[jax.Array]:
        """Computes `rows_by_rows` of lhs and each of two rhs of the same shape."""
        first, second = rhs
        params = dict(self._wgrad_params(dtype, num_groups), num_rows=num_rows)
        return scaled.paired_scaled_contracting(
            *lhs, *first, *second, group_sizes, offset, **params
        )

    def _wgrad_params(self, dtype: np.dtype, num_groups: int) -> dict[str, Any]:
        return dict(
            num_groups=num_groups,
            preferred_element_type=dtype,
            implementation=self.implementation,
            **self.tiles.params("wgrad"),
        )


def _view(x: Scaled | ScaledView) -> dict[str, Any]:
    return dict(view=x.view) if isinstance(x, ScaledView) else {}


def _in_forms(quantize, *operands, plain, transposed, **params):
    results = quantize(*operands, plain=plain, transposed=transposed, **params)
    forms = iter(Scaled(*results[i : i + 2]) for i in range(0, len(results), 2))
    return next(forms) if plain else None, next(forms) if transposed else None


def named(operands: Any, name: str) -> Any:
    """Names quantised operands, so that a policy of `jax.checkpoint` may save them.

    They are saved as bytes, because JAX's reduce_precision turns float8_e4m3fn into NaN for
    every number from 256 on.
    """

    def of(x):
        if x.dtype.itemsize > 1:
            return checkpoint_name(x, name)
        octets = checkpoint_name(lax.bitcast_convert_type(x, jnp.uint8), name)
        return lax.bitcast_convert_type(octets, x.dtype)

    return jax.tree.map(of, operands)


def in_16_bits(x: jax.Array) -> jax.Array:
    """Returns `x` as an operand of a product in "bf16"."""
    return x if x.dtype.itemsize == 2 else x.astype(jnp.bfloat16)
