"""Recipes: the parts of a ragged matmul, or of an MLP, that are computed in FP8."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_grouped_gemm._src.arguments import checked_boolean, checked_choice
from jax_grouped_gemm._src.fp8.formats import checked_fp8_dtype

Precision = Literal["fp8", "bf16"]
Scaling = Literal["blockwise"]

_OTHER_SCALING = (
    "scaling must be 'blockwise', got {!r}: recipes with scales of whole rows or matrices were "
    "slower and no more exact. For such scales, multiply what `quantize` returns for the formats "
    "'fp8_row' and 'fp8_tensor' with `ragged_dot`"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which products of a ragged matmul are computed in FP8, and how operands are quantised.

    Attributes:
      forward: whether the product itself is computed in "fp8" or "bf16".
      dgrad: whether the cotangent of lhs is computed in "fp8" or "bf16".
      wgrad: whether the cotangent of rhs is computed in "fp8" or "bf16". With "bf16" nothing is
        quantised for this product. "bf16" is faster for `fp8_ragged_dot` with short groups: with
        512 rows a group, transposing and quantising operands again takes longer than an FP8 product
        saves. Layers quantise these operands in other kernels, and are faster with "fp8".
      forward_dtype: FP8 dtype of lhs and rhs. e4m3 is more precise than e5m2.
      gradient_dtype: FP8 dtype of the result's cotangent. The range of e4m3 suffices, because each
        block has a scale; e5m2 has more range within a block.
      scaling: which elements share a scale in the forward product and dgrad. The only choice is
        "blockwise": blocks of 1 x 128 of rows and 128 x 128 of weights. In an FP8 wgrad,
        128 rows of one column in a group share a scale. In the wgrad of layers, tokens and the
        gradient of the layer's result have one scale for each column instead. Such a scale covers
        all tokens, including tokens without an expert on this device.
      power_of_two_scales: rounds scales up to powers of two.

    "bf16" products multiply 16-bit operands as they are and round wider ones to bfloat16.

    A call with 16-bit operands may compute in bf16 instead. A layer or an `fp8_ragged_dot` computes
    everything in bf16 if training is predicted to be slower in FP8. A forward pass without
    gradients is computed in bf16 if either is predicted to be slower in FP8: training, or the
    forward pass alone. If a layer gets weights in FP8 too, as `quantized=`, training and the
    forward pass alone are each computed in the precision that is predicted to be faster. `explain`
    says which precision is used. With weights that are given in FP8 only, with `quantized_rhs=` of
    `fp8_ragged_dot`, or with an explicit `implementation`, everything is computed as the recipe
    says.

    The default is the recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
    """

    forward: Precision = "fp8"
    dgrad: Precision = "fp8"
    wgrad: Precision = "fp8"
    forward_dtype: DTypeLike = jnp.float8_e4m3fn
    gradient_dtype: DTypeLike = jnp.float8_e4m3fn
    scaling: Scaling = "blockwise"
    power_of_two_scales: bool = False

    def __post_init__(self):
        for name in ("forward", "dgrad", "wgrad"):
            checked_choice(name, getattr(self, name), get_args(Precision))
        if self.scaling != "blockwise":
            raise ValueError(_OTHER_SCALING.format(self.scaling))
        checked_boolean("power_of_two_scales", self.power_of_two_scales)
        for name in ("forward_dtype", "gradient_dtype"):
            object.__setattr__(self, name, checked_fp8_dtype(name, getattr(self, name)))

    @property
    def weights(self) -> tuple[Any, ...]:
        """The fields on which quantised weights depend."""
        return np.dtype(self.forward_dtype), self.power_of_two_scales

    @classmethod
    def blockwise(cls, **options: Any) -> Recipe:
        """Returns DeepSeek-V3's recipe: a scale for each 1 x 128 block of rows and 128 x 128 block
        of weights."""
        return cls(scaling="blockwise", **options)


def checked_recipe(recipe: Any) -> Recipe:
    """Returns `recipe`; raises a `TypeError` if it is no `Recipe`."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a jax_grouped_gemm.Recipe, got {recipe!r}")
    return recipe
