"""Optimiser steps in pure JAX, with FP8 weights equal to `quantize_weights` of the new weights.

Float32 results differ from the kernels' by rounding, because a GPU uses fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_grouped_gemm._src.arrays import from_bits, pad_to, round_up, to_bits
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.fp8.quantize.reference import quantize_blocks
from jax_grouped_gemm._src.optimizer.problem import AdamwScalars, Layout

NUM_SCALARS = len(AdamwScalars._fields)


def adamw_step(
    scalars: AdamwScalars, gradient: jax.Array, mean: jax.Array, square: jax.Array, master: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the new mean, square and float32 weights; ignores `scalars.applies`."""
    s = scalars
    g = gradient.astype(jnp.float32) * s.gradient_factor
    new_mean = s.mean_share * g + s.mean_decay * mean.astype(jnp.float32)
    new_square = s.square_share * (g * g) + s.square_decay * square.astype(jnp.float32)
    size = jnp.sqrt(new_square * s.square_factor + s.inner_epsilon) + s.epsilon
    change = (s.mean_rate * new_mean + s.gradient_rate * g) / size
    new_master = master - (change + s.decay * master)
    return new_mean.astype(mean.dtype), new_square.astype(square.dtype), new_master


def adamw_quantized(
    scalars: jax.Array,
    gradient: jax.Array,
    mean: jax.Array,
    square: jax.Array,
    master: jax.Array,
    *forms: jax.Array,
    layout: Layout,
    power_of_two: bool,
) -> list[jax.Array]:
    """Computes one step of AdamW.

    Args:
      scalars: float32 [12], `AdamwScalars`.
      gradient, mean, square: like `master`, bfloat16 or float32.
      master: float32 matrices; see `Layout`.
      forms: values and scales of the old weights, plain and transposed; and a copy in 16 bits.

    Returns:
      mean, square, master and forms after the step, or unchanged if `applies` is zero.
    """
    named = AdamwScalars(*(scalars[i] for i in range(NUM_SCALARS)))
    new = adamw_step(named, gradient, mean, square, master)
    new_forms = _new_forms(layout, new[2], forms, power_of_two)
    return _if(named.applies, [*new, *new_forms], [mean, square, master, *forms])


def apply_and_quantize(
    applies: jax.Array,
    update: jax.Array,
    master: jax.Array,
    *forms: jax.Array,
    layout: Layout,
    power_of_two: bool,
) -> list[jax.Array]:
    """Returns `master` + `update` and its forms, or the old arrays if `applies`, float32 [1], is 0.

    For the operands, see `adamw_quantized`.
    """
    new = master + update.astype(jnp.float32)
    new_forms = _new_forms(layout, new, forms, power_of_two)
    return _if(applies[0], [new, *new_forms], [master, *forms])


def _if(applies: jax.Array, new: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
    def choose(a, b):
        return from_bits(jnp.where(applies != 0, to_bits(a), to_bits(b)), b.dtype)

    return list(map(choose, new, old))


def _new_forms(
    layout: Layout, master: jax.Array, forms: Sequence[jax.Array], power_of_two: bool
) -> list[jax.Array]:
    dtype = np.dtype(next(x.dtype for x in forms if x.dtype.itemsize == 1))
    matrices = master.reshape(layout.flat(master))
    if layout.is_joined:
        g, k, n = matrices.shape
        matrices = pad_to(matrices, (g, k, round_up(n, BLOCK)))
    new = quantize_blocks(
        matrices,
        dtype=dtype,
        power_of_two=power_of_two,
        plain=layout.plain,
        transposed=layout.transposed,
    )
    columns = [2, 2] * layout.plain + [1, 1] * layout.transposed
    quantized = forms[: len(new)]
    wanted = layout.forms(master, dtype)
    results = [
        _placed(layout, old.reshape(like.shape), x, axis).reshape(old.shape)
        for old, like, x, axis in zip(quantized, wanted, new, columns, strict=True)
    ]
    return [*results, *(master.astype(x.dtype) for x in forms[len(new) :])]


def _placed(layout: Layout, old: jax.Array, part: jax.Array, axis: int) -> jax.Array:
    """Returns `old` with `part` in the columns of its stack; see `Layout`."""
    if not layout.is_joined:
        return part
    start = layout.part * part.shape[axis]
    found = lax.dynamic_update_slice_in_dim(to_bits(old), to_bits(part), start, axis)
    return from_bits(found, old.dtype)
