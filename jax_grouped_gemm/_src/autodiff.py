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
