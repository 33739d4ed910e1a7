"""Sums of tangents, of which some may be symbolically zero."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is zero without there being an array for it."""
    return type(tangent) is ad.Zero


def tangent_of(out: jax.Array, terms: Sequence[jax.Array]) -> Any:
    """The tangent of `out` that is the sum of `terms`, symbolically zero without any."""
    if not terms:
        return ad.Zero(jax.typeof(out).to_tangent_aval())
    return functools.reduce(ad.add_tangents, terms)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def once_differentiable(function: str, operands: Any) -> Any:
    """`operands` of the backward pass of `function`, which is not differentiated again."""
    return operands


@once_differentiable.defjvp
def _once_differentiable_jvp(function, primals, tangents):
    raise NotImplementedError(
        f"{function} is differentiable once: its gradients are products of quantised operands, "
        "which have no derivative. Stop the gradient of what is differentiated twice, or compute "
        "that without a recipe."
    )
