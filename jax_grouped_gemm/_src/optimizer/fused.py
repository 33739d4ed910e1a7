"""Steps of matrices with their FP8 forms, whatever their shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jax_grouped_gemm._src.arguments import Implementation
from jax_grouped_gemm._src.fp8.formats import BLOCK
from jax_grouped_gemm._src.optimizer import primitive
from jax_grouped_gemm._src.optimizer.problem import Layout, is_blocked


class Weights(NamedTuple):
    """Matrices [..., k, n] in all forms that a step writes.

    Forms may be joined, see `Layout`: then they have the columns of several matrices.
    """

    master: jax.Array  # float32
    forms: tuple[jax.Array, ...]  # values, scales, transposed values, their scales
    copy: jax.Array | None = None  # the master in 16 bits


class Options(NamedTuple):
    """What a step has to know beside its operands."""

    power_of_two: bool
    implementation: Implementation
    part: int = 0  # which of the matrices of joined forms this is
    parts: int = 1  # how many there are


def adamw(
    scalars: jax.Array,
    gradient: jax.Array,
    mean: jax.Array,
    square: jax.Array,
    weights: Weights,
    options: Options,
) -> tuple[jax.Array, jax.Array, Weights]:
    """The new mean, square and weights; `scalars` [12] are an `AdamwScalars`."""
    layout = _layout(weights, options)
    stacks = (_in_blocks(x, layout) for x in (gradient, mean, square))
    new_mean, new_square, *rest = primitive.adamw_quantized(
        scalars, *stacks, *_operands(weights, layout), **_params(layout, options)
    )
    return (
        new_mean.reshape(mean.shape),
        new_square.reshape(square.shape),
        _as_before(rest, weights),
    )


def apply(applies: jax.Array, update: jax.Array, weights: Weights, options: Options) -> Weights:
    """The new weights, old + update, unless `applies` [1] is 0."""
    layout = _layout(weights, options)
    results = primitive.apply_and_quantize(
        applies,
        _in_blocks(update, layout),
        *_operands(weights, layout),
        **_params(layout, options),
    )
    return _as_before(results, weights)


def _layout(weights: Weights, options: Options) -> Layout:
    return Layout(
        plain=True,
        transposed=True,
        copied=weights.copy is not None,
        part=options.part,
        parts=options.parts,
        blocked=is_blocked(weights.master.shape),
    )


def _params(layout: Layout, options: Options) -> dict[str, Any]:
    return dict(
        layout.params, power_of_two=options.power_of_two, implementation=options.implementation
    )


def _operands(weights: Weights, layout: Layout) -> list[jax.Array]:
    copies = [] if weights.copy is None else [weights.copy]
    forms = [_form_in_blocks(x, i, layout) for i, x in enumerate(weights.forms)]
    return [
        _in_blocks(weights.master, layout),
        *forms,
        *(_in_blocks(x, layout) for x in copies),
    ]


def _as_before(results: Sequence[jax.Array], old: Weights) -> Weights:
    """Results of a primitive in the shapes of `old`."""
    master, *rest = results
    forms = tuple(x.reshape(form.shape) for x, form in zip(rest, old.forms, strict=False))
    copy = None if old.copy is None else rest[-1].reshape(old.copy.shape)
    return Weights(master.reshape(old.master.shape), forms, copy)


def _in_blocks(x: jax.Array, layout: Layout) -> jax.Array:
    """Matrices [..., k, n] as a call of `layout` takes them."""
    if not layout.blocked:
        return x
    *leading, k, n = x.shape
    return x.reshape(*leading, k // BLOCK, BLOCK, n // BLOCK, BLOCK)


def _form_in_blocks(x: jax.Array, form: int, layout: Layout) -> jax.Array:
    """One of `Weights.forms`, by its index, as a call of `layout` takes it."""
    if not layout.blocked:
        return x
    *leading, rows, columns = x.shape
    parts = layout.parts
    shape = (
        (rows // BLOCK, BLOCK, parts, columns // (parts * BLOCK), BLOCK),
        (rows, parts, columns // parts),
        (parts, rows // (parts * BLOCK), BLOCK, columns // BLOCK, BLOCK),
        (parts, rows // parts, columns),
    )[form]
    return x.reshape(*leading, *shape)
