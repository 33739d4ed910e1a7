"""Tells whether a kernel of a layer sorts its few tokens, and computes layers in both ways."""

from __future__ import annotations

import functools

import jax
import pytest

from jax_grouped_gemm._src.mlp.decode import plan


class Decoding:
    """Layers whose tokens a kernel of the primitive `name` sorts, if it can."""

    def __init__(self, name: str):
        self._name = name

    def is_decoded(self, function, *arguments) -> bool:
        # Trace a new function, because JAX caches traces of functions.
        traced = jax.make_jaxpr(lambda *given: function(*given))(*arguments)
        return f"{self._name}[" in str(traced)

    def decoded(self, function, *arguments):
        assert self.is_decoded(function, *arguments)
        return _jitted(function, plan.MOST_PAIRS)(*arguments)

    def sorted_before(self, function, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "MOST_PAIRS", 0)
            assert not self.is_decoded(function, *arguments)
            return _jitted(function, plan.MOST_PAIRS)(*arguments)


@functools.cache
def _jitted(function, most_pairs: int):
    """Returns a new function, because JAX caches traces, for this value of `plan.MOST_PAIRS`."""
    return jax.jit(lambda *given: function(*given))
