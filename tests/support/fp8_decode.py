"""FP8 layers of few tokens: their operands, and whether a kernel sorts their tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import moe
from jax_grouped_gemm._src.mlp.decode import plan

BF16, F32 = jnp.bfloat16, jnp.float32
T, D, F, E, TOP = 12, 128, 208, 8, 2


def operands(rng, recipe=None):
    """Returns tokens, logits, the three matrices, and what `quantize_mlp` makes of them."""

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.5, BF16)

    matrices = draw(E, D, F), draw(E, D, F), draw(E, F, D)
    quantized = jgg.quantize_mlp(*matrices, recipe or jgg.Recipe())
    return [draw(T, D), jnp.asarray(rng.standard_normal((T, E)), F32), *matrices, quantized]


def layer(x, logits, wi_0, wi_1, wo, quantized, *, recipe=None, top_k=TOP, **options):
    options |= dict(recipe=recipe or jgg.Recipe(), quantized=quantized)
    return moe.dropless_mlp(x, moe.route(logits, top_k), wi_0, wi_1, wo, **options)


def of_arrays(x, logits, *arrays, **options):
    """Computes the layer of `QuantizedArray`s."""
    options = dict(recipe=jgg.Recipe()) | options
    return moe.dropless_mlp(x, moe.route(logits, TOP), *arrays, **options)


def is_decoded(function, *arguments) -> bool:
    # Trace a new function, because JAX caches traces of functions.
    traced = jax.make_jaxpr(lambda *given: function(*given))(*arguments)
    return "decode_fp8_mlp[" in str(traced)


@functools.cache
def jitted(function, most_pairs: int):
    """Returns a new function, because JAX caches traces, for this value of `plan.MOST_PAIRS`."""
    return jax.jit(lambda *given: function(*given))


def decoded(function, *arguments):
    assert is_decoded(function, *arguments)
    return jitted(function, plan.MOST_PAIRS)(*arguments)


def sorted_before(function, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MOST_PAIRS", 0)
        assert not is_decoded(function, *arguments)
        return jitted(function, plan.MOST_PAIRS)(*arguments)
