"""Optimiser steps of weights [..., k, n] and their FP8 forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.optimizer import primitive
from jax_grouped_gemm._src.optimizer.problem import Layout


class Weights(NamedTuple):
    """Matrices [..., k, n], and the other forms of them that a step writes.

    Forms may hold the columns of several matrices next to each other; see `Layout`.
    """

    master: jax.Array  # float32
    forms: tuple[jax.Array, ...]  # values, scales, transposed values, their scales
    copy: jax.Array | None = None  # the master in 16 bits


class Options(NamedTuple):
    """The static parameters of a step."""

    power_of_two: bool
    implementation: Implementation
    part: int = 0  # index of this matrix in joined forms
    parts: int = 1  # number of matrices in joined forms


def adamw(
    scalars: jax.Array,
    gradient: jax.Array,
    mean: jax.Array,
    square: jax.Array,
    weights: Weights,
    options: Options,
) -> tuple[jax.Array, jax.Array, Weights]:
    """Returns the new mean, square and weights; `scalars` [12] is a stacked `AdamwScalars`."""
    layout = _layout(weights, options)
    new_mean, new_square, *rest = primitive.adamw_quantized(
        scalars, gradient, mean, square, *_operands(weights), **_params(layout, options)
    )
    return new_mean, new_square, _weights(rest, weights)


def apply(applies: jax.Array, update: jax.Array, weights: Weights, options: Options) -> Weights:
    """Returns the weights plus `update`, or the old weights if `applies` [1] is 0."""
    layout = _layout(weights, options)
    results = primitive.apply_and_quantize(
        applies, update, *_operands(weights), **_params(layout, options)
    )
    return _weights(results, weights)


def _layout(weights: Weights, options: Options) -> Layout:
    return Layout(
        plain=True,
        transposed=True,
        copied=weights.copy is not None,
        part=options.part,
        parts=options.parts,
    )


def _params(layout: Layout, options: Options) -> dict[str, Any]:
    asked = dict(power_of_two=options.power_of_two, implementation=options.implementation)
    return dict(asked, layout=layout)


def _operands(weights: Weights) -> list[jax.Array]:
    copies = [] if weights.copy is None else [weights.copy]
    return [weights.master, *weights.forms, *copies]


def _weights(results: Sequence[jax.Array], old: Weights) -> Weights:
    """Returns `Weights` of a primitive's results, which are in the order of its operands."""
    master, *rest = results
    copy = None if old.copy is None else rest.pop()
    return Weights(master, tuple(rest), copy)
